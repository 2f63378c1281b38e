#include "hook.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

#include "../devices.h"
#include "../strides.h"
#include "calls.h"
#include "computing.h"
#include "derivation.h"
#include "formulas.h"
#include "gradients/gradients.h"
#include "leaves.h"
#include "masks.h"
#include "partial.h"
#include "python.h"
#include "scalars.h"

namespace fastact::recipes {
namespace {

// SMALLEST and SMALLEST_COPY_OF_PARAMETER of recipes/hook.py, in bytes.
struct {
  int64_t any = 0, of_parameter = 0;
} smallest;

// A value that still gives what a tensor holds once the tensor is written to.
py::object before_write(const py::object& value, const at::Tensor& tensor, const py::object& outer) {
  const auto& roots = value_of(value).roots;
  const bool is_written = std::any_of(roots.begin(), roots.end(), [&](const py::object& root) {
    const at::Tensor& held = value_of(root).held;
    return held.defined() ? held.is_alias_of(tensor) : tensor.is_view();
  });
  if (value_of(value).is_recipe() && !is_written) {
    if (value_of(value).readers == 0) {  // nobody else has saved it
      value_of(value).replaced.reset();
      return value;
    }
    return recipe_of(ConfigurationOf::written_to, NAME("written to"), formulas().same, value, {}, tensor);
  }
  const at::NoGradGuard no_grad;
  const at::Tensor clone = tensor.clone();
  py::object copy = keep(clone, value_of(value).source, outer);
  value_of(copy).is_rearranged = clone.strides() != tensor.strides();
  value_of(copy).max_writes = 1;  // what follows from it may have been written once, by this op
  note(copy, tensor.grad_fn(), static_cast<uint32_t>(tensor.output_nr()));
  return copy;
}

// A view, as its base's value and a geometry; null where that saves nothing, or the hooks outside would be given more.
py::object value_of_view(py::handle hook, const py::object& outer, const at::Tensor& tensor, const at::Tensor& base) {
  const NodePointer& node = base.grad_fn();
  if (!node || !tensor.is_alias_of(base)) {  // its .data may have been set
    return {};
  }
  if (tensor.is_conj() != base.is_conj() || tensor.is_neg() != base.is_neg()) {  // a geometry says nothing of that
    return {};
  }
  if (!outer.is_none() && !is_dense(base.sizes(), base.strides())) {  // what the hooks outside give back may have other strides
    return {};
  }
  const auto output_nr = static_cast<uint32_t>(base.output_nr());
  py::object value = noted(node, output_nr);
  if (!value || !value_of(value).stands_for(base)) {
    value = replacement(hook, node, output_nr, base);
    if (!value) {
      if (!outer.is_none()) {
        return {};
      }
      value = keep(base, name_of(*node));
    }
    note(value, node, output_nr);
  }
  return value_of(value).depth < kMaxDepth ? view_of(value, tensor, base) : py::object();
}

// As factories make it: no subclass, not sparse, quantized, nested, conjugate or batched.
bool is_ordinary(py::handle hook, PyObject* object, const at::Tensor& tensor) {
  static auto& keys = *new std::unordered_map<int, c10::DispatchKeySet>();
  const auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  const auto& types = from_python().plain_types;
  if (std::none_of(types.begin(), types.end(), [&](py::handle each) { return each.ptr() == type; })) {
    return is_dry_run(hook) && tensor.layout() == at::kStrided;
  }
  if (c10::impl::dispatch_mode_enabled() || torch::jit::tracer::isTracing()) {  // which would record what the hook does
    return false;
  }
  c10::DispatchKeySet& plain = keys[static_cast<int>(tensor.device().type())];
  if (plain.empty()) {
    plain = at::empty({0}, at::TensorOptions().device(tensor.device())).key_set();
  }
  return tensor.key_set() == plain;
}

// Whether a tensor is too small to be worth computing again.
bool is_small(const at::Tensor& owner) {
  const auto bytes = static_cast<int64_t>(owner.storage().nbytes());
  if (bytes < smallest.any || bytes >= smallest.of_parameter) {  // most are, and the node needn't be asked
    return bytes < smallest.any;
  }
  const auto& node = owner.grad_fn();
  return node && is_cast(*node) && is_leaf(node->next_edge(0));
}

PyObject* called_to_pack(PyObject* hook, PyObject* object);

// Whether autograd calls a Python function, which calls the hook.
bool is_called_from_python() {
  const auto& stack = at::SavedTensorDefaultHooks::get_tls_state().stack;
  PyObject* const called = stack.empty() ? nullptr : stack.top().first.ptr(getPyInterpreter());
  return called && !(PyCFunction_Check(called) && PyCFunction_GET_FUNCTION(called) == called_to_pack);
}

// A leaf's, or that of a tensor that autograd doesn't record, such as a mask or a norm's statistics.
py::object value_without_node(py::handle hook, const py::object& outer, const at::Tensor& tensor, const at::Tensor& owner) {
  if (py::object value = given(tensor)) {
    return value;
  }
  if (tensor.scalar_type() == at::kBool && !is_small(owner)) {
    if (py::object value = value_of_mask(hook, outer, tensor, owner)) {
      return value;
    }
  }
  py::object value = keep(tensor, py::none(), outer);
  if (is_sharded_parameter(owner)) {
    value_of(value).is_private = true;
    value_of(value).copy = copy_if_small(tensor);
  }
  note_call(value_of(value), tensor, is_called_from_python());
  return value;
}

py::object pack(py::handle hook, PyObject* object, const at::Tensor& tensor) {
  const py::object outer = attribute(hook, NAME("outer"));
  if (!is_ordinary(hook, object, tensor)) {
    return keep(tensor, py::none(), outer);
  }
  const NodePointer& node = tensor.grad_fn();
  const at::Tensor owner = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
  if (!node) {
    return value_without_node(hook, outer, tensor, owner);
  }
  add_gradient_hooks_of_saved(*node);
  const auto output_nr = static_cast<uint32_t>(tensor.output_nr());
  py::object value = noted(node, output_nr);
  if (value && value_of(value).stands_for(tensor)) {
    value_of(value).is_rearranged = false;
    return value;
  }
  const bool is_written = value && value_of(value).version != version_of(tensor);  // past autograd
  const bool is_view = tensor.is_view() && owner.requires_grad() && owner.dtype() == tensor.dtype();
  const bool is_replaceable = !is_written && !is_small(owner);
  if (const NodePointer& maker = is_view ? owner.grad_fn() : node; is_replaceable && maker) {
    let_input_go(hook, *maker, owner);
  }
  value = !is_replaceable ? py::object()
          : is_view       ? value_of_view(hook, outer, tensor, owner)
                          : replacement(hook, node, output_nr, tensor);
  if (!value) {
    const bool is_of_leaf = !owner.grad_fn();  // which the hooks outside needn't have
    value = keep(tensor, name_of(*node), is_of_leaf ? py::object(py::none()) : outer);
    value_of(value).is_private = is_of_leaf && is_sharded_parameter(owner);
  }
  note(value, node, output_nr);
  if (output_nr == 1) {  // as the first of a norm's statistics
    note_call(value_of(value), tensor, is_called_from_python());
  }
  return value;
}

// Whether autograd's pack hook is called for save_before_write.
thread_local bool is_before_write = false;

// Raises it in this thread as soon as the op is done. In the main thread it is mostly what a signal's handler has raised.
void raise_later(const py::error_already_set& error) {
  const auto thread = PyThread_get_thread_ident();
  if (py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>() != thread) {
    PyThreadState_SetAsyncExc(thread, error.type().ptr());
    return;
  }
  auto pending = std::make_unique<py::error_already_set>(error);
  const auto raise = [](void* pending) {
    const std::unique_ptr<py::error_already_set> owner(static_cast<py::error_already_set*>(pending));
    owner->restore();
    return -1;
  };
  if (Py_AddPendingCall(raise, pending.get()) == 0) {
    static_cast<void>(pending.release());
  } else {  // too many are pending
    PyErr_SetInterrupt();
  }
}

// Autograd's pack hook, with the Python Hook as self. Whatever goes wrong, the tensor is kept, since an error here would leave
// a hole in the graph; but for errors of the hooks around the scope, which are as they are without it.
PyObject* called_to_pack(PyObject* hook, PyObject* object) {
  HANDLE_TH_ERRORS
  const at::Tensor& tensor = THPVariable_Unpack(object);
  const bool is_to_be_written = std::exchange(is_before_write, false);
  note_saving();
  const Packing packing;
  hooks_outside_have_raised = false;
  py::object value;
  const auto is_to_raise = [&](const py::object& error) {
    try {
      return py::cast<bool>(from_python().failed(py::handle(object), error));
    } catch (const py::error_already_set& another) {  // of who logs it, or for want of stack
      if (!another.matches(PyExc_Exception)) {
        raise_later(another);
      }
      return false;
    }
  };
  try {
    value = pack(hook, object, tensor);
  } catch (py::error_already_set& error) {
    if (hooks_outside_have_raised) {
      throw;
    }
    if (!error.matches(PyExc_Exception) || is_to_raise(error.value())) {
      raise_later(error);
    }
  } catch (const std::exception& error) {
    is_to_raise(py::str(error.what()));
  }
  if (!value) {
    value = keep(tensor, py::none(), attribute(hook, NAME("outer")));
  }
  if (is_to_be_written) {
    value = before_write(value, tensor, attribute(hook, NAME("outer")));
  }
  ++value_of(value).readers;
  return value.release().ptr();
  END_HANDLE_TH_ERRORS
}

PyMethodDef pack_method = {"pack", called_to_pack, METH_O, nullptr};

// Whether it is read by a backward that a user has written, which may write to what it alone has saved.
bool is_read_by_python() {
  const auto reader = torch::autograd::get_current_node();
  return reader && THPFunction_Check(wrapped(reader).ptr());
}

// The value's tensor or, where that shares memory with another value's and PyTorch's doesn't, a copy: a clone's recipe gives
// what was cloned.
at::Tensor unshared(const Value& value, const at::Tensor& tensor) {
  Value* base = nullptr;
  const Value* of = &value;
  const auto first_operand = [&] { return is_value(of->operands[0]) ? &value_of(of->operands[0]) : nullptr; };
  while (of->is_recipe() && of->formula.is(formulas().as_strided)) {
    of = base = first_operand();
  }
  bool is_shared = false;
  while (!is_shared && of->is_recipe() && (of = first_operand())) {
    is_shared = of->has_memory_of(tensor);
  }
  if (!is_shared || !is_read_by_python()) {
    return tensor;
  }
  if (!base) {
    return tensor.clone();
  }
  const at::Tensor whole = base->tensor(), copy = whole.clone();
  const int64_t offset = copy.storage_offset() + tensor.storage_offset() - whole.storage_offset();
  return copy.strides() == whole.strides() ? copy.as_strided(tensor.sizes(), tensor.strides(), offset) : tensor.clone();
}

// Whether a recipe has been read for the last time and alone has a tensor from which it was computed: as the half type of
// logits that a loss reads in float32, at the peak of a step.
bool may_let_go(const Value& value, const at::Tensor& computed) {
  if (!value.is_recipe() || value.readers > 1 || value.dtype == at::kBool ||
      torch::autograd::get_current_graph_task_keep_graph() || computed.is_inference() ||
      computed.key_set().has(c10::DispatchKey::Python)) {
    return false;
  }
  const auto is_alone = [&](const py::object& each) {
    const Value* const operand = is_value(each) ? &value_of(each) : nullptr;
    return operand && operand->readers == 1 && operand->held.defined() && operand->held.has_storage() &&
           operand->held.storage().use_count() == 1 && !operand->held.is_alias_of(computed);
  };
  return std::any_of(value.operands.begin(), value.operands.end(), is_alone) && !is_capturing(computed.device());
}

// Autograd's unpack hook.
PyObject* called_to_unpack(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  if (is_answered()) {
    static const auto& nothing = *new at::Tensor(at::empty({0}));
    return THPVariable_Wrap(nothing);
  }
  TORCH_CHECK_TYPE(is_value(object), "recompute: expected what its hook has packed, got ", Py_TYPE(object)->tp_name);
  note_unpacking();
  const auto owner = py::reinterpret_borrow<py::object>(object);
  Value& value = value_of(object);
  if (value.held.defined()) {
    return THPVariable_Wrap(value.compute());
  }
  std::optional<c10::InferenceMode> no_inference;  // what is computed in it would have no version
  if (c10::InferenceMode::is_enabled()) {
    no_inference.emplace(false);
  }
  const Computing computing;
  value.check_unwritten();
  if (const at::Tensor shape = shape_for_running_node(owner); shape.defined()) {
    return THPVariable_Wrap(shape);
  }
  const at::Tensor computed = value.give();
  if (may_let_go(value, computed)) {
    value.hold(computed);
    return THPVariable_Wrap(computed);
  }
  return THPVariable_Wrap(unshared(value, computed));
  END_HANDLE_TH_ERRORS
}

}  // namespace

void enter_scope(bool observes) {
  begin_observing(observes);
}

void exit_scope() {
  end_observing();
  dead_ends().forget();  // whose nodes would keep what they lead to, a deleted model's parameters among that
}

void set_smallest(int64_t any, int64_t of_parameter) {
  smallest = {any, of_parameter};
}

py::object pack_hook(const py::object& hook) {
  return py::reinterpret_steal<py::object>(PyCFunction_New(&pack_method, hook.ptr()));
}

const py::object& unpack_hook() {
  static PyMethodDef method = {"unpack", called_to_unpack, METH_O, nullptr};
  static auto& hook = *new py::object(py::reinterpret_steal<py::object>(PyCFunction_New(&method, nullptr)));
  return hook;
}

bool is_in_scope() {
  const auto& state = at::SavedTensorDefaultHooks::get_tls_state();
  return !state.stack.empty() && !state.is_tracing && !state.disabled_error_message &&
         state.stack.top().second.ptr(getPyInterpreter()) == unpack_hook().ptr();
}

py::object value_behind(const torch::autograd::SavedVariable& saved) {
  const auto hook_and_packed = saved.retrieve_unpack_hook_data();
  if (!hook_and_packed) {
    return {};
  }
  const py::handle packed = hook_and_packed->second.ptr(getPyInterpreter());
  return is_value(packed) ? py::reinterpret_borrow<py::object>(packed) : py::object();
}

torch::autograd::SavedVariable save_before_write(const at::Tensor& tensor) {
  is_before_write = true;
  const auto reset = c10::make_scope_exit([] { is_before_write = false; });  // where the hook isn't reached
  return {tensor, /*is_output=*/false};
}

}  // namespace fastact::recipes
