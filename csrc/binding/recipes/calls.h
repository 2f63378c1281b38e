// What a norm was called with and its node doesn't save: eps, a bias that needs no gradient, and a batch norm's running
// statistics as they were. The functions of torch.nn.functional are Python's, so while the op of one saves its tensors, its
// arguments are in the frame that runs.
#pragma once

#include <ATen/core/Tensor.h>

#include "python.h"

namespace fastact::recipes {

// Notes in the value of a tensor that is being saved what the op that saves it was called with. A batch norm's running
// statistics in evaluation mode are copied, since training writes to them without counting a version.
// `is_called_from_python`: by a Python function, whose caller is the frame in question.
void note_call(Value& value, const at::Tensor& tensor, bool is_called_from_python);

// What the call that made a node was given; null if it isn't known, as where another than these functions called the op.
py::object eps_of_call(py::handle node);
py::object bias_of_call(py::handle node);
py::object statistics_of_call(py::handle node, PyObject* name);

}  // namespace fastact::recipes
