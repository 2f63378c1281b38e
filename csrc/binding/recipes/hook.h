// The hook that sees every tensor that autograd is about to save, and gives autograd a value in its place.
//
// It is greedy: a tensor whose op has a rule, and whose operands have values, is let go; any other is kept, and is an operand
// of what follows. The rules are Python's (activations_cuda/recipes/rules.py), and so is what verifies their formulas.
#pragma once

#include <pybind11/pybind11.h>

namespace fastact::recipes {

void add_hook(pybind11::module_& module);

}  // namespace fastact::recipes
