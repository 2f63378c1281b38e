// What the kernels take, and who answers for the rest: PyTorch's own op, or an error that names the op.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <limits>
#include <string>
#include <type_traits>

#include "../../bits/activations.h"
#include "../../mask.h"
#include "../dtypes.h"
#include "../family.h"
#include "../find.h"
#include "../strides.h"

namespace fastact {

template <class... Parameters>
std::string join(Parameters... parameters) {
  std::string text;
  ((text += (text.empty() ? "" : " and ") + c10::str(parameters)), ...);
  return text;
}

// Infinite parameters mean to the kernels what they mean to PyTorch. NaN does not, and beyond the range of the dtype PyTorch's
// ops raise or round to infinity, one or the other: PyTorch's op answers for both.
inline bool kernels_take(at::ScalarType dtype, double parameter) {
  return std::isinf(parameter) || std::abs(parameter) <= largest(dtype);
}

// Whether PyTorch's own op must answer, since the kernels don't take this dtype or these parameters.
template <class Op, class... Parameters>
bool falls_back(const at::Tensor& self, Parameters... parameters) {
  const auto dtype = self.scalar_type();
  return !(
      kernels_take(dtype) && Op::template Activation<double>::accepts(parameters...) &&
      (kernels_take(dtype, parameters) && ...));
}

template <class Op, class... Parameters>
void check_parameters(Parameters... parameters) {
  using Activation = typename Op::template Activation<double>;
  TORCH_CHECK_VALUE(
      Activation::accepts(parameters...), Op::name, ": expected ", Activation::requirement, ", got ", join(parameters...));
}

// How PyTorch's own ops take a parameter.
template <class Parameter>
using ScalarFor = const at::Scalar&;

// PyTorch's own op, for inputs the kernels don't take. It raises PyTorch's errors; where it would raise none, this does.
template <class Op, class... Parameters>
at::Tensor pytorch(const at::Tensor& self, Parameters... parameters) {
  const auto dtype = self.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(
      dtype != at::kBool && !at::isComplexType(dtype), Op::name, ": expected a tensor of real numbers, got ", dtype);
  if constexpr (!Op::in_pytorch) {
    check_parameters<Op>(parameters...);
    TORCH_CHECK_NOT_IMPLEMENTED(kernels_take(dtype), Op::name, ": expected a floating-point tensor, got ", dtype);
    TORCH_CHECK_VALUE(false, Op::name, ": expected numbers within the range of ", dtype, ", got ", join(parameters...));
  } else {
    static const auto op = find_pytorchs<at::Tensor(const at::Tensor&, ScalarFor<Parameters>...)>(Op::name);
    at::Tensor output = op.call(self, at::Scalar(parameters)...);
    check_parameters<Op>(parameters...);
    return output;
  }
}

// For the ops that write a mask: no op of PyTorch's could step in.
template <class Op, class... Parameters>
void check_arguments_with_mask(const at::Tensor& self, Parameters... parameters) {
  const auto dtype = self.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(
      kernels_take(dtype), Op::name, "_with_mask: expected a float64, float32, float16 or bfloat16 tensor, got ", dtype);
  check_parameters<Op>(parameters...);
  TORCH_CHECK_VALUE(
      (kernels_take(dtype, parameters) && ...), Op::name, "_with_mask: expected numbers within the range of ", dtype, ", got ",
      join(parameters...));
}

inline void check_strides(const char* name, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  const auto numbers = c10::asIntArrayRefSlowOpt(strides);
  const auto lengths = c10::asIntArrayRefSlowOpt(sizes);
  TORCH_CHECK_VALUE(
      strides.size() == sizes.size() && (!numbers || !lengths || is_dense(*lengths, *numbers)), "masked_scale: expected ", name,
      " of a dense tensor of shape ", sizes, ", got ", strides);
}

inline void check_mask(
    const at::Tensor& grad, const at::Tensor& mask, at::OptionalSymIntArrayRef mask_strides,
    at::OptionalSymIntArrayRef strides) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      kernels_take(grad.scalar_type()), "masked_scale: expected grad to be float64, float32, float16 or bfloat16, got ",
      grad.scalar_type());
  TORCH_CHECK(mask.scalar_type() == at::kByte, "masked_scale: expected a mask of dtype uint8, got ", mask.scalar_type());
  TORCH_CHECK(
      mask.device() == grad.device(), "masked_scale: expected the mask on grad's device, ", grad.device(), ", got ",
      mask.device());
  const auto bytes = mask_bytes(grad.sym_numel());
  TORCH_CHECK(
      mask.dim() == 1 && mask.sym_numel() == bytes && mask.is_contiguous(), "masked_scale: expected a contiguous mask of ",
      bytes, " bytes for ", grad.sym_numel(), " elements, got shape ", mask.sym_sizes(), " and strides ", mask.sym_strides());
  for (const auto& [name, given] : {std::pair("mask_strides", mask_strides), std::pair("strides", strides)}) {
    if (given) {
      check_strides(name, grad.sym_sizes(), *given);
    }
  }
}

}  // namespace fastact
