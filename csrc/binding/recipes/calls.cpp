#include "calls.h"

#include <ATen/core/grad_mode.h>

#include <memory>
#include <optional>
#include <utility>

#include "leaves.h"

namespace fastact::recipes {

struct NormCall {
  py::object eps;
  bool has_own_statistics;  // an instance norm, which repeats the running ones
  bool has_no_bias = false;
  std::optional<WeakTensor> bias;  // that nobody but the caller may have, if it is known
};

namespace {

// A call of a function of torch.nn.functional that runs a norm's op.
struct RunningNorm {
  py::object code;
  py::object variables;  // its frame or, since older interpreters copy all of them at once, a dict

  py::object variable(PyObject* name) const {
#if PY_VERSION_HEX >= 0x030C0000
    PyObject* const found = PyFrame_GetVar(reinterpret_cast<PyFrameObject*>(variables.ptr()), name);
#else
    PyObject* const found = PyObject_GetItem(variables.ptr(), name);
#endif
    if (!found) {
      throw py::error_already_set();
    }
    return py::reinterpret_steal<py::object>(found);
  }
};

// The function that runs, or its caller, if it is one of those.
std::optional<RunningNorm> running_norm(bool is_called_from_python) {
  PyFrameObject* const running = PyEval_GetFrame();
  if (!running) {
    return std::nullopt;
  }
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(running));
  if (is_called_from_python) {
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(running)));
  }
  if (!frame) {
    return std::nullopt;
  }
  auto* const pointer = reinterpret_cast<PyFrameObject*>(frame.ptr());
  auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(pointer)));
  if (!from_python().norm_functions.contains(code)) {
    return std::nullopt;
  }
#if PY_VERSION_HEX < 0x030C0000
  frame = attribute(frame, NAME("f_locals"));
#endif
  return RunningNorm{std::move(code), std::move(frame)};
}

bool is_number(const py::object& object) {
  return PyFloat_Check(object.ptr()) || PyLong_Check(object.ptr());
}

// Whether the function is given what vmap wraps. vmap's rule may call the op without weight and bias, and apply these itself.
bool is_transformed(const RunningNorm& norm) {
  const auto is_batched = [&](PyObject* name) {
    const py::object given = norm.variable(name);
    return THPVariable_Check(given.ptr()) && !THPVariable_Unpack(given.ptr()).has_storage();
  };
  const NormFunctions& norms = from_python().norm_functions;
  const bool has_statistics = norm.code.is(norms.batch_norm) || norm.code.is(norms.instance_norm);
  return is_batched(NAME("input")) || is_batched(NAME("weight")) || is_batched(NAME("bias")) ||
         (has_statistics && (is_batched(NAME("running_mean")) || is_batched(NAME("running_var"))));
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

void note_call(Value& value, const at::Tensor& tensor, bool is_called_from_python) {
  if (tensor.is_leaf() && tensor.requires_grad()) {
    return;
  }
  const std::optional<RunningNorm> norm = running_norm(is_called_from_python);
  if (!norm) {
    return;
  }
  const NormFunctions& norms = from_python().norm_functions;
  const bool is_instance_norm = norm->code.is(norms.instance_norm);
  const bool is_running_statistic =
      norm->code.is(norms.batch_norm) &&
      (is_tensor(norm->variable(NAME("running_mean")), tensor) || is_tensor(norm->variable(NAME("running_var")), tensor));
  if ((is_running_statistic && norm->variable(NAME("training")).ptr() != Py_False) || is_transformed(*norm)) {
    return;
  }
  if (is_running_statistic) {
    const py::object input = norm->variable(NAME("input"));
    // Otherwise copies of both and 1/std would take more than the output.
    if (THPVariable_Check(input.ptr()) && THPVariable_Unpack(input.ptr()).nbytes() > 4 * tensor.nbytes()) {
      const at::NoGradGuard no_grad;
      value.copy = keep(tensor.clone());
    }
    return;
  }
  const py::object eps = norm->variable(NAME("eps"));
  auto call = std::make_shared<NormCall>(NormCall{is_number(eps) ? eps : py::object(), is_instance_norm});
  const py::object bias = norm->variable(NAME("bias"));
  call->has_no_bias = bias.is_none();
  if (!is_instance_norm && THPVariable_Check(bias.ptr())) {  // instance norm repeats it
    const at::Tensor& given = THPVariable_Unpack(bias.ptr());
    const bool has_version = !given.is_inference();
    if (has_version && !given.requires_grad() && !is_sharded_parameter(given.is_view() ? at::Tensor(given._base()) : given)) {
      call->bias.emplace(given);
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
  if (call && call->has_no_bias) {
    return py::none();
  }
  const at::Tensor bias = call && call->bias ? call->bias->tensor() : at::Tensor();
  return bias.defined() ? keep(bias) : py::object();
}

py::object statistics_of_call(py::handle node, PyObject* name) {
  const NormCall* const call = call_of(node);
  const py::object data = attribute(attribute(node, name), NAME("data"));
  if (!call || !is_value(data)) {
    return {};
  }
  return call->has_own_statistics ? data : value_of(data).copy;
}

}  // namespace fastact::recipes
