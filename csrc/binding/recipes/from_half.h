// Float32 tensors that a half type determines: that is kept in their place, in half of the bytes.
#pragma once

#include "operands.h"
#include "value.h"

namespace fastact::recipes {

// Whether a step's tensor may be one: it was cast from a half type, is a clone, or a sum, and wasn't written to since.
bool may_come_from_half(const Step& step);

// Gives its recipe the formula, operands and arguments, where nobody kept what is in the half type: of what was cast that goes
// back to it without loss; of a sum, by `formula`, what was added. False where it can't.
bool by_half(Step& step, const py::object& formula, Value& recipe);

}  // namespace fastact::recipes
