// The ops of the namespace `fastact`: schemas, and which body serves which dispatch key.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string>
#include <utility>

#include "../activations.h"
#include "arguments.h"
#include "autograd.h"
#include "composite.h"
#include "packed.h"

namespace fastact {
namespace {

using at::Tensor;
using c10::DispatchKeySet;
using OutputAndMask = std::tuple<Tensor, Tensor>;

// Whether the kernels may read the tensor's memory as its strides say: nothing traces it, wraps it or lies between it and its
// elements (a subclass, a functorch transform, a lazy negation).
bool is_plain(const Tensor& tensor) {
  constexpr auto transparent = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
  const auto keys = tensor.key_set() - transparent;
  return keys == DispatchKeySet(c10::DispatchKey::CPU) || keys == DispatchKeySet(c10::DispatchKey::CUDA);
}

// What a line of family.def says of a member, as a type.
constexpr std::nullptr_t none = nullptr;
#define ACTIVATION(op, overload_name, F, parameter_list, pytorch_op) \
  struct F##Op {                                                     \
    template <class scalar_t>                                        \
    using Activation = F<scalar_t>;                                  \
    static constexpr const char* name = #op;                         \
    static constexpr const char* overload = #overload_name;          \
    static constexpr const char* parameters = parameter_list;        \
    static constexpr auto pytorch = pytorch_op;                      \
  };
#include "../family.def"

template <class Op>
std::string op_name(const char* suffix) {
  return std::string("fastact::") + Op::name + suffix;
}

// What the dispatcher calls for one member of the family; `Parameters` are as many doubles as its struct is made from.
template <class Op, class... Parameters>
struct Kernels {
  static Tensor pytorch(const Tensor& self, Parameters... parameters) {
    if constexpr (std::is_null_pointer_v<decltype(Op::pytorch)>) {
      TORCH_CHECK_NOT_IMPLEMENTED(false, Op::name, ": expected a floating-point tensor, got ", self.scalar_type());
    } else {
      return Op::pytorch(self, parameters...);
    }
  }

  static Tensor composite(const Tensor& self, Parameters... parameters) {
    if (belongs_to_pytorch<Op>(self, parameters...)) {
      return pytorch(self, parameters...);
    }
    return fastact::composite<Op>(self, parameters...);
  }

  template <class Device>
  static Tensor packed(const Tensor& self, Parameters... parameters) {
    if (belongs_to_pytorch<Op>(self, parameters...)) {
      return pytorch(self, parameters...);
    }
    return fastact::packed<Op, Device>(self, parameters...);
  }

  template <class Device>
  static OutputAndMask packed_with_mask(const Tensor& self, Parameters... parameters) {
    return fastact::packed_with_mask<Op, Device>(self, parameters...);
  }

  static OutputAndMask meta_with_mask(const Tensor& self, Parameters... parameters) {
    return fastact::meta_with_mask<Op>(self, parameters...);
  }

  static Tensor autograd(DispatchKeySet keys, const Tensor& self, Parameters... parameters) {
    if (!is_plain(self) || belongs_to_pytorch<Op>(self, parameters...)) {
      return composite(self, parameters...);
    }
    if (needs_derivative(self)) {
      return std::get<0>(autograd_with_mask(keys, self, parameters...));
    }
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow(op_name<Op>("").c_str(), Op::overload)
                               .template typed<Tensor(const Tensor&, Parameters...)>();
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return op.redispatch(keys & c10::after_autograd_keyset, self, parameters...);
  }

  static OutputAndMask autograd_with_mask(DispatchKeySet keys, const Tensor& self, Parameters... parameters) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow(op_name<Op>("_with_mask").c_str(), Op::overload)
                               .template typed<OutputAndMask(const Tensor&, Parameters...)>();
    OutputAndMask result;
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      result = op.redispatch(keys & c10::after_autograd_keyset, self, parameters...);
    }
    const typename Op::template Activation<double> f(parameters...);
    record(self, std::get<0>(result), std::get<1>(result), f.slopes());
    return result;
  }
};

