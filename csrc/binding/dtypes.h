// PyTorch's dtypes and the kernels'.
#pragma once

#include <ATen/core/Tensor.h>

#include <limits>
#include <type_traits>

#include "../layout.h"

namespace fastact {

inline bool kernels_take(at::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
}

inline bool is_half(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16;
}

inline bool is_float_or_half(at::ScalarType dtype) {
  return dtype == at::kFloat || is_half(dtype);
}

template <class scalar_t>
constexpr Dtype dtype_of = std::is_same_v<scalar_t, double>     ? Dtype::float64
                           : std::is_same_v<scalar_t, float>    ? Dtype::float32
                           : std::is_same_v<scalar_t, at::Half> ? Dtype::float16
                                                                : Dtype::bfloat16;

inline double largest(at::ScalarType dtype) {
  const auto of = [](auto zero) { return static_cast<double>(std::numeric_limits<decltype(zero)>::max()); };
  return dtype == at::kDouble     ? of(double())
         : dtype == at::kHalf     ? of(c10::Half())
         : dtype == at::kBFloat16 ? of(c10::BFloat16())
                                  : of(float());
}

}  // namespace fastact
