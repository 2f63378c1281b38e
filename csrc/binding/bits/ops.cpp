// The ops of the namespace `fastact`: schemas, and which path serves which dispatch key.
#include <ATen/ExpandUtils.h>
#include <ATen/LegacyVmapTransforms.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../dispatch.h"
#include "../family.h"
#include "../find.h"
#include "arguments.h"
#include "autograd.h"
#include "composite.h"
#include "launch.h"

namespace fastact {
namespace {

using at::OptionalSymIntArrayRef;
using at::Tensor;
using OutputAndMask = std::tuple<Tensor, Tensor>;

// Sparse and MKL-DNN tensors and nested ones of the old kind have elements that ATen's ops can't reach one by one.
bool is_strided_or_jagged(const Tensor& tensor) {
  return tensor.is_nested() ? tensor.layout() == at::kJagged : tensor.layout() == at::kStrided;
}

// Whether a tensor's history can be dropped once what replaces it in place has it.
bool may_forget_history(const Tensor& tensor) {
  return at::GradMode::is_enabled() && !tensor.is_leaf() && !tensor.is_view() && !tensor.retains_grad() &&
         !tensor._fw_grad(/*level=*/0).defined();
}

// What the dispatcher calls for one member of the family; `Parameters` are as many doubles as its struct is made from.
template <class Op, class... Parameters>
struct Implementation {
  static Derivative derivative(Parameters... parameters) {
    using Activation = typename Op::template Activation<double>;
    const Origin origin = {Op::name, Op::overload, {parameters...}};
    return {Activation(parameters...).slopes(), Activation::saves, Activation::reads_gradient_first, origin};
  }

  // Whether PyTorch's op is the whole answer, its derivative included.
  static bool composite_falls_back(const Tensor& self, Parameters... parameters) {
    return falls_back<Op>(self, parameters...) || !is_strided_or_jagged(self);
  }

  static Tensor composite(const Tensor& self, Parameters... parameters) {
    if constexpr (is_composed<Op>) {
      if (!composite_falls_back(self, parameters...)) {
        return composed<Op>(self, parameters...);
      }
    }
    return pytorch<Op>(self, parameters...);
  }

  static Tensor autograd_composite(const Tensor& self, Parameters... parameters) {
    if (!needs_derivative(self) || composite_falls_back(self, parameters...)) {
      return composite(self, parameters...);
    }
    const bool by_output = typename Op::template Activation<double>(parameters...).output_tells();
    auto [output, inside] = [&] {
      const at::AutoDispatchBelowADInplaceOrView guard;
      const Tensor output = composite(self, parameters...);
      return std::make_tuple(output, fastact::inside<Op>(by_output ? output : self, parameters...));
    }();
    record(self, output, inside, output.sym_strides(), derivative(parameters...));
    return output;
  }

  static Tensor& composite_inplace(Tensor& self, Parameters... parameters) {
    // PyTorch's op saves its input for backward, and that is about to be written to; so it does below a transform of functorch.
    constexpr DispatchKeySet transforms({DispatchKey::FuncTorchGradWrapper, DispatchKey::FuncTorchBatched});
    const bool is_transformed = self.key_set().has_any(transforms);
    const bool keeps_input = is_transformed || composite_falls_back(self, parameters...);
    check_inplace(self);
    const Tensor output = autograd_composite(keeps_input ? self.clone() : self, parameters...);
    if (may_forget_history(self)) {
      // `output` alone has the history now: copying would add zeros to the gradient of what `self` was.
      self.detach_();
    }
    return self.copy_(output);
  }

  // For TorchScript, which records PyTorch's ops: what it saves is to run where this library isn't.
  static Tensor traced(const Tensor& self, Parameters... parameters) {
    if constexpr (Op::in_pytorch) {
      return pytorch<Op>(self, parameters...);
    } else {
      return autograd_composite(self, parameters...);
    }
  }

  static Tensor& traced_inplace(Tensor& self, Parameters... parameters) {
    if constexpr (Op::in_pytorch) {
      static const auto pytorchs = c10::Dispatcher::singleton().findSchema({std::string("aten::") + Op::name + "_", ""});
      if (pytorchs) {
        return pytorchs->template typed<Tensor&(Tensor&, ScalarFor<Parameters>...)>().call(self, at::Scalar(parameters)...);
      }
      return self.copy_(traced(self.clone(), parameters...));  // PyTorch's op saves its input
    } else {
      return self.copy_(traced(self, parameters...));
    }
  }

