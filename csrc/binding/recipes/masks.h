// Bool tensors at 8 elements to the byte.
#pragma once

#include <pybind11/pybind11.h>

namespace fastact::recipes {

// pack_mask(mask) -> bits, of a dense mask in the order of its memory; unpack_mask(bits, shape, strides) -> the mask.
void add_masks(pybind11::module_& module);

}  // namespace fastact::recipes
