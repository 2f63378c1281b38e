#include "value.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "../dtypes.h"
#include "fusion.h"
#include "masks.h"
#include "python.h"

namespace fastact::recipes {

// The values that remember their tensor until the end of a backward pass. Only the pass itself owns this, by a callback; so
// they forget at its end, even if it fails.
struct Pass {
  explicit Pass(int task) : task(task) {}
  ~Pass();
  int task;
  std::unordered_set<Value*> values;
};

namespace {

struct Object {
  PyObject_HEAD PyObject* weak_references;
  Value value;
};

struct Hash {
  size_t operator()(const Output& output) const {
    return std::hash<void*>()(output.first) ^ (output.second * 0x9e3779b97f4a7c15);
  }
  size_t operator()(const Configuration& numbers) const {
    size_t hash = numbers.size();
    for (const int64_t number : numbers) {
      hash = (hash ^ static_cast<size_t>(number)) * 0x100000001b3 + (hash >> 29);
    }
    return hash;
  }
};

// Never destroyed: values outlive this library's other variables.
auto& registry() {
  static auto& values = *new std::unordered_map<Output, Value*, Hash>();
  return values;
}

auto& passes() {
  static auto& running = *new std::unordered_map<int, Pass*>();
  return running;
}

// Outside of backward passes, what one computation needs several times.
struct Computed {
  static at::Tensor of(Value& value) {
    if (current) {
      return current->get(value);
    }
    Computed computed;
    current = &computed;
    const auto reset = c10::make_scope_exit([] { current = nullptr; });
    return computed.get(value);
  }

 private:
  at::Tensor get(Value& value) {
    const auto found = tensors.find(&value);
    return found != tensors.end() ? found->second : tensors[&value] = value.compute();
  }

  std::unordered_map<Value*, at::Tensor> tensors;
  static thread_local Computed* current;
};

thread_local Computed* Computed::current = nullptr;

int64_t current_stream(const at::Tensor& tensor) {
  return tensor.is_cuda() && !tensor.key_set().has(c10::DispatchKey::Python)
             ? c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()).id()
             : 0;
}

[[noreturn]] void raise_written(
    const std::string& kind, at::IntArrayRef sizes, const py::object& source, int64_t found, int64_t expected) {
  const std::string what =
      source && !source.is_none() ? "which is output 0 of " + py::cast<std::string>(source) : std::string("which is a leaf");
  TORCH_CHECK(
      false, "one of the variables needed for gradient computation has been modified by an inplace operation: [", kind, " ",
      sizes, "], ", what, ", is at version ", found, "; expected version ", expected, " instead. (activations_cuda.recompute)");
}

// The tensor, or a copy that has these strides, whatever they are.
at::Tensor in_strides(const at::Tensor& tensor, at::IntArrayRef strides) {
  return tensor.strides() == strides ? tensor : at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor);
}

int64_t configuration_of(const at::Tensor& tensor) {
  // By its offset kernels read it in vectors or not.
  Configuration numbers = {static_cast<int64_t>(ConfigurationOf::kept_tensor), tensor.storage_offset() % 16};
  append(numbers, tensor.scalar_type(), tensor.device());
  append(numbers, tensor.sizes());
  append(numbers, tensor.strides());
  return number_of(numbers);
}

const Formulas* known = nullptr;

// The half type that all elements of a float32 recipe came from, by movements alone, or undefined.
at::ScalarType half_of(const Value& value) {
  if (!value.is_recipe() || value.dtype != at::kFloat) {
    return at::ScalarType::Undefined;
  }
  const bool is_cast = value.formula.is(formulas().cast);
  if (!is_cast && !contains(formulas().movements, value.formula)) {
    return at::ScalarType::Undefined;
  }
  auto result = at::ScalarType::Undefined;
  for (const py::object& each : value.operands) {
    if (is_value(each)) {
      Value& operand = value_of(each);  // which a concatenation may cast itself
      const at::ScalarType dtype = is_cast || is_half(operand.dtype_of()) ? operand.dtype_of() : half_of(operand);
      if (!is_half(dtype) || (result != at::ScalarType::Undefined && result != dtype)) {
        return at::ScalarType::Undefined;
      }
      result = dtype;
    }
  }
  return result;
}

