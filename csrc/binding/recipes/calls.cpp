#include "calls.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <memory>

#include "leaves.h"

namespace fastact::recipes {

// A bias is None, or a weak reference to a tensor, which nobody but the caller may have; null if it isn't known.
struct NormCall {
  py::object eps, bias;
  int64_t version_of_bias;
};

namespace {

// The frame of a function that calls a norm's op, which runs now or has called what wraps the hook; null if neither does.
py::object frame_of_norm() {
  const auto object = [](PyFrameObject* frame) { return reinterpret_cast<PyObject*>(frame); };
  const auto is_of_norm = [](PyFrameObject* frame) {
    const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
    return callbacks().norm_functions.contains(code);
  };
  PyFrameObject* const frame = PyEval_GetFrame();
  if (!frame || is_of_norm(frame)) {
    return py::reinterpret_borrow<py::object>(object(frame));
  }
  PyFrameObject* const caller = PyFrame_GetBack(frame);
  auto result = py::reinterpret_steal<py::object>(object(caller));
  return caller && is_of_norm(caller) ? result : py::object();
}

py::object item(const py::object& locals, PyObject* name) {
  PyObject* const found = PyObject_GetItem(locals.ptr(), name);
  if (!found) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(found);
}

bool is_tensor(const py::object& object, const at::Tensor& tensor) {
  return THPVariable_Check(object.ptr()) && THPVariable_Unpack(object.ptr()).is_same(tensor);
}

// The call whose result a saved tensor is, which is one of the statistics that every norm saves.
const NormCall* call_of(py::handle node) {
  const py::object data = attribute(attribute(node, NAME("_raw_saved_result1")), NAME("data"));
  return is_value(data) ? value_of(data).norm_call.get() : nullptr;
}

}  // namespace

void note_call(Value& value, const at::Tensor& tensor) {
  if (tensor.is_leaf() && tensor.requires_grad()) {
    return;
  }
  const py::object frame = frame_of_norm();
  if (!frame) {
    return;
  }
  const py::object code = attribute(frame, NAME("f_code")), locals = attribute(frame, NAME("f_locals"));
  const NormFunctions& norms = callbacks().norm_functions;
  const bool is_instance_norm = code.is(norms.instance_norm);
  if (code.is(norms.batch_norm) &&
      (is_tensor(item(locals, NAME("running_mean")), tensor) || is_tensor(item(locals, NAME("running_var")), tensor))) {
    if (item(locals, NAME("training")).ptr() == Py_False) {
      const py::object input = item(locals, NAME("input"));
      if (THPVariable_Check(input.ptr()) && THPVariable_Unpack(input.ptr()).nbytes() > 4 * tensor.nbytes()) {
        const at::NoGradGuard no_grad;
        value.copy = keep(tensor.clone(), py::none(), py::none());
      } else {
        value.is_private = true;  // copies of both and 1/std would take more than the output
      }
    }
    return;
  }
  auto call = std::make_shared<NormCall>(NormCall{item(locals, NAME("eps")), {}, 0});
  const py::object bias = item(locals, NAME("bias"));
  if (bias.is_none()) {
    call->bias = bias;
  } else if (!is_instance_norm && THPVariable_Check(bias.ptr())) {  // instance norm repeats it
    const at::Tensor& given = THPVariable_Unpack(bias.ptr());
    if (!given.requires_grad() && !is_freed_parameter(given)) {
      call->bias = py::weakref(bias);
      call->version_of_bias = static_cast<int64_t>(given._version());
    }
  }
  value.norm_call = std::move(call);
}

py::object eps_of_call(py::handle node) {
  const NormCall* const call = call_of(node);
  return call ? call->eps : py::object();
}

py::object bias_of_call(py::handle node) {
  const NormCall* const call = call_of(node);
  if (!call || !call->bias || call->bias.is_none()) {
    return call ? call->bias : py::object();
  }
  const py::object bias = call->bias();
  if (bias.is_none() || static_cast<int64_t>(THPVariable_Unpack(bias.ptr())._version()) != call->version_of_bias) {
    return {};
  }
  return keep(THPVariable_Unpack(bias.ptr()), py::none(), py::none());
}

}  // namespace fastact::recipes
