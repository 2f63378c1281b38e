// The ops of the smooth activations in the namespace `fastact`: schemas, and which kernel serves which dispatch key.
// They serve plain tensors of 16-bit dtypes and, within a scope, of float32; all others go to PyTorch's own op.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <string>
#include <string_view>
#include <tuple>

#include "../../codes/code.h"
#include "../bits/autograd.h"
#include "../dispatch.h"
#include "../dtypes.h"
#include "../family.h"
#include "../find.h"
#include "../recipes/hook.h"
#include "../recipes/smooth.h"
#include "../strides.h"
#include "autograd.h"
#include "launch.h"

namespace fastact {
namespace {

using at::OptionalSymIntArrayRef;
using OutputAndCode = std::tuple<Tensor, Tensor>;

void check_known(const Tables* tables, const std::string& op, const Tensor& self) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      tables, op, ": expected a tensor whose activation has tables (torch.nn.functional's op serves the rest), got ",
      self.scalar_type(), " on ", self.device());
}

const Smooth& check_smooth(std::string_view name) {
  const Smooth* activation = find_smooth(name);
  TORCH_CHECK_VALUE(activation, "code_backward: expected the name of a smooth activation, got ", name);
  return *activation;
}

// Null where only PyTorch's op will do.
const Tables* tables_of(const Smooth& activation, const Tensor& self) {
  return has_kernels(self.device()) && is_half(self.scalar_type()) && is_plain(self) ? tables_for(activation, self) : nullptr;
}

// Also where PyTorch's op is faster than looking up.
const Tables* faster_tables_of(const Smooth& activation, const Tensor& self) {
  const bool is_faster = self.is_cuda() && self.numel() >= activation.of(self.scalar_type()).tabulates_from;
  return is_faster ? tables_of(activation, self) : nullptr;
}

// What the dispatcher calls for one op; `Parameters` are those beside the tensor.
template <class Op, class... Parameters>
struct SmoothImplementation {
  // Without a code.
  static Tensor value(const Tensor& self, Parameters... parameters) {
    const Smooth* activation = Op::activation(parameters...);
    const Tables* of_self = activation ? faster_tables_of(*activation, self) : nullptr;
    return of_self ? std::get<0>(encode(*activation, *of_self, self, /*with_code=*/false)) : Op::pytorch(self, parameters...);
  }

  static OutputAndCode with_code(const Tensor& self, Parameters... parameters) {
    return encode(*Op::activation(parameters...), check_tables(self, parameters...), self, /*with_code=*/true);
  }

  static OutputAndCode meta_with_code(const Tensor& self, Parameters... parameters) {
    check_with_code(self, parameters...);
    const int bits = Op::activation(parameters...)->of(self.scalar_type()).bits;
    return {
        at::empty_like(self, self.options(), elementwise_format(self)),
        at::empty_symint({code_bytes(self.sym_numel(), bits)}, self.options().dtype(at::kByte))};
  }

  static Tensor autograd(DispatchKeySet keys, const Tensor& self, Parameters... parameters) {
    const Smooth* activation = Op::activation(parameters...);
    const bool is_in_scope = recipes::is_in_scope();
    if (!activation || !is_recorded(self, is_in_scope)) {
      return Op::pytorch(self, parameters...);
    }
    const auto undifferentiated = [&] {
      return below_autograd(
          keys, [&](auto) { return value(self, parameters...); },
          [&](DispatchKeySet below) { return redispatch(below, self, parameters...); });
    };
    if (!needs_gradient_alone(self)) {
      return needs_derivative(self) ? Op::pytorch(self, parameters...) : undifferentiated();
    }
    if (is_in_scope) {
      Tensor output = undifferentiated();
      recipes::record_input(*activation, origin(parameters...), self, output);
      return output;
    }
    const Tables* of_self = tables_of(*activation, self);
    return of_self ? std::get<0>(recorded(keys, of_self, self, parameters...)) : Op::pytorch(self, parameters...);
  }

  static OutputAndCode autograd_with_code(DispatchKeySet keys, const Tensor& self, Parameters... parameters) {
    check_with_code(self, parameters...);
    return recorded(keys, /*of_self=*/nullptr, self, parameters...);
  }

  static Tensor& autograd_inplace(DispatchKeySet keys, Tensor& self, Parameters... parameters) {
    const Smooth* activation = Op::activation(parameters...);
    const bool is_in_scope = recipes::is_in_scope();
    if (!activation || !is_recorded(self, is_in_scope) || !needs_gradient_alone(self)) {
      return Op::pytorch_inplace(self, parameters...);
    }
    if (is_in_scope) {
      return self.is_non_overlapping_and_dense() ? inplace_with_input(keys, *activation, self, parameters...)
                                                 : Op::pytorch_inplace(self, parameters...);
    }
    const Tables* of_self = tables_of(*activation, self);
    if (!of_self) {
      return Op::pytorch_inplace(self, parameters...);
    }
    check_inplace(self);
    const auto [ordered, code] = below_autograd(
        keys, [&](auto) { return encode_inplace(*activation, *of_self, self); },
        [&](DispatchKeySet below) {
          auto result = redispatch_with_code(below, self, parameters...);
          self.copy_(std::get<0>(result));
          return result;
        });
    record_code_inplace(*activation, self, ordered, code);
    return self;
  }