// Calls a formula. `is_new`: nobody else has the result.
at::Tensor call(PyObject* formula, c10::ArrayRef<py::object> operands, const py::object& arguments, bool* is_new) {
  c10::SmallVector<PyObject*, 8> given;
  for (const py::object& operand : operands) {
    given.push_back(operand.ptr());
  }
  for (const py::handle argument : py::reinterpret_borrow<py::tuple>(arguments)) {
    given.push_back(argument.ptr());
  }
  const auto result = py::reinterpret_steal<py::object>(PyObject_Vectorcall(formula, given.data(), given.size(), nullptr));
  if (!result) {
    throw py::error_already_set();
  }
  TORCH_CHECK_TYPE(
      THPVariable_Check(result.ptr()), "recompute: expected a tensor of a formula, got ", Py_TYPE(result.ptr())->tp_name);
  *is_new = Py_REFCNT(result.ptr()) == 1;
  return THPVariable_Unpack(result.ptr());
}

// A value all of whose elements came from a half type, in that dtype.
at::Tensor in_half(Value& value) {
  if (is_half(value.dtype_of())) {
    return value.tensor();
  }
  if (value.formula.is(formulas().cast)) {
    return value_of(value.operands[0]).tensor();
  }
  c10::SmallVector<py::object, 8> given;
  for (const py::object& each : value.operands) {
    given.push_back(is_value(each) ? py::reinterpret_steal<py::object>(THPVariable_Wrap(in_half(value_of(each)))) : each);
  }
  bool is_new = false;
  return call(value.formula.ptr(), given, value.arguments, &is_new);
}

PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};

void deallocate(PyObject* self) {
  auto* object = reinterpret_cast<Object*>(self);
  object->value.leave_registry();  // before anybody's callback may look for it
  if (object->weak_references) {
    PyObject_ClearWeakRefs(self);
  }
  object->value.~Value();
  Py_TYPE(self)->tp_free(self);
}

}  // namespace

thread_local Packing* Packing::current = nullptr;

Pass::~Pass() {
  const py::gil_scoped_acquire gil;
  passes().erase(task);
  std::vector<at::Tensor> remembered;  // which may own values themselves: freed once none of them refers to this
  for (Value* value : std::exchange(values, {})) {
    value->pass_ = nullptr;
    remembered.push_back(std::exchange(value->remembered_, at::Tensor()));
  }
}

Value::~Value() {
  if (pass_) {
    pass_->values.erase(this);
  }
}

void Value::leave_registry() {
  if (output_.first) {
    const auto found = registry().find(output_);
    if (found != registry().end() && found->second == this) {
      registry().erase(found);
    }
  }
}

void Value::take_layout_of(const at::Tensor& tensor) {
  version = static_cast<int64_t>(tensor._version());
  dtype = tensor.scalar_type();
  device = tensor.device();
  sizes = tensor.sizes();
  strides = tensor.strides();
  has_strides = true;
}

bool Value::stands_for(const at::Tensor& tensor) const {
  return version == static_cast<int64_t>(tensor._version()) &&
         (held.defined()
              ? tensor.sizes() == held.sizes() && tensor.strides() == held.strides()
              : has_strides && tensor.sizes() == at::IntArrayRef(sizes) && tensor.strides() == at::IntArrayRef(strides)) &&
         is_current();
}

bool Value::is_current() const {
  if (held.defined()) {
    return static_cast<int64_t>(held._version()) == version;
  }
  for (const py::object& root : roots) {
    const Value& kept = value_of(root);
    if (kept.held.defined() && !kept.is_current()) {
      return false;
    }
  }
  return true;
}

void Value::check_unwritten() const {
  if (held.defined() || replaced) {
    const int64_t found = held.defined() ? held._version() : replaced->current_version();
    if (found != version) {
      raise_written(
          held.defined() ? held.toString() : "a recipe of", held.defined() ? held.sizes() : at::IntArrayRef(sizes), source,
          found, version);
    }
  }
}

