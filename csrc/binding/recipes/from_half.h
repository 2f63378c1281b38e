// Float32 tensors that a half type determines: that is kept in their place, in half of the bytes.
#pragma once

#include "operands.h"
#include "value.h"

namespace fastact::recipes {

// Each of the following gives a recipe its formula, operands and arguments. False where it can't.

// A tensor that was cast from a half type which nobody kept: it goes back to that without loss. Or its clone, as group norm
// makes one of what is channels-last.
bool by_downcast(Step& step, Value& recipe);

// A sum, by `formula`, of something that is known and a tensor in a half type which nobody kept, as a residual stream under
// autocast. What was added is found anew, as far as it shows in the sum: all that is kept follows from the sum and what is
// known.
bool by_addend(Step& step, const py::object& formula, Value& recipe);

}  // namespace fastact::recipes