 private:
  // Whether this package's node can take the place of PyTorch's.
  static bool is_recorded(const Tensor& self, bool is_in_scope) {
    const auto dtype = self.scalar_type();
    return is_plain(self) && (is_half(dtype) || (dtype == at::kFloat && is_in_scope));
  }

  static Origin origin(Parameters... parameters) {
    return {Op::name, Op::overload, {std::string(parameters.data(), parameters.size())...}};
  }

  static Tensor redispatch(DispatchKeySet below, const Tensor& self, Parameters... parameters) {
    static const auto op = find<Tensor(const Tensor&, Parameters...)>(Op::name);
    return op.redispatch(below, self, parameters...);
  }

  // Without a clone of what is overwritten.
  static Tensor& inplace_with_input(DispatchKeySet keys, const Smooth& activation, Tensor& self, Parameters... parameters) {
    check_inplace(self);
    NodePointer node = recipes::node_before_write(activation, origin(parameters...), self);
    below_autograd(
        keys,
        [&](auto) {
          const Tables* of_self = faster_tables_of(activation, self);
          of_self ? look_up_inplace(*of_self, self) : void(activation.forward_inplace(self));
        },
        [&](DispatchKeySet below) { self.copy_(redispatch(below, self, parameters...)); });
    recipes::record_write(self, std::move(node));
    return self;
  }

  // The tables may be null if they aren't known yet.
  static OutputAndCode recorded(DispatchKeySet keys, const Tables* of_self, const Tensor& self, Parameters... parameters) {
    const Smooth& activation = *Op::activation(parameters...);
    auto result = below_autograd(
        keys,
        [&](auto) {
          return encode(activation, of_self ? *of_self : check_tables(self, parameters...), self, /*with_code=*/true);
        },
        [&](DispatchKeySet below) { return redispatch_with_code(below, self, parameters...); });
    record_code(activation, self, std::get<0>(result), std::get<1>(result));
    return result;
  }

  static OutputAndCode redispatch_with_code(DispatchKeySet below, const Tensor& self, Parameters... parameters) {
    static const auto op = find<OutputAndCode(const Tensor&, Parameters...)>(std::string(Op::name) + "_with_code");
    return op.redispatch(below, self, parameters...);
  }

  static void check_with_code(const Tensor& self, Parameters... parameters) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        is_half(self.scalar_type()), Op::name, "_with_code: expected a float16 or bfloat16 tensor, got ", self.scalar_type());
    TORCH_CHECK_VALUE(
        Op::activation(parameters...), Op::name, "_with_code: expected parameters that PyTorch's op takes, got ",
        c10::str(parameters...));
  }

  static const Tables& check_tables(const Tensor& self, Parameters... parameters) {
    check_with_code(self, parameters...);
    const Tables* of_self = tables_of(*Op::activation(parameters...), self);
    check_known(of_self, std::string(Op::name) + "_with_code", self);
    return *of_self;
  }
};

void check_code(
    const Smooth& activation, const Tensor& grad, const Tensor& output, const Tensor& code,
    OptionalSymIntArrayRef input_strides) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      is_half(output.scalar_type()), "code_backward: expected a float16 or bfloat16 output, got ", output.scalar_type());
  TORCH_CHECK(
      grad.scalar_type() == output.scalar_type() && grad.device() == output.device() && grad.sym_sizes() == output.sym_sizes(),
      "code_backward: expected grad of the output's dtype, device and shape, got ", grad.scalar_type(), " on ", grad.device(),
      " of shape ", grad.sym_sizes(), " and ", output.scalar_type(), " on ", output.device(), " of shape ", output.sym_sizes());
  const auto bytes = code_bytes(output.sym_numel(), activation.of(output.scalar_type()).bits);
  TORCH_CHECK(
      code.scalar_type() == at::kByte && code.device() == output.device() && code.dim() == 1 && code.sym_numel() == bytes &&
          code.is_contiguous(),
      "code_backward: expected a contiguous code of ", bytes, " bytes of uint8 on ", output.device(), ", got ",
      code.scalar_type(), " on ", code.device(), " of shape ", code.sym_sizes());
  TORCH_CHECK_VALUE(
      !input_strides || input_strides->size() == static_cast<size_t>(output.dim()), "code_backward: expected strides of ",
      output.dim(), " dimensions, got ", input_strides->size());
}