template <class Op>
auto kernels_of() {
  using Activation = typename Op::template Activation<double>;
  if constexpr (std::is_constructible_v<Activation, double, double>) {
    return Kernels<Op, double, double>();
  } else if constexpr (std::is_constructible_v<Activation, double>) {
    return Kernels<Op, double>();
  } else {
    return Kernels<Op>();
  }
}

Tensor autograd_masked_scale(DispatchKeySet keys, const Tensor& grad, const Tensor& mask, double inside, double outside) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fastact::masked_scale", "")
                             .typed<Tensor(const Tensor&, const Tensor&, double, double)>();
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    output = op.redispatch(keys & c10::after_autograd_keyset, grad, mask, inside, outside);
  }
  record(grad, output, mask, {inside, outside});
  return output;
}

std::string without_defaults(std::string parameters) {
  for (size_t begin; (begin = parameters.find('=')) != std::string::npos;) {
    const size_t end = std::min(parameters.find(',', begin), parameters.size());
    parameters.erase(begin, end - begin);
  }
  return parameters;
}

// For Op = HardtanhOp: hardtanh(Tensor self, float min_val=-1., float max_val=1.) -> Tensor, and hardtanh_with_mask, whose
// parameters have no defaults.
template <class Op>
void define(torch::Library& library) {
  using c10::DispatchKey;
  using K = decltype(kernels_of<Op>());
  const std::string overload = Op::overload[0] == '\0' ? "" : std::string(".") + Op::overload;
  const std::string parameters = Op::parameters[0] == '\0' ? "" : std::string(", ") + Op::parameters;

  const std::string name = Op::name + overload;
  library.def((name + "(Tensor self" + parameters + ") -> Tensor").c_str());
  const auto implement = [&](const std::string& op, DispatchKey key, auto* kernel) {
    library.impl(op.c_str(), torch::dispatch(key, kernel));
  };
  implement(name, DispatchKey::CPU, &K::template packed<Cpu>);
  implement(name, DispatchKey::Autograd, &K::autograd);
  implement(name, DispatchKey::CompositeImplicitAutograd, &K::composite);
  implement(name, DispatchKey::FuncTorchBatched, &K::composite);

  const std::string with_mask = std::string(Op::name) + "_with_mask" + overload;
  const std::string required = without_defaults(parameters);
  library.def((with_mask + "(Tensor self" + required + ") -> (Tensor output, Tensor mask)").c_str());
  implement(with_mask, DispatchKey::CPU, &K::template packed_with_mask<Cpu>);
  implement(with_mask, DispatchKey::Meta, &K::meta_with_mask);
  implement(with_mask, DispatchKey::Autograd, &K::autograd_with_mask);
#if defined(FASTACT_CUDA)
  implement(name, DispatchKey::CUDA, &K::template packed<Cuda>);
  implement(with_mask, DispatchKey::CUDA, &K::template packed_with_mask<Cuda>);
#endif
}

}  // namespace

TORCH_LIBRARY(fastact, library) {
#define ACTIVATION(op, overload, F, parameters, pytorch) define<F##Op>(library);
#include "../family.def"
  library.def("masked_scale(Tensor grad, Tensor mask, float inside, float outside) -> Tensor");
}

TORCH_LIBRARY_IMPL(fastact, CPU, library) {
  library.impl("masked_scale", TORCH_FN(masked_scale<Cpu>));
}

#if defined(FASTACT_CUDA)
TORCH_LIBRARY_IMPL(fastact, CUDA, library) {
  library.impl("masked_scale", TORCH_FN(masked_scale<Cuda>));
}
#endif

TORCH_LIBRARY_IMPL(fastact, Meta, library) {
  library.impl("masked_scale", TORCH_FN(meta_masked_scale));
}

TORCH_LIBRARY_IMPL(fastact, Autograd, library) {
  library.impl("masked_scale", TORCH_FN(autograd_masked_scale));
}

}  // namespace fastact
