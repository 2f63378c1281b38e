// Rows that aren't whole vectors, of a program for a GPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include "../../recipes/program.h"

namespace fastact::recipes {

// Makes one row of several where that is one of whole vectors, as forms read them: what is the same in all rows, as the
// parameters of 27 channels, is repeated along it. `tensors` are the program's operands. Returns those that it reads in place
// of some, which must live until it is queued.
c10::SmallVector<at::Tensor, 4> join_rows(Program* program, c10::ArrayRef<at::Tensor> tensors);

}  // namespace fastact::recipes
