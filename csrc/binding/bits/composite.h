// The composite path, for whatever the kernels can't see into (tracing, tensor subclasses, functorch's transforms, other
// devices): the value by PyTorch's own op, or composed of ATen's where PyTorch has none or DTensor can't shard it, and as ATen
// ops the condition that the kernels would write as bits.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/abs.h>  // this, clamp and where for the formulas of activations.h
#include <ATen/ops/arange.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <numeric>
#include <type_traits>
#include <vector>

#include "../../bits/activations.h"
#include "../../mask.h"
#include "../family.h"

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

// Whether the value is composed of ATen's ops, since PyTorch doesn't have the op or can't shard it.
template <class Op>
constexpr bool is_composed = !Op::in_pytorch || !Op::template Activation<double>::shards;

// The value as ATen ops.
template <class Op, class... Parameters>
at::Tensor composed(const at::Tensor& self, Parameters... parameters) {
  return with_activation<Op>(self, [&](const auto& f) { return f(in_opmath(self)).to(self.scalar_type()); }, parameters...);
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

// Where a mask's bits are set, which lie in the memory order of the dense `strides`.
inline at::Tensor unpacked(const at::Tensor& mask, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  const at::Tensor bit = at::arange(kMaskBits, mask.options());
  const at::Tensor bits = mask.unsqueeze(1).bitwise_right_shift(bit).bitwise_and(1).to(at::kBool);
  return bits.as_strided_symint(sizes, strides);
}

// grad times one of two slopes.
inline at::Tensor scaled(const at::Tensor& grad, const at::Tensor& is_inside, Slopes slopes) {
  const auto linear = slopes.inside == 1 ? grad : grad * slopes.inside;
  return slopes.outside == 0 ? at::where(is_inside, linear, 0) : at::where(is_inside, linear, grad * slopes.outside);
}

// The same values with other dense strides.
inline at::Tensor with_strides(const at::Tensor& self, at::IntArrayRef strides) {
  std::vector<int64_t> outer_to_inner(strides.size()), back(strides.size());
  std::iota(outer_to_inner.begin(), outer_to_inner.end(), 0);
  std::stable_sort(outer_to_inner.begin(), outer_to_inner.end(), [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  for (size_t dim = 0; dim < back.size(); ++dim) {
    back[outer_to_inner[dim]] = static_cast<int64_t>(dim);
  }
  return self.permute(outer_to_inner).clone(at::MemoryFormat::Contiguous).permute(back);
}

}  // namespace fastact
