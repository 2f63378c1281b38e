// Bool tensors at 8 elements to the byte.
#pragma once

#include <ATen/core/Tensor.h>

#include "value.h"

namespace fastact::recipes {

// The bits of a dense mask, in the order of its memory, and the mask again.
at::Tensor pack_mask(const at::Tensor& mask);
at::Tensor unpack_mask(const at::Tensor& bits, at::IntArrayRef sizes, at::IntArrayRef strides);

// The value of a mask, such as those of dropout and `where`: its bits, which the hooks around the scope get too. Null for one
// that somebody holds from scope to scope, as a model's buffer, and for a small part of a larger one: it would save nothing.
py::object value_of_mask(py::handle hook, const py::object& outer, const at::Tensor& tensor, const at::Tensor& owner);

// How many masks that are alive were packed.
size_t packed_masks();

}  // namespace fastact::recipes
