// What cat and stack join.
#pragma once

#include "operands.h"
#include "value.h"

namespace fastact::recipes {

// Describes what a step joined along a dimension, its operands in `formula`; false if it can't. An operand that can't be
// derived is left out if it is empty, as a cache is at first. If the others of these are at most half of the output, they are
// copied out of it and kept. An operand that was itself joined so is taken apart: what a dense block joins again and again is
// kept once.
bool by_joining(Step& step, const py::object& formula, const py::object& dim, Value& recipe);

}  // namespace fastact::recipes
