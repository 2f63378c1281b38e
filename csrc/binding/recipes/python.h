// The interpreter's objects behind PyTorch's, and what Python gives this folder (activations_cuda/recipes/hook.py).
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include "value.h"

namespace fastact::recipes {

// The code of the functions of torch.nn.functional that call a norm's op.
struct NormFunctions {
  explicit NormFunctions(const py::dict& codes)
      : batch_norm(codes["batch_norm"]),
        instance_norm(codes["instance_norm"]),
        layer_norm(codes["layer_norm"]),
        group_norm(codes["group_norm"]) {}

  bool contains(py::handle code) const {
    return code.is(batch_norm) || code.is(instance_norm) || code.is(layer_norm) || code.is(group_norm);
  }

  py::object batch_norm, instance_norm, layer_norm, group_norm;
};

struct FromPython {
  explicit FromPython(const py::kwargs& given)
      : op_rule(given["op_rule"]),
        candidates(given["candidates"]),
        underivable(given["underivable"]),
        nothing_yet(given["nothing_yet"]),
        plain_types(given["plain_types"]),
        norm_functions(given["norm_functions"]),
        step(given["step"]),
        is_right(given["is_right"]),
        functions(given["functions"]),
        failed(given["failed"]),
        table(given["table"]),
        shape(given["shape"]),
        dtype(given["dtype"]),
        output_nr(given["output_nr"]),
        number(given["number"]) {}

  py::object op_rule;      // the class of the rules that are data
  py::object candidates;   // the class of what stands for one of several formulas
  py::object underivable;  // raised where a rule asks for what can't be derived
  py::object nothing_yet;  // raised where the hooks around the scope give nothing back yet
  py::tuple plain_types;
  NormFunctions norm_functions;
  py::object step;                     // (hook, node, output_nr, tensor, depth) -> formula, operands, arguments
  py::object is_right;                 // (hook, recipe, untried, node, tensor) -> whether the recipe gives the tensor
  py::object functions;                // this package's, by their names
  py::object failed;                   // (tensor, error): whether to raise it after all
  py::object table;                    // (formula, arguments, dtype, like) -> the table of a function of one number, or None
  py::object shape, dtype, output_nr;  // what stands among a rule's arguments for the output's own
  py::object number;                   // and among its operands for a tensor or a number
};

// Set when activations_cuda.recipes is imported.
const FromPython& from_python();
void set_from_python(const py::kwargs& given);

// The interpreter's attributes, by names that are made once.
inline py::object attribute(py::handle object, PyObject* name) {
  PyObject* const result = PyObject_GetAttr(object.ptr(), name);
  if (!result) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(result);
}

// A str that is made once and stays.
#define NAME(text)                                                  \
  ([] {                                                             \
    static PyObject* const name = PyUnicode_InternFromString(text); \
    return name;                                                    \
  }())

inline py::object wrapped(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

inline py::object wrapped(const NodePointer& node) {
  return py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(node));
}

inline py::object dtype_object(at::ScalarType dtype) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
}

py::object name_of(const torch::autograd::Node& node);
bool is_cast(const torch::autograd::Node& node);
bool is_clone(const torch::autograd::Node& node);

}  // namespace fastact::recipes
