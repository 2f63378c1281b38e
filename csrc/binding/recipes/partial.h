// What ops save of a tensor for less than its elements: losses, gather and pooling for its shape, ReLU for its signs.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function.h>

#include "value.h"

namespace fastact::recipes {

// What the node that runs is given of a value of which it only reads the shape: a tensor without memory. Undefined if that
// won't do.
at::Tensor shape_for_running_node(py::handle object);

// Called before the output of a node is saved. If it pools, and nothing but the node and maybe a ReLU before it has its input,
// that is let go: the output is smaller. The value becomes a recipe for zeros, or for a one where ReLU's gradient passes.
void let_input_go(py::handle hook, torch::autograd::Node& node, const at::Tensor& output);

// A ReLU's signs, as the mask that this package's ReLU saves, if those of the value are kept, and have the gradient's layout.
at::Tensor signs_of(Value& value, const at::Tensor& grad);

}  // namespace fastact::recipes
