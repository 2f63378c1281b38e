// What Python sees of this folder: activations_cuda._C.recipes.
#pragma once

#include <pybind11/pybind11.h>

namespace fastact::recipes {

void add_recipes(pybind11::module_& module);

}  // namespace fastact::recipes
