// The composite body, for whatever the kernels can't see into (tracing, tensor subclasses, functorch's transforms, other
// devices): the value by PyTorch's own op, and as ATen ops the condition that the kernels would write as bits.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>

#include <type_traits>

#include "../activations.h"
#include "family.h"

namespace fastact {

// Calls function(f) with the struct that has the arithmetic of the tensor's dtype and device.
template <class Op, class Function, class... Parameters>
at::Tensor with_activation(const at::Tensor& self, const Function& function, Parameters... parameters) {
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, self.scalar_type(), Op::name, [&] {
    return self.is_cpu() ? function(typename Op::template Activation<scalar_t, Device::cpu>(parameters...))
                         : function(typename Op::template Activation<scalar_t, Device::cuda>(parameters...));
  });
}

inline at::Tensor in_opmath(const at::Tensor& self) {
  return self.to(at::toOpMathType(self.scalar_type()));
}

// Whether PyTorch doesn't have the op, or in torch 2.11 no way to shard it.
template <class Op>
constexpr bool is_composed = std::is_null_pointer_v<std::decay_t<decltype(Op::pytorch)>> || std::is_same_v<Op, HardshrinkOp> ||
                             std::is_same_v<Op, ThresholdOp>;

// The value as ATen ops.
template <class Op, class... Parameters>
at::Tensor composed(const at::Tensor& self, Parameters... parameters) {
  return with_activation<Op>(
      self,
      [&](const auto& f) {
        const at::Tensor x = in_opmath(self);
        if constexpr (std::decay_t<decltype(f)>::clamps) {
          return f.saturated(x).to(self.scalar_type());
        } else {
          return at::where(f.inside(x), f.linear(x), f.saturated(x)).to(self.scalar_type());
        }
      },
      parameters...);
}

inline bool holds(at::ScalarType dtype, double parameter) {
  return dtype == at::kHalf       ? static_cast<c10::Half>(static_cast<float>(parameter)) == parameter
         : dtype == at::kBFloat16 ? static_cast<c10::BFloat16>(static_cast<float>(parameter)) == parameter
                                  : true;
}

// A tensor of bool: which elements are inside.
template <class Op, class... Parameters>
at::Tensor inside(const at::Tensor& self, Parameters... parameters) {
  return with_activation<Op>(
      self,
      [&](const auto& f) {
        // What compares alike in the dtype does so there: compiled code may store what is compared, and should not in float.
        const bool alike = std::decay_t<decltype(f)>::compares_input && (holds(self.scalar_type(), parameters) && ...);
        return f.inside(alike ? self : in_opmath(self));
      },
      parameters...);
}

}  // namespace fastact
