// What a norm was called with and its node doesn't save: eps, and a bias that needs no gradient. The functions of
// torch.nn.functional are Python's, so while the op of one saves its tensors, its arguments are in the frame that runs.
#pragma once

#include <ATen/core/Tensor.h>

#include "python.h"

namespace fastact::recipes {

// Notes in the value of a tensor that is being saved what the op that saves it was called with. A batch norm's running
// statistics in evaluation mode are copied, since training writes to them without counting a version.
void note_call(Value& value, const at::Tensor& tensor);

// By the names of F.batch_norm's arguments, of a node; null where another than these functions called it.
py::object eps_of_call(py::handle node);
py::object bias_of_call(py::handle node);

}  // namespace fastact::recipes
