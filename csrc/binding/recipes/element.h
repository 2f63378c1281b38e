// The kernels' elements by dtype.
#pragma once

#include <c10/core/ScalarType.h>

#include "../../recipes/program.h"

namespace fastact::recipes {

// Of float32 or a half type.
inline Element element_of(at::ScalarType dtype) {
  return dtype == at::kHalf ? Element::float16 : dtype == at::kBFloat16 ? Element::bfloat16 : Element::float32;
}

}  // namespace fastact::recipes