  template <class Backend>
  static Tensor packed(const Tensor& self, Parameters... parameters) {
    if (falls_back<Op>(self, parameters...)) {
      return pytorch<Op>(self, parameters...);
    }
    return fastact::packed<Op, Backend>(self, parameters...);
  }

  template <class Backend>
  static Tensor& packed_inplace(Tensor& self, Parameters... parameters) {
    if (falls_back<Op>(self, parameters...)) {
      return composite_inplace(self, parameters...);
    }
    fastact::packed_inplace<Op, Backend>(self, parameters...);
    return self;
  }

  template <class Backend>
  static OutputAndMask packed_with_mask(const Tensor& self, Parameters... parameters) {
    check_arguments_with_mask<Op>(self, parameters...);
    return fastact::packed_with_mask<Op, Backend>(self, parameters...);
  }

  static OutputAndMask meta_with_mask(const Tensor& self, Parameters... parameters) {
    check_arguments_with_mask<Op>(self, parameters...);
    return {
        at::empty_like(self, self.options(), output_format<Op>(self)),
        at::empty_symint({mask_bytes(self.sym_numel())}, self.options().dtype(at::kByte))};
  }

  static Tensor autograd(DispatchKeySet keys, const Tensor& self, Parameters... parameters) {
    if (!is_plain(self) || falls_back<Op>(self, parameters...)) {
      return autograd_composite(self, parameters...);
    }
    if (needs_derivative(self)) {
      return std::get<0>(recorded_with_mask(keys, self, parameters...));
    }
    return below_autograd(
        keys, [&](auto backend) { return fastact::packed<Op, decltype(backend)>(self, parameters...); },
        [&](DispatchKeySet below) {
          static const auto op = find<Tensor(const Tensor&, Parameters...)>(Op::name, Op::overload);
          return op.redispatch(below, self, parameters...);
        });
  }

  static OutputAndMask autograd_with_mask(DispatchKeySet keys, const Tensor& self, Parameters... parameters) {
    check_arguments_with_mask<Op>(self, parameters...);
    return recorded_with_mask(keys, self, parameters...);
  }

  static Tensor& autograd_inplace(DispatchKeySet keys, Tensor& self, Parameters... parameters) {
    if (!is_plain(self) || falls_back<Op>(self, parameters...)) {
      return composite_inplace(self, parameters...);
    }
    check_inplace(self);
    if (needs_derivative(self)) {
      const auto [ordered, mask] = below_autograd(
          keys, [&](auto backend) { return packed_inplace_with_mask<Op, decltype(backend)>(self, parameters...); },
          [&](DispatchKeySet below) {
            auto result = redispatch_with_mask(below, self, parameters...);
            self.copy_(std::get<0>(result));
            return result;
          });
      record_inplace(self, ordered, mask, derivative(parameters...));
    } else {
      below_autograd(
          keys, [&](auto backend) { fastact::packed_inplace<Op, decltype(backend)>(self, parameters...); },
          [&](DispatchKeySet below) { redispatch_inplace(below, self, parameters...); });
      increment_version(self);
    }
    return self;
  }

  // Where autograd itself is out of the way (inference mode), the tensor's version counts on all the same.
  static Tensor& version_inplace(DispatchKeySet keys, Tensor& self, Parameters... parameters) {
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      redispatch_inplace(keys & c10::after_ADInplaceOrView_keyset, self, parameters...);
    }
    increment_version(self);
    return self;
  }

 private:
  static OutputAndMask recorded_with_mask(DispatchKeySet keys, const Tensor& self, Parameters... parameters) {
    auto result = below_autograd(
        keys, [&](auto backend) { return fastact::packed_with_mask<Op, decltype(backend)>(self, parameters...); },
        [&](DispatchKeySet below) { return redispatch_with_mask(below, self, parameters...); });
    auto& [output, mask] = result;
    record(self, output, mask, output.sym_strides(), derivative(parameters...));
    return result;
  }