at::Tensor Value::tensor(bool* is_temporary) {
  if (held.defined()) {
    return compute();
  }
  if (readers < 2) {
    return compute(is_temporary);
  }
  const int task = torch::autograd::get_current_graph_task_id();
  if (task < 0) {
    return Computed::of(*this);
  }
  // Somebody's backward may have written to it.
  if (remembered_.defined() && remembered_stream_ == current_stream(remembered_) &&
      remembered_version_ == static_cast<int64_t>(remembered_._version())) {
    return remembered_;
  }
  return remember(task, compute());
}

at::Tensor Value::remember(int task, at::Tensor tensor) {
  Pass*& running = passes()[task];
  if (!running) {
    const auto pass = std::make_shared<Pass>(task);
    running = pass.get();
    torch::autograd::Engine::get_default_engine().queue_callback([pass] {});
  }
  if (pass_ && pass_ != running) {
    pass_->values.erase(this);
  }
  pass_ = running;
  pass_->values.insert(this);
  remembered_ = tensor;
  remembered_stream_ = current_stream(tensor);
  remembered_version_ = static_cast<int64_t>(tensor._version());
  return tensor;
}

at::Tensor Value::compute(bool* is_temporary) {
  if (held.defined()) {
    check_unwritten();
    if (held.is_cuda() && current_stream(held) != stream) {
      held.record_stream(c10::impl::VirtualGuardImpl(held.device().type()).getStream(held.device()));
    }
    return held;
  }
  if (held_outside) {
    const py::object result = fetch();
    return in_strides(THPVariable_Unpack(result.ptr()), strides);
  }
  if (auto fused = compute_fused(*this)) {
    if (is_temporary) {
      *is_temporary = true;
    }
    return *std::move(fused);
  }
  const bool is_back = is_cast_back(*this);
  if (is_back || (!formula.is(formulas().cast) && half_of(*this) != at::ScalarType::Undefined)) {
    const at::Tensor tensor = is_back ? in_half(value_of(operands[0])) : in_half(*this).to(at::kFloat);
    return has_strides ? in_strides(tensor, strides) : tensor;
  }
  if (formula.is(formulas().as_strided)) {
    const at::Tensor base = value_of(operands[0]).tensor();
    return base.as_strided(sizes, strides, base.storage_offset() + PyLong_AsLongLong(PyTuple_GET_ITEM(arguments.ptr(), 0)));
  }
  if (formula.is(formulas().unpack_mask)) {
    return unpack_mask(value_of(operands[0]).tensor(), sizes, strides);
  }
  bool is_new = false;
  at::Tensor tensor;
  if (formula.is(formulas().cast)) {
    const at::Tensor operand = value_of(operands[0]).tensor();
    tensor = operand.to(dtype);
    is_new = !tensor.is_same(operand);
  } else {
    tensor = apply(&is_new);
  }
  const at::Tensor strided = has_strides ? in_strides(tensor, strides) : tensor;
  if (is_temporary) {
    *is_temporary = (is_new || !strided.is_same(tensor)) && strided.storage().use_count() == 1;
  }
  return strided;
}

py::object Value::fetch() {
  const auto hooks = py::reinterpret_borrow<py::tuple>(hooks_outside);
  py::object result;
  try {
    result = hooks[1](held_outside);
  } catch (py::error_already_set& error) {
    if (!Packing::current || !error.matches(PyExc_Exception)) {
      throw;
    }
    py::raise_from(
        error, callbacks().nothing_yet.ptr(),
        "recompute: expected the hooks on saved tensors around the scope to give a tensor back, got an error");
    throw py::error_already_set();
  }
  TORCH_CHECK_TYPE(
      THPVariable_Check(result.ptr()), "recompute: expected a tensor of an unpack hook, got ", Py_TYPE(result.ptr())->tp_name);
  if (Packing::current) {
    held_outside = hooks[0](result);
  }
  return result;
}

