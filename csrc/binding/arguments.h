// What the ops accept. Everything else either raises here, naming the op, or is PyTorch's own op's to handle.
#pragma once

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

#include <cmath>
#include <limits>
#include <string>

#include "../activations.h"
#include "../mask.h"

namespace fastact {

inline bool kernels_take(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
}

template <class... Parameters>
std::string join(Parameters... parameters) {
  std::string text;
  ((text += (text.empty() ? "" : " and ") + c10::str(parameters)), ...);
  return text;
}

template <class Op, class... Parameters>
void check_arguments(const at::Tensor& self, Parameters... parameters) {
  const auto dtype = self.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(
      dtype != at::kBool && !at::isComplexType(dtype), Op::name, ": expected a tensor of real numbers, got ", dtype);
  using Activation = typename Op::template Activation<double>;
  TORCH_CHECK_VALUE(
      Activation::accepts(parameters...), Op::name, ": expected ", Activation::requirement, ", got ", join(parameters...));
}

template <class T>
double largest() {
  return static_cast<double>(std::numeric_limits<T>::max());
}

// The range PyTorch's op has for parameters: the dtype's on the CPU, opmath's on other devices.
inline double parameter_range(const at::Tensor& self) {
  const auto dtype = self.is_cpu() ? self.scalar_type() : at::toOpMathType(self.scalar_type());
  return dtype == at::kDouble     ? largest<double>()
         : dtype == at::kHalf     ? largest<c10::Half>()
         : dtype == at::kBFloat16 ? largest<c10::BFloat16>()
                                  : largest<float>();
}

// NaN means nothing to the kernels' comparisons, and beyond its range PyTorch's op raises. Both are PyTorch's op's to answer.
inline bool kernels_take(const at::Tensor& self, double parameter) {
  return std::isinf(parameter) || std::abs(parameter) <= parameter_range(self);
}

// Whether PyTorch's own op must answer, since the kernels don't take this dtype or these parameters.
template <class Op, class... Parameters>
bool belongs_to_pytorch(const at::Tensor& self, Parameters... parameters) {
  check_arguments<Op>(self, parameters...);
  return !(kernels_take(self.scalar_type()) && (kernels_take(self, parameters) && ...));
}

// For the ops that write a mask: no op of PyTorch's could step in.
template <class Op, class... Parameters>
void check_arguments_with_mask(const at::Tensor& self, Parameters... parameters) {
  check_arguments<Op>(self, parameters...);
  TORCH_CHECK_NOT_IMPLEMENTED(
      kernels_take(self.scalar_type()), Op::name, "_with_mask: expected a float64, float32, float16 or bfloat16 tensor, got ",
      self.scalar_type());
  TORCH_CHECK_VALUE(
      (kernels_take(self, parameters) && ...), Op::name, "_with_mask: expected numbers within the range of ",
      self.scalar_type(), ", got ", join(parameters...));
}

inline void check_mask(const at::Tensor& grad, const at::Tensor& mask) {
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
}

}  // namespace fastact
