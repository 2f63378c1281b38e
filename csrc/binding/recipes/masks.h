// Bool tensors at 8 elements to the byte.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastact::recipes {

// The bits of a dense mask, in the order of its memory, and the mask again.
at::Tensor pack_mask(const at::Tensor& mask);
at::Tensor unpack_mask(const at::Tensor& bits, at::IntArrayRef sizes, at::IntArrayRef strides);

}  // namespace fastact::recipes