at::Tensor Value::apply(bool* is_new) {
  PyObject* called = formula.ptr();
  c10::SmallVector<py::object, 8> given;
  bool may_write = false;
  for (size_t i = 0; i < operands.size(); ++i) {
    if (!is_value(operands[i])) {
      given.push_back(operands[i]);
      continue;
    }
    bool is_its_own = false;
    at::Tensor operand = value_of(operands[i]).tensor(&is_its_own);
    may_write = i == 0 ? is_its_own && operand.sizes() == at::IntArrayRef(sizes)
                       : may_write && operand.scalar_type() == THPVariable_Unpack(given[0].ptr()).scalar_type();
    given.push_back(py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(operand))));
  }
  if (may_write) {
    PyObject* const other = PyDict_GetItem(formulas().in_place.ptr(), called);
    called = other ? other : called;
  }
  return call(called, given, arguments, is_new);
}

py::object make_value() {
  auto* object = reinterpret_cast<Object*>(type.tp_alloc(&type, 0));
  if (!object) {
    throw py::error_already_set();
  }
  object->weak_references = nullptr;
  new (&object->value) Value();
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(object));
}

Value& value_of(py::handle object) {
  return reinterpret_cast<Object*>(object.ptr())->value;
}

bool is_value(py::handle object) {
  return Py_TYPE(object.ptr()) == &type;
}

py::object keep(const at::Tensor& tensor, const py::object& source, const py::object& hooks) {
  py::object object = make_value();
  Value& value = value_of(object);
  value.version = static_cast<int64_t>(tensor._version());
  value.source = source;
  value.stream = current_stream(tensor);
  if (hooks.is_none()) {
    // A leaf that requires a gradient is held itself, as autograd does, since sharded training exchanges its data; any other
    // tensor without its history, which would make a cycle.
    value.held = tensor.is_leaf() && tensor.requires_grad() ? tensor : at::Tensor(tensor.tensor_data());
    return object;
  }
  if (tensor.layout() == at::kStrided && !tensor.is_nested()) {
    value.take_layout_of(tensor);
    value.configuration = configuration_of(tensor);
  }
  value.hooks_outside = hooks;
  value.held_outside = py::tuple(hooks)[0](py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)));
  return object;
}

void set_formulas(Formulas given) {
  known = new Formulas(std::move(given));
}

const Formulas& formulas() {
  return *known;
}

bool is_cast_back(const Value& value) {
  return is_half(value.dtype) && value.is_recipe() && value.formula.is(formulas().cast) && is_value(value.operands[0]) &&
         half_of(value_of(value.operands[0])) == value.dtype;
}

int64_t number_of(const Configuration& configuration) {
  static auto& numbers = *new std::unordered_map<Configuration, int64_t, Hash>();
  return numbers.emplace(configuration, static_cast<int64_t>(numbers.size())).first->second;
}

void append(Configuration& numbers, at::IntArrayRef others) {
  numbers.append(others.begin(), others.end());
}

void append(Configuration& numbers, at::ScalarType dtype, c10::Device device) {
  numbers.push_back(static_cast<int64_t>(dtype));
  numbers.push_back(static_cast<int64_t>(device.type()) << 8 | (device.index() & 0xff));
}

int64_t configuration_of(Value& value) {
  if (value.configuration < 0) {
    value.configuration = configuration_of(value.held);  // others have theirs
  }
  return value.configuration;
}

void note(const py::object& object, const NodePointer& node, uint32_t number) {
  Value& value = value_of(object);
  value.output_ = {node.get(), number};
  value.node_ = weak(node);
  registry()[value.output_] = &value;
}

py::object noted(const NodePointer& node, uint32_t number) {
  const auto found = registry().find({node.get(), number});
  if (found == registry().end() || !is_alive(*found->second->node_)) {
    return {};
  }
  auto* object = reinterpret_cast<PyObject*>(reinterpret_cast<char*>(found->second) - offsetof(Object, value));
  return py::reinterpret_borrow<py::object>(object);
}

PyObject* unpack(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(is_value(object), "recompute: expected what its hook has packed, got ", Py_TYPE(object)->tp_name);
  const auto owner = py::reinterpret_borrow<py::object>(object);
  Value& value = value_of(object);
  if (value.held.defined()) {
    return THPVariable_Wrap(value.compute());
  }
  // As an op's own forward runs: below autograd and autocast.
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  value.check_unwritten();
  return THPVariable_Wrap(value.tensor());
  END_HANDLE_TH_ERRORS
}

