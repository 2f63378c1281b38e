#include "value.h"

#include <c10/util/flat_hash_map.h>
#include <c10/util/hash.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <string>
#include <unordered_map>

#include "../devices.h"
#include "../strides.h"
#include "leaves.h"
#include "python.h"

namespace fastact::recipes {
namespace {

struct Object {
  PyObject_HEAD PyObject* weak_references;
  Value value;
};

struct Hash {
  template <class Key>
  size_t operator()(const Key& key) const {
    return c10::hash<Key>()(key);
  }
  size_t operator()(const Configuration& configuration) const { return c10::get_hash(at::IntArrayRef(configuration)); }
};

// Never destroyed: values outlive this library's other variables.
auto& registry() {
  static auto& values = *new ska::flat_hash_map<Output, Value*, Hash>();
  return values;
}

constexpr size_t kMaxDeadEnds = 1024;        // a scope around a whole training would collect them
constexpr uint64_t kNodesBetweenEqual = 64;  // attention's three projections make about 20

// By a recipe's first operand and its configuration, the latest.
auto& recipes_by_operand() {
  static auto& recipes = *new ska::flat_hash_map<std::pair<PyObject*, int64_t>, Value*, Hash>();
  return recipes;
}

// By the memory that they have given.
auto& givers() {
  static auto& values = *new ska::flat_hash_map<const c10::StorageImpl*, Value*>();
  return values;
}

template <class Registry, class Key>
void leave(Registry& registry, const Key& key, const Value* value) {
  const auto found = registry.find(key);
  if (found != registry.end() && found->second == value) {
    registry.erase(found);
  }
}

int64_t configuration_id_of(const at::Tensor& tensor) {
  // By its offset kernels read it in vectors or not.
  Configuration configuration = {static_cast<int64_t>(ConfigurationOf::kept_tensor), tensor.storage_offset() % 16};
  append(configuration, tensor.scalar_type(), tensor.device());
  append(configuration, tensor.sizes());
  append(configuration, tensor.strides());
  return id_of(configuration);
}

PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};

py::object object_of(Value& value) {
  auto* object = reinterpret_cast<PyObject*>(reinterpret_cast<char*>(&value) - offsetof(Object, value));
  return py::reinterpret_borrow<py::object>(object);
}

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

void Value::leave_registry() {
  if (output_.first) {
    leave(registry(), output_, this);
  }
  if (!operands.empty()) {
    leave(recipes_by_operand(), std::make_pair(operands[0].ptr(), configuration_id), this);
  }
  if (given_) {
    leave(givers(), given_->memory(), this);
  }
}

void Value::become(const Value& recipe, const at::Tensor& tensor, const py::object& source) {
  take_layout_of(tensor);
  this->source = source;
  formula = recipe.formula;
  operands = recipe.operands;
  arguments = recipe.arguments;
  roots = recipe.roots;
  depth = recipe.depth;
  fuses = recipe.fuses;
  configuration_id = recipe.configuration_id;
  replaced = torch::autograd::impl::version_counter(tensor);
  held.reset();
}

void Value::hold(const at::Tensor& computed) {
  leave(recipes_by_operand(), std::make_pair(operands[0].ptr(), configuration_id), this);
  held = computed.tensor_data();
  stream = stream_number(held);
  roots.clear();
  arguments.clear();
  operands.clear();
  formula = py::object();
  configuration_id = -1;
  depth = max_writes = 0;
  half_.reset();
}

void Value::take_layout_of(const at::Tensor& tensor) {
  version = version_of(tensor);
  set_layout(tensor.scalar_type(), tensor.device(), tensor.sizes(), tensor.strides());
}

void Value::set_layout(at::ScalarType dtype, at::Device device, at::IntArrayRef sizes, at::IntArrayRef strides) {
  this->dtype = dtype;
  this->device = device;
  this->sizes = sizes;
  this->strides = strides;
  has_strides = true;
}

bool Value::stands_for(const at::Tensor& tensor) const {
  if (version != version_of(tensor) || !is_current()) {
    return false;
  }
  if (held.defined()) {  // the tensor may have other data by now
    return is_copy ? held.dtype() == tensor.dtype() && held.sizes() == tensor.sizes() && held.strides() == tensor.strides()
                   : is_same_memory(held, tensor);
  }
  return (has_strides || outside) && tensor.sizes() == at::IntArrayRef(sizes) && tensor.strides() == at::IntArrayRef(strides);
}

bool Value::is_current() const {
  // What it replaces may have been written to where autograd doesn't see it, and others may read that.
  if (replaced && int64_t{replaced->current_version()} != version) {
    return false;
  }
  if (!is_recipe()) {
    return (held.defined() ? version_of(held) : int64_t{outside->version.current_version()}) == version;
  }
  return std::all_of(roots.begin(), roots.end(), [](const py::object& root) { return value_of(root).is_current(); });
}

bool Value::follows_from_outside() const {
  return outside ||
         std::any_of(roots.begin(), roots.end(), [](const py::object& root) { return value_of(root).outside != nullptr; });
}

void Value::check_unwritten() const {
  if (held.defined()) {
    check_version(version_of(held), &held);
  }
  if (replaced) {
    check_version(replaced->current_version());
  }
}

void Value::check_version(int64_t found, const at::Tensor* tensor) const {
  const auto output = [&] { return "output " + std::to_string(output_.second) + " of " + py::cast<std::string>(source); };
  TORCH_CHECK(
      found == version, "one of the variables needed for gradient computation has been modified by an inplace operation: [",
      tensor ? tensor->toString() : "a recipe of", " ", sizes_of(), "], which is ",
      source && !source.is_none() ? output() : "a leaf", ", is at version ", found, "; expected version ", version,
      " instead. (activations_cuda.recompute)");
}

thread_local bool hooks_outside_have_raised = false;

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

py::tuple tuple_of(const Objects& objects) {
  py::tuple result(objects.size());
  for (size_t i = 0; i < objects.size(); ++i) {
    result[i] = objects[i];
  }
  return result;
}

Objects objects_of(const py::tuple& tuple) {
  Objects result;
  for (const py::handle each : tuple) {
    result.push_back(py::reinterpret_borrow<py::object>(each));
  }
  return result;
}

py::object keep(const at::Tensor& tensor, const py::object& source, const py::object& hooks) {
  py::object object = make_value();
  Value& value = value_of(object);
  value.version = version_of(tensor);
  value.source = source;
  value.stream = stream_number(tensor);
  if (hooks.is_none()) {
    // A leaf is held itself, as autograd does: sharded training exchanges its data, and a backward that returns it as a
    // gradient must find that it has other owners, or `.grad` would take its memory. Anything else is held without its history,
    // which would make a cycle.
    const bool is_itself = tensor.is_leaf() && torch::autograd::isDifferentiableType(tensor.scalar_type());
    value.held = is_itself ? tensor : at::Tensor(tensor.tensor_data());
    return object;
  }
  value.outside = std::make_unique<Outside>(Outside{hooks, torch::autograd::impl::version_counter(tensor)});
  if (tensor.layout() == at::kStrided && !tensor.is_nested()) {
    value.take_layout_of(tensor);
    value.has_strides = is_dense(value.sizes, value.strides);  // others, as of what is expanded, the hooks needn't restore
    value.configuration_id = configuration_id_of(tensor);
    if (tensor.has_storage()) {
      value.outside->memory = tensor.storage().getWeakStorageImpl();
    }
  }
  try {
    value.outside->packed = py::tuple(hooks)[0](wrapped(tensor));
  } catch (...) {
    hooks_outside_have_raised = true;
    throw;
  }
  return object;
}

int64_t id_of(const Configuration& configuration) {
  static auto& ids = *new std::unordered_map<Configuration, int64_t, Hash>();
  return ids.emplace(configuration, static_cast<int64_t>(ids.size())).first->second;
}

void append(Configuration& configuration, at::IntArrayRef others) {
  configuration.append(others.begin(), others.end());
}

void append(Configuration& configuration, at::ScalarType dtype, c10::Device device) {
  configuration.push_back(static_cast<int64_t>(dtype));
  configuration.push_back(static_cast<int64_t>(device.type()) << 8 | (device.index() & 0xff));
}

int64_t configuration_id_of(Value& value) {
  if (value.configuration_id < 0) {
    value.configuration_id = configuration_id_of(value.held);  // others have theirs
  }
  return value.configuration_id;
}

void note(const py::object& object, const NodePointer& node, uint32_t output_nr) {
  Value& value = value_of(object);
  value.output_ = {node.get(), output_nr};
  value.node_ = weak(node);
  registry()[value.output_] = &value;
  dead_ends().forget_if_among(value.output_);
}

py::object noted(const NodePointer& node, uint32_t output_nr) {
  const auto found = registry().find({node.get(), output_nr});
  if (found == registry().end() || found->second->node_->expired()) {
    return {};
  }
  return object_of(*found->second);
}

void DeadEnds::begin_derivation(Key scope_and_rules) {
  if (scope_and_rules != scope_and_rules_ || outputs_.size() > kMaxDeadEnds) {
    scope_and_rules_ = scope_and_rules;
    forget();
  }
}

void DeadEnds::add(const NodePointer& node, uint32_t output_nr) {
  outputs_.insert_or_assign({node.get(), output_nr}, weak(node));
}

bool DeadEnds::contains(const NodePointer& node, uint32_t output_nr) const {
  const auto found = outputs_.find({node.get(), output_nr});
  return found != outputs_.end() && !found->second.expired();
}

void DeadEnds::forget_if_among(const Output& output) {
  if (outputs_.count(output) > 0) {
    forget();
  }
}

DeadEnds& dead_ends() {
  static auto& outputs = *new DeadEnds();
  return outputs;
}

at::Tensor Value::give() {
  at::Tensor result = find_or_compute(nullptr);
  // Fake tensors have no memory, and what a captured graph computes is there once it is replayed.
  const bool has_version = !result.is_inference() && !result.key_set().has(c10::DispatchKey::Python);
  if (is_recipe() && has_version && !is_capturing(result.device())) {
    if (given_) {
      leave(givers(), given_->memory(), this);
    }
    given_ = std::make_unique<const WeakTensor>(result);
    if (!output_.first) {
      givers()[given_->memory()] = this;
    }
  }
  return result;
}

py::object given(const at::Tensor& tensor) {
  const auto found = givers().find(tensor.storage().unsafeGetStorageImpl());
  const bool is_given = found != givers().end() && found->second->has_given(tensor) && !found->second->follows_from_outside();
  return is_given ? object_of(*found->second) : py::object();
}

py::object equal_or_add(Value& recipe, const torch::autograd::Node& node) {
  recipe.sequence = node.sequence_nr();
  recipe.thread = node.thread_id();
  const auto key = std::make_pair(recipe.operands[0].ptr(), recipe.configuration_id);
  const auto found = recipes_by_operand().find(key);
  if (found != recipes_by_operand().end()) {
    py::object object = object_of(*found->second);
    const Value& before = value_of(object);
    // In a backward pass a tensor is held until the last that needs it has it. Another thread's may not be verified yet, and an
    // earlier pass's may still hold what it computed of leaves that were written to since.
    const bool is_near = before.thread == recipe.thread && recipe.sequence - before.sequence < kNodesBetweenEqual &&
                         !is_of_earlier_pass(before.sequence, before.thread);
    const auto are_equal = [](const Objects& some, const Objects& others, const auto& is_same) {
      return std::equal(some.begin(), some.end(), others.begin(), others.end(), is_same);
    };
    const auto is_same = [](const py::object& a, const py::object& b) { return a.is(b); };
    // A configuration says little of numbers, of which 0.0 == -0.0, and NaN isn't itself.
    const auto is_alike = [](const py::object& a, const py::object& b) { return a.is(b) || py::repr(a).equal(py::repr(b)); };
    if (is_near && before.is_current() && are_equal(before.operands, recipe.operands, is_same) &&
        are_equal(before.arguments, recipe.arguments, is_alike)) {
      return object;
    }
  }
  recipes_by_operand()[key] = &recipe;
  return {};
}

namespace {

PyObject* get_operands(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  return tuple_of(value_of(self).operands).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* get_arguments(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  return tuple_of(value_of(self).arguments).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* get_roots(PyObject* self, void*) {
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

PyObject* get_sizes(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  return py::cast(value_of(self).sizes_of().vec()).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* or_none(py::object object) {
  return (object ? std::move(object) : py::object(py::none())).release().ptr();
}

PyObject* get_held(PyObject* self, void*) {
  HANDLE_TH_ERRORS
  const Value& value = value_of(self);
  return value.held.defined() ? THPVariable_Wrap(value.held) : or_none(value.outside ? value.outside->packed : py::object());
  END_HANDLE_TH_ERRORS
}

PyGetSetDef properties[] = {
    {"readers", [](PyObject* self, void*) { return PyLong_FromLong(value_of(self).readers); }, nullptr,
     "how many need it: hooks' results and recipes", nullptr},
    {"is_recipe", [](PyObject* self, void*) { return PyBool_FromLong(value_of(self).is_recipe()); }, nullptr, nullptr, nullptr},
    {"remembers", [](PyObject* self, void*) { return PyBool_FromLong(value_of(self).remembers()); }, nullptr,
     "whether it holds what it computed for other readers in this backward pass", nullptr},
    {"source", [](PyObject* self, void*) { return or_none(value_of(self).source); }, nullptr, "the name of the node", nullptr},
    {"held", get_held, nullptr, "what is kept: the tensor, or what the hooks around the scope made of it", nullptr},
    {"sizes", get_sizes, nullptr, nullptr, nullptr},
    {"operands", get_operands, nullptr, nullptr, nullptr},
    {"arguments", get_arguments, nullptr, nullptr, nullptr},
    {"roots", get_roots, nullptr, "the kept values that it follows from in the end", nullptr},
    {"configuration_id", [](PyObject* self, void*) { return PyLong_FromLongLong(value_of(self).configuration_id); }, nullptr,
     "an id of all that its bits depend on but elements", nullptr},
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
  type.tp_basicsize = sizeof(Object);  // of up to 512 bytes, for which Python has arenas of its own, and needs no malloc
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
