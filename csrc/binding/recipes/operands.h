// What an op computed with, found in autograd's graph: the values of its operands, and its arguments.
//
// Null stands for what can't be derived from kept values, here and in derivation.h: exceptions cost a microsecond and more.
#pragma once

#include <vector>

#include "python.h"

namespace fastact::recipes {

// One output of one node.
struct Step {
  Step(py::handle hook, const NodePointer& node, uint32_t output_nr, const at::Tensor* tensor, int depth)
      : hook(hook), node(node), output_nr(output_nr), tensor(tensor), depth(depth) {}

  const py::object& python_node() {
    if (!python_node_) {
      python_node_ = wrapped(node);
    }
    return python_node_;
  }

  py::handle hook;
  const NodePointer& node;
  uint32_t output_nr;
  const at::Tensor* tensor;  // if it is at hand
  int depth;

 private:
  py::object python_node_;
};

// The value of the output of another node.
py::object output(Step& step, const NodePointer& node, uint32_t output_nr);

// The value of operand i, which the node may have saved under a name.
py::object operand(Step& step, size_t i, PyObject* name);

// The value, number or None behind what a node saved, or a tuple of such; null if other hooks have packed it, which aren't
// called.
py::object saved(Step& step, PyObject* name);

// What a node says about its op; in a rule also the output's own dtype, shape or index.
py::object argument(py::handle node, PyObject* name);
py::object argument(Step& step, PyObject* name);

at::DimVector sizes_of(const torch::autograd::InputMetadata& meta);

}  // namespace fastact::recipes