// The tables of an output that is in memory.
const Tables& check_output(const Smooth& activation, const Tensor& output) {
  TORCH_CHECK(
      output.is_non_overlapping_and_dense(), "code_backward: expected a dense output, got shape ", output.sizes(),
      " and strides ", output.strides());
  const Tables* tables = tables_for(activation, output);
  check_known(tables, "code_backward", output);
  return *tables;
}

Tensor code_backward(
    const Tensor& grad, const Tensor& output, const Tensor& code, std::string_view name, OptionalSymIntArrayRef input_strides) {
  const Smooth& activation = check_smooth(name);
  check_code(activation, grad, output, code, input_strides);
  const at::IntArrayRef strides = input_strides ? C10_AS_INTARRAYREF_SLOW(*input_strides) : output.strides();
  return backward(activation, check_output(activation, output), grad, output, code, strides);
}

Tensor code_backward_meta(
    const Tensor& grad, const Tensor& output, const Tensor& code, std::string_view name, OptionalSymIntArrayRef input_strides) {
  check_code(check_smooth(name), grad, output, code, input_strides);
  const auto sizes = c10::asIntArrayRefSlowOpt(grad.sym_sizes());
  const auto incoming = c10::asIntArrayRefSlowOpt(grad.sym_strides());
  const auto saved = c10::asIntArrayRefSlowOpt(input_strides ? *input_strides : output.sym_strides());
  return sizes && incoming && saved ? grad.new_empty_strided(*sizes, elementwise_strides(*sizes, *incoming, *saved))
                                    : at::empty_like(grad);
}

// For vmap and is_grads_batched: PyTorch's ops know how to batch a gradient.
Tensor code_backward_composite(
    const Tensor& grad, const Tensor& output, const Tensor& code, std::string_view name, OptionalSymIntArrayRef input_strides) {
  const Smooth& activation = check_smooth(name);
  check_code(activation, grad, output, code, input_strides);
  const at::IntArrayRef strides = input_strides ? C10_AS_INTARRAYREF_SLOW(*input_strides) : output.strides();
  return activation.backward(grad, decode(check_output(activation, output), output, code, strides));
}

template <class Op>
void define(torch::Library& library) {
  using Impl = WithParameters<SmoothImplementation, Op>;
  const auto implement = [&](const std::string& op, DispatchKey key, auto* kernel) {
    library.impl(op.c_str(), torch::dispatch(key, kernel));
  };
  const std::string name = Op::name, inplace = name + "_", with_code = name + "_with_code", parameters = Op::parameters;

  const std::vector<at::Tag> tags = decomposed();
  library.def((name + "(Tensor self" + parameters + ") -> Tensor").c_str(), tags);
  library.def((inplace + "(Tensor(a!) self" + parameters + ") -> Tensor(a!)").c_str());
  const std::string required = Op::keyword ? std::string(", str ") + Op::keyword : "";
  library.def((with_code + "(Tensor self" + required + ") -> (Tensor output, Tensor code)").c_str());
  implement(name, DispatchKey::Autograd, &Impl::autograd);
  implement(inplace, DispatchKey::Autograd, &Impl::autograd_inplace);
  implement(with_code, DispatchKey::Autograd, &Impl::autograd_with_code);
  implement(with_code, DispatchKey::Meta, &Impl::meta_with_code);
  for (const DispatchKey backend : {DispatchKey::CPU, DispatchKey::CUDA}) {
    implement(name, backend, &Impl::value);
    implement(inplace, backend, &Op::pytorch_inplace);
    implement(with_code, backend, &Impl::with_code);
  }
  for (const DispatchKey key : {DispatchKey::CompositeImplicitAutograd, DispatchKey::FuncTorchBatched, DispatchKey::Tracer}) {
    implement(name, key, &Op::pytorch);
    implement(inplace, key, &Op::pytorch_inplace);
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(fastact, library) {
#define SMOOTH(op, F) define<F##Op>(library);
#include "../../family.def"
  library.def(
      "code_backward(Tensor grad, Tensor output, Tensor code, str activation, *, SymInt[]? input_strides=None) -> Tensor");
  const auto implement = [&](DispatchKey key, auto* kernel) { library.impl("code_backward", torch::dispatch(key, kernel)); };
  implement(DispatchKey::CPU, &code_backward);
  if (kHasCuda) {
    implement(DispatchKey::CUDA, &code_backward);
  }
  implement(DispatchKey::Meta, &code_backward_meta);
  implement(DispatchKey::FuncTorchBatched, &code_backward_composite);
  implement(DispatchKey::Batched, &code_backward_composite);
}

}  // namespace fastact
