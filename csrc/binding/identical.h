// Comparison to the bit.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastact {

// Whether two tensors of a dtype of 16 or 32 bits are equal to the bit; NaNs of different payloads count as equal. Waits for
// the device.
inline bool is_identical(const at::Tensor& tensor, const at::Tensor& other) {
  const auto bits = tensor.element_size() == sizeof(float) ? at::kInt : at::kShort;
  const at::Tensor of_tensor = tensor.view(bits), of_other = other.view(bits);
  return of_tensor.equal(of_other) ||
         of_tensor.eq(of_other).logical_or_(tensor.isnan().logical_and_(other.isnan())).all().item<bool>();
}

}  // namespace fastact