namespace {

PyObject* operands_of(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  const auto& operands = value_of(self).operands;
  py::tuple result(operands.size());
  for (size_t i = 0; i < operands.size(); ++i) {
    result[i] = operands[i];
  }
  return result.release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* roots_of(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  const Value& value = value_of(self);
  py::list result;
  if (!value.is_recipe()) {
    result.append(py::reinterpret_borrow<py::object>(self));
  }
  for (const py::object& root : value.roots) {
    result.append(root);
  }
  return result.release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* sizes_of(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  return py::cast(value_of(self).sizes_of().vec()).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* or_none(py::object object) {
  return (object ? std::move(object) : py::object(py::none())).release().ptr();
}

PyGetSetDef properties[] = {
    {"readers", [](PyObject* self, void*) { return PyLong_FromLong(value_of(self).readers); }, nullptr,
     "how many need it: hooks' results and recipes", nullptr},
    {"is_recipe", [](PyObject* self, void*) { return PyBool_FromLong(value_of(self).is_recipe()); }, nullptr, nullptr, nullptr},
    {"remembers", [](PyObject* self, void*) { return PyBool_FromLong(value_of(self).remembers()); }, nullptr,
     "whether it holds what it computed for other readers in this backward pass", nullptr},
    {"source", [](PyObject* self, void*) { return or_none(value_of(self).source); }, nullptr, "the name of the node", nullptr},
    {"held",
     [](PyObject* self, void*) {
       const Value& value = value_of(self);
       return value.held.defined() ? THPVariable_Wrap(value.held) : or_none(value.held_outside);
     },
     nullptr, "what is kept: the tensor, or what the hooks around the scope made of it", nullptr},
    {"sizes", sizes_of, nullptr, nullptr, nullptr},
    {"operands", operands_of, nullptr, nullptr, nullptr},
    {"arguments", [](PyObject* self, void*) { return or_none(value_of(self).arguments); }, nullptr, nullptr, nullptr},
    {"roots", roots_of, nullptr, "the kept values that it follows from in the end", nullptr},
    {"configuration", [](PyObject* self, void*) { return PyLong_FromLongLong(value_of(self).configuration); }, nullptr,
     "the number of all that its formula depends on but elements", nullptr},
    {"formula", [](PyObject* self, void*) { return or_none(value_of(self).formula); },
     [](PyObject* self, PyObject* formula, void*) {
       value_of(self).formula = py::reinterpret_borrow<py::object>(formula);
       return 0;
     },
     nullptr, nullptr},
    {"fuses", [](PyObject* self, void*) { return PyBool_FromLong(value_of(self).fuses); },
     [](PyObject* self, PyObject* fuses, void*) {
       value_of(self).fuses = fuses == Py_True;
       return 0;
     },
     "whether it may be computed by this package's kernel, with others", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyObject* tensor_of(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  return THPVariable_Wrap(value_of(self).tensor());
  END_HANDLE_TH_ERRORS
}

PyObject* computed(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  return THPVariable_Wrap(value_of(self).compute());
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"tensor", tensor_of, METH_NOARGS, nullptr}, {"compute", computed, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};

}  // namespace

void add_value_type(py::module_& module) {
  type.tp_name = "activations_cuda._C.Value";
  type.tp_basicsize = sizeof(Object);
  type.tp_flags = Py_TPFLAGS_DEFAULT;
  type.tp_doc = "What stands for a saved tensor: itself, kept, or a recipe.";
  type.tp_dealloc = deallocate;
  type.tp_weaklistoffset = offsetof(Object, weak_references);
  type.tp_getset = properties;
  type.tp_methods = methods;
  if (PyType_Ready(&type) != 0) {
    throw py::error_already_set();
  }
  module.attr("Value") = py::handle(reinterpret_cast<PyObject*>(&type));
}

}  // namespace fastact::recipes