  static OutputAndMask redispatch_with_mask(DispatchKeySet below, const Tensor& self, Parameters... parameters) {
    static const auto op =
        find<OutputAndMask(const Tensor&, Parameters...)>(std::string(Op::name) + "_with_mask", Op::overload);
    return op.redispatch(below, self, parameters...);
  }

  static void redispatch_inplace(DispatchKeySet below, Tensor& self, Parameters... parameters) {
    static const auto op = find<Tensor&(Tensor&, Parameters...)>(std::string(Op::name) + "_", Op::overload);
    op.redispatch(below, self, parameters...);
  }
};

template <class Backend>
Tensor masked_scale(
    const Tensor& grad, const Tensor& mask, double inside, double outside, OptionalSymIntArrayRef mask_strides,
    OptionalSymIntArrayRef strides) {
  check_mask(grad, mask, mask_strides, strides);
  const auto numbers = [](OptionalSymIntArrayRef symbols) {
    return symbols ? at::OptionalIntArrayRef(C10_AS_INTARRAYREF_SLOW(*symbols)) : at::OptionalIntArrayRef();
  };
  return packed_backward<Backend>(grad, mask, inside, outside, numbers(mask_strides), numbers(strides));
}

Tensor masked_scale_meta(
    const Tensor& grad, const Tensor& mask, double, double, OptionalSymIntArrayRef mask_strides,
    OptionalSymIntArrayRef strides) {
  check_mask(grad, mask, mask_strides, strides);
  return strides ? grad.new_empty_strided_symint(grad.sym_sizes(), *strides)
                 : at::empty_like(grad, grad.options(), elementwise_format(grad));
}

// The strides in whose memory order a mask lies.
c10::SymDimVector order_of(const Tensor& grad, OptionalSymIntArrayRef mask_strides, OptionalSymIntArrayRef strides) {
  const auto dense = at::infer_dense_strides(grad.sizes(), grad.strides());
  return c10::SymDimVector(mask_strides ? *mask_strides : strides ? *strides : c10::fromIntArrayRefSlow(dense));
}

// For vmap, which knows how to batch ATen's ops.
Tensor masked_scale_composite(
    const Tensor& grad, const Tensor& mask, double inside, double outside, OptionalSymIntArrayRef mask_strides,
    OptionalSymIntArrayRef strides) {
  check_mask(grad, mask, mask_strides, strides);
  const Tensor is_inside = unpacked(mask, grad.sym_sizes(), order_of(grad, mask_strides, strides));
  const Tensor output = scaled(grad, is_inside, {inside, outside});
  return strides ? with_strides(output, C10_AS_INTARRAYREF_SLOW(*strides)) : output;
}

// For is_grads_batched, whose batched tensors know fewer of ATen's ops: of the tensor behind them, with the batch in front.
Tensor masked_scale_batched(
    const Tensor& grad, const Tensor& mask, double inside, double outside, OptionalSymIntArrayRef mask_strides,
    OptionalSymIntArrayRef strides) {
  const at::VmapPhysicalView batch = at::MultiBatchVmapTransform::logicalToPhysical(grad);
  const Tensor is_inside = unpacked(mask, grad.sym_sizes(), order_of(grad, mask_strides, strides));
  return batch.getPhysicalToLogicalMap().apply(scaled(batch.tensor(), is_inside, {inside, outside}));
}

Tensor masked_scale_autograd(
    DispatchKeySet keys, const Tensor& grad, const Tensor& mask, double inside, double outside,
    OptionalSymIntArrayRef mask_strides, OptionalSymIntArrayRef strides) {
  Tensor output = below_autograd(
      keys, [&](auto backend) { return masked_scale<decltype(backend)>(grad, mask, inside, outside, mask_strides, strides); },
      [&](DispatchKeySet below) {
        static const auto op =
            find<Tensor(const Tensor&, const Tensor&, double, double, OptionalSymIntArrayRef, OptionalSymIntArrayRef)>(
                "masked_scale");
        return op.redispatch(below, grad, mask, inside, outside, mask_strides, strides);
      });
  const Derivative derivative = {{inside, outside}, Saves::output, /*reads_gradient_first=*/true, /*origin=*/{}};
  record(grad, output, mask, mask_strides ? *mask_strides : output.sym_strides(), derivative);
  return output;
}

std::string without_defaults(std::string parameters) {
  for (size_t begin; (begin = parameters.find('=')) != std::string::npos;) {
    const size_t end = std::min(parameters.find(',', begin), parameters.size());
    parameters.erase(begin, end - begin);
  }
  return parameters;
}

// For Op = HardtanhOp: hardtanh(Tensor self, float min_val=-1., float max_val=1.) -> Tensor, hardtanh_, which works in place,
// and hardtanh_with_mask, whose parameters have no defaults.
template <class Op>
void define(torch::Library& library) {
  using Impl = WithParameters<Implementation, Op>;
  const std::string overload = Op::overload[0] == '\0' ? "" : std::string(".") + Op::overload;
  const std::string parameters = Op::parameters[0] == '\0' ? "" : std::string(", ") + Op::parameters;
  const auto implement = [&](const std::string& op, DispatchKey key, auto* kernel) {
    library.impl(op.c_str(), torch::dispatch(key, kernel));
  };

  const std::string name = Op::name + overload;
  const std::vector<at::Tag> tags = decomposed();
  library.def((name + "(Tensor self" + parameters + ") -> Tensor").c_str(), tags);
  implement(name, DispatchKey::CPU, &Impl::template packed<Cpu>);
  implement(name, DispatchKey::Autograd, &Impl::autograd);
  // The dispatcher prefers it to Autograd's on backends without a kernel here: meta, jagged tensors.
  implement(name, DispatchKey::CompositeImplicitAutograd, &Impl::autograd_composite);
  implement(name, DispatchKey::FuncTorchBatched, &Impl::composite);
  implement(name, DispatchKey::Tracer, &Impl::traced);

  const std::string inplace = std::string(Op::name) + "_" + overload;
  library.def((inplace + "(Tensor(a!) self" + parameters + ") -> Tensor(a!)").c_str());
  implement(inplace, DispatchKey::CPU, &Impl::template packed_inplace<Cpu>);
  implement(inplace, DispatchKey::ADInplaceOrView, &Impl::version_inplace);
  implement(inplace, DispatchKey::Autograd, &Impl::autograd_inplace);
  implement(inplace, DispatchKey::CompositeImplicitAutograd, &Impl::composite_inplace);
  implement(inplace, DispatchKey::FuncTorchBatched, &Impl::composite_inplace);
  implement(inplace, DispatchKey::Tracer, &Impl::traced_inplace);

  const std::string with_mask = std::string(Op::name) + "_with_mask" + overload;
  const std::string required = without_defaults(parameters);
  library.def((with_mask + "(Tensor self" + required + ") -> (Tensor output, Tensor mask)").c_str());
  implement(with_mask, DispatchKey::CPU, &Impl::template packed_with_mask<Cpu>);
  implement(with_mask, DispatchKey::Meta, &Impl::meta_with_mask);
  implement(with_mask, DispatchKey::Autograd, &Impl::autograd_with_mask);
  if constexpr (kHasCuda) {
    implement(name, DispatchKey::CUDA, &Impl::template packed<Cuda>);
    implement(inplace, DispatchKey::CUDA, &Impl::template packed_inplace<Cuda>);
    implement(with_mask, DispatchKey::CUDA, &Impl::template packed_with_mask<Cuda>);
  }
}

}  // namespace

TORCH_LIBRARY(fastact, library) {
#define ACTIVATION(op, overload, F, parameters, in_pytorch) define<F##Op>(library);
#include "../../family.def"
  library.def(
      "masked_scale(Tensor grad, Tensor mask, float inside, float outside, *, SymInt[]? mask_strides=None, "
      "SymInt[]? strides=None) -> Tensor");
  const auto implement = [&](DispatchKey key, auto* kernel) { library.impl("masked_scale", torch::dispatch(key, kernel)); };
  implement(DispatchKey::CPU, &masked_scale<Cpu>);
  if constexpr (kHasCuda) {
    implement(DispatchKey::CUDA, &masked_scale<Cuda>);
  }
  implement(DispatchKey::Meta, &masked_scale_meta);
  implement(DispatchKey::Autograd, &masked_scale_autograd);
  implement(DispatchKey::FuncTorchBatched, &masked_scale_composite);
  implement(DispatchKey::Batched, &masked_scale_batched);
}

}  // namespace fastact
