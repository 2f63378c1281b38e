#include "hook.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <typeindex>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "../../torch_version.h"
#include "../dtypes.h"
#include "../origin.h"
#include "fusion.h"
#include "masks.h"
#include "value.h"

namespace fastact::recipes {
namespace {

using torch::autograd::Node;

// What Python gives this file, see recipes/hook.py.
struct Callbacks {
  explicit Callbacks(const py::kwargs& given)
      : rule_of_op(given["rule_of_op"]),
        of_all_outputs(given["of_all_outputs"]),
        underivable(given["underivable"]),
        plain_types(given["plain_types"]),
        step(given["step"]),
        is_right(given["is_right"]),
        functions(given["functions"]),
        same(given["same"]),
        failed(given["failed"]),
        cast_node(py::str(given["cast_node"])),
        shape(given["shape"]),
        dtype(given["dtype"]) {}

  py::object rule_of_op;      // the class of the rules that are data
  py::object of_all_outputs;  // names of the nodes whose rules are for every output
  py::object underivable;     // the exception
  py::tuple plain_types;
  py::object step;          // (hook, node, number, tensor, depth) -> formula, operands, arguments, is_assumed
  py::object is_right;      // (hook, recipe, untried, node, tensor) -> whether the recipe gives the tensor
  py::object functions;     // this package's, by their names
  py::object same;          // the formula of copies
  py::object failed;        // (tensor, error)
  py::str cast_node;        // the name of a cast's node
  py::object shape, dtype;  // what stands among a rule's arguments for the output's own
};

Callbacks* callbacks = nullptr;

// In bytes, the smallest tensors that are replaced.
struct {
  int64_t any = 0, of_parameter = 0;
} smallest;

// The formula that fits, None if none does, and whether the kernel's has the same bits.
struct Choice {
  py::object formula;
  bool fuses;
};

// By a recipe's configuration.
auto& chosen() {
  static auto& choices = *new std::unordered_map<int64_t, Choice>();
  return choices;
}

// While a recipe is made: those that haven't been verified, with their formulas as the rules give them, and those of its
// operands that nobody has saved.
struct Derivation {
  Derivation() : outer(current) { current = this; }
  ~Derivation() { current = outer; }

  std::vector<std::pair<py::object, py::object>> untried;
  std::map<Output, std::pair<py::object, NodePointer>> between;
  Derivation* outer;
  static thread_local Derivation* current;
};

thread_local Derivation* Derivation::current = nullptr;

// The interpreter's attributes, by names that are made once.
py::object attribute(py::handle object, PyObject* name) {
  PyObject* const result = PyObject_GetAttr(object.ptr(), name);
  if (!result) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(result);
}

#define NAME(text)                                                  \
  ([] {                                                             \
    static PyObject* const name = PyUnicode_InternFromString(text); \
    return name;                                                    \
  }())

py::object wrapped(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

py::object wrapped(const NodePointer& node) {
  return py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(node));
}

py::object dtype_object(at::ScalarType dtype) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
}

py::object name_of(const Node& node) {
  static auto& names = *new std::unordered_map<std::type_index, py::object>();
  const auto known = names.find(typeid(node));
  if (known != names.end()) {
    return known->second;
  }
  py::object name = py::str(node.name());
  if (std::string_view(typeid(node).name()).find("PyNode") == std::string_view::npos) {  // one class for all of Python's
    names.emplace(typeid(node), name);
  }
  return name;
}

// One output of one node.
struct Step {
  Step(py::handle hook, const NodePointer& node, uint32_t number, const at::Tensor* tensor, int depth)
      : hook(hook), node(node), number(number), tensor(tensor), depth(depth) {}

  const py::object& python() {
    if (!python_) {
      python_ = wrapped(node);
    }
    return python_;
  }

  py::handle hook;
  const NodePointer& node;
  uint32_t number;
  const at::Tensor* tensor;  // if it is at hand
  int depth;

 private:
  py::object python_;
};

py::object derive(Step step);

// Null stands for what can't be derived from kept values, here and below: exceptions cost a microsecond and more.

// Whether FSDP has sharded modules: FSDP2 some, or FSDP1, whose parameters are views of a flat one, perhaps some. Either frees
// a module's parameters after its forward pass, until the backward pass reaches it. So a parameter's value is private to what
// saved it, which reads it where it is there again; any other gets a copy, made while it is there.
struct Sharding {
  bool is_there, may_be_flat;
} sharding = {false, false};

// Whether it leads to a leaf of the graph.
bool is_leaf(const torch::autograd::Edge& edge) {
  const Node* const node = edge.function.get();
  return node && typeid(*node) == typeid(torch::autograd::AccumulateGrad);
}

bool is_parameter(const at::Tensor& tensor) {
  const py::object object = wrapped(tensor);
  return Py_TYPE(object.ptr()) != reinterpret_cast<PyTypeObject*>(THPVariableClass);
}

bool is_freed(const at::Tensor& parameter) {
  return sharding.is_there || (sharding.may_be_flat && py::hasattr(wrapped(parameter), "_is_flat_param"));
}

bool is_freed_parameter(const at::Tensor& leaf) {
  return (sharding.is_there || sharding.may_be_flat) && is_parameter(leaf) && is_freed(leaf);
}

// A copy of a norm's weight or bias, or null: of what is large, or freed already.
py::object copy_of(const at::Tensor& parameter) {
  const auto sizes = parameter.sizes();
  const bool is_small = std::count_if(sizes.begin(), sizes.end(), [](int64_t size) { return size > 1; }) < 2;
  const at::NoGradGuard no_grad;
  return is_small && parameter.storage().nbytes() > 0 ? keep(parameter.clone(), py::none(), py::none()) : py::object();
}

bool is_private(const Value& value) {
  return value.is_private ||
         std::any_of(value.roots.begin(), value.roots.end(), [](const py::object& root) { return value_of(root).is_private; });
}

// The value of a parameter, which is a leaf of the graph.
py::object find_leaf(const at::Tensor& parameter, const Node& reader, const NodePointer& node, uint32_t number, int depth) {
  if (!is_freed(parameter)) {
    py::object value = keep(parameter, py::none(), py::none());
    note(value, node, number);
    return value;
  }
  if (depth > 1 || !name_of(reader).equal(callbacks->cast_node)) {
    return sharding.is_there ? copy_of(parameter) : py::object();
  }
  py::object value = keep(parameter, py::none(), py::none());  // a module's own weight, cast
  value_of(value).is_private = true;
  return value;
}

// The value of an operand: somebody keeps it, it is a parameter, or it follows from such.
py::object find(py::handle hook, const Node& reader, const NodePointer& node, uint32_t number, int depth) {
  py::object value = noted(node, number);
  if (!value && Derivation::current) {
    auto& between = Derivation::current->between;
    const auto found = between.find({node.get(), number});
    if (found != between.end()) {
      value = found->second.first;
    }
  }
  if (!value) {
    if (is_leaf({node, number})) {
      return find_leaf(static_cast<const torch::autograd::AccumulateGrad&>(*node).variable, reader, node, number, depth);
    }
    value = derive({hook, node, number, nullptr, depth});
    if (value && Derivation::current) {
      Derivation::current->between[{node.get(), number}] = {value, node};
    }
  } else if (!value_of(value).is_current() || is_private(value_of(value))) {
    return {};
  }
  return value;
}

NodePointer node_behind(py::handle node) {
  TORCH_CHECK_TYPE(
      torch::autograd::THPCppFunction_Check(node.ptr()), "recompute: expected a node of autograd's graph, got ",
      Py_TYPE(node.ptr())->tp_name);
  return reinterpret_cast<torch::autograd::THPCppFunction*>(node.ptr())->cdata;
}

const py::object& unpack_hook() {
  static PyMethodDef method = {"unpack", unpack, METH_O, nullptr};
  static auto& hook = *new py::object(py::reinterpret_steal<py::object>(PyCFunction_New(&method, nullptr)));
  return hook;
}

// The value, number or None behind what a node saved. Other hooks than this one, which may have seen it, aren't called.
py::object saved(py::handle node, PyObject* name) {
  const py::object raw = attribute(node, name), data = attribute(raw, NAME("data"));
  if (is_value(data)) {
    const Value& value = value_of(data);
    return value.is_private ? value.copy : value.is_current() && !is_private(value) ? data : py::object();
  }
  if (!attribute(raw, NAME("unpack_hook")).is_none()) {
    return {};
  }
  if (THPVariable_Check(data.ptr())) {
    // A number in an expression, as 2 in x * 2, is a tensor that hooks don't see.
    const at::Tensor& tensor = THPVariable_Unpack(data.ptr());
    const auto dtype = tensor.scalar_type();
    const bool is_number =
        tensor.dim() == 0 && tensor.is_cpu() && (dtype == at::kDouble || dtype == at::kLong || dtype == at::kBool);
    return is_number ? py::object(data.attr("item")()) : py::object();  // else saved before the scope
  }
  return data;
}

// The value of operand i, which the node may have saved under a name.
py::object operand(Step& step, size_t i, PyObject* name) {
  const torch::autograd::Edge& edge = step.node->next_edge(i);
  // A sharded parameter may be freed by now, but what was saved of it has a copy.
  const bool is_saved = name && sharding.is_there && is_leaf(edge);
  if (edge.function && !is_saved) {
    return find(step.hook, *step.node, edge.function, edge.input_nr, step.depth + 1);
  }
  return name ? saved(step.python(), name) : py::object();
}

// Nodes hand out negative dimensions as unsigned numbers.
py::object with_sign(py::object argument) {
  if (PyLong_CheckExact(argument.ptr())) {
    int overflow = 0;
    PyLong_AsLongLongAndOverflow(argument.ptr(), &overflow);
    if (overflow > 0) {
      return py::int_(static_cast<int64_t>(PyLong_AsUnsignedLongLong(argument.ptr())));
    }
  } else if (PyTuple_CheckExact(argument.ptr())) {
    const auto items = py::reinterpret_borrow<py::tuple>(argument);
    py::tuple result(items.size());
    for (size_t i = 0; i < items.size(); ++i) {
      result[i] = with_sign(items[i]);
    }
    return result;
  }
  return argument;
}

// A number for an object by its value; of a float the type will do, since other values take the same path.
int64_t number_of_object(py::handle object) {
  static auto& numbers = *new py::dict();
  const py::handle key = PyFloat_CheckExact(object.ptr()) ? py::handle(reinterpret_cast<PyObject*>(&PyFloat_Type)) : object;
  PyObject* const found = PyDict_GetItemWithError(numbers.ptr(), key.ptr());
  if (found) {
    return PyLong_AsLongLong(found);
  }
  if (PyErr_Occurred()) {
    throw py::error_already_set();
  }
  const auto number = static_cast<int64_t>(numbers.size());
  numbers[key] = number;
  return number;
}

bool is_instance(py::handle object, py::handle type) {
  return Py_TYPE(object.ptr()) == reinterpret_cast<PyTypeObject*>(type.ptr());
}

at::DimVector sizes_of(const torch::autograd::InputMetadata& meta) {
#if FASTACT_TORCH_VERSION >= 201  // recompute() wants a newer one still, but the binding compiles
  return at::DimVector(C10_AS_INTARRAYREF_SLOW(meta.shape_as_dim_vector()));
#else
  return {};
#endif
}

// Gives a recipe the formula that fits its configuration, or has it tried. False if none fits.
bool choose(const py::object& object, bool is_assumed) {
  Value& recipe = value_of(object);
  const auto known = chosen().find(recipe.configuration);
  const bool is_known = known != chosen().end();
  if (is_known && known->second.formula.is_none()) {
    return false;
  }
  if ((!is_known || is_assumed) && Derivation::current) {
    Derivation::current->untried.emplace_back(object, recipe.formula);
  }
  if (is_known) {
    recipe.formula = known->second.formula;
    recipe.fuses = known->second.fuses;
  }
  return true;
}

// Completes a recipe that has a formula, operands and arguments. Returns whether it can be one.
bool complete(Step& step, const py::object& name, const py::object& object, bool is_assumed) {
  Value& recipe = value_of(object);
  const auto& meta = step.node->input_metadata(step.number);
  recipe.source = name;
  recipe.sizes = sizes_of(meta);
  Configuration numbers = {number_of_object(name), number_of_object(recipe.formula), step.number};
  const auto add_root = [&](const py::object& root) {
    if (std::none_of(recipe.roots.begin(), recipe.roots.end(), [&](const py::object& other) { return other.is(root); })) {
      recipe.roots.push_back(root);
    }
  };
  for (const py::object& each : recipe.operands) {
    if (!is_value(each)) {
      numbers.push_back(-2 - number_of_object(py::handle(reinterpret_cast<PyObject*>(Py_TYPE(each.ptr())))));
      continue;
    }
    Value& value = value_of(each);
    const bool is_number = value.sizes_of().empty();
    if (value.device_of() && *value.device_of() != meta.device() && !is_number) {
      return false;  // a copy between devices isn't cheap
    }
    numbers.push_back(configuration_of(value));
    recipe.depth = std::max(recipe.depth, value.depth + 1);
    if (!value.is_recipe()) {
      add_root(each);
      recipe.max_writes = std::max(recipe.max_writes, value.max_writes);
      continue;
    }
    std::for_each(value.roots.begin(), value.roots.end(), add_root);
    if (!value.replaced) {  // what somebody saved wasn't written to by this op
      recipe.max_writes = std::max(recipe.max_writes, value.max_writes + 1);
    }
  }
  if (recipe.depth == 0 || recipe.depth > kMaxDepth || recipe.roots.size() > 4 * kMaxDepth) {
    return false;
  }
  for (const py::handle argument : py::reinterpret_borrow<py::tuple>(recipe.arguments)) {
    numbers.push_back(number_of_object(argument));
  }
  append(numbers, recipe.sizes);
  if (step.tensor) {
    recipe.take_layout_of(*step.tensor);
    append(numbers, recipe.strides);
    numbers.push_back(recipe.version);  // in place or not
  }
  recipe.dtype = c10::typeMetaToScalarType(meta.dtype());
  recipe.device = meta.device();
  append(numbers, recipe.dtype, meta.device());
  recipe.configuration = number_of(numbers);

  if (!choose(object, is_assumed)) {
    return false;
  }
  for (const py::object& each : recipe.operands) {
    if (is_value(each)) {
      ++value_of(each).readers;
    }
  }
  return true;
}

// A rule that is data, see Op in recipes/step.py; read once.
struct Data {
  explicit Data(const py::object& rule)
      : rule(rule),
        formula(rule.attr("formula")),
        when(rule.attr("when")),
        otherwise(rule.attr("otherwise")),
        convert(rule.attr("convert")),
        is_joined(rule.attr("operands").is_none()) {
    for (const char* list : {"operands", "saved"}) {
      if (rule.attr(list).is_none()) {
        continue;
      }
      for (const py::handle name : py::reinterpret_borrow<py::tuple>(rule.attr(list))) {
        operands.push_back({name.is_none() ? nullptr : name.ptr(), std::string_view(list) == "operands"});
      }
    }
    for (const py::handle name : py::reinterpret_borrow<py::tuple>(rule.attr("arguments"))) {
      arguments.push_back(name.ptr());
    }
  }

  struct Operand {
    PyObject* name;  // under which the node saves it, or null
    bool has_edge;
  };

  py::object rule, formula, when, otherwise, convert;  // the first owns the names
  bool is_joined;
  std::vector<Operand> operands;
  std::vector<PyObject*> arguments;
};

const Data& data_of(const py::object& rule) {
  static auto& known = *new std::unordered_map<PyObject*, Data>();
  const auto found = known.find(rule.ptr());
  return found != known.end() ? found->second : known.emplace(rule.ptr(), Data(rule)).first->second;
}

py::object argument(Step& step, PyObject* name) {
  const auto& meta = step.node->input_metadata(step.number);
  if (name == callbacks->dtype.ptr()) {
    return dtype_object(c10::typeMetaToScalarType(meta.dtype()));
  }
  if (name == callbacks->shape.ptr()) {
    const at::DimVector sizes = sizes_of(meta);
    py::tuple shape(sizes.size());
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      shape[dim] = sizes[dim];
    }
    return std::move(shape);
  }
  return with_sign(attribute(step.python(), name));
}

// The operands of what is joined along a dimension. Where one isn't known, nothing may be there: a cache is empty at first.
bool append_joined(Step& step, py::handle dim, std::vector<py::object>* operands) {
  const at::DimVector sizes = sizes_of(step.node->input_metadata(step.number));
  const auto dims = static_cast<int64_t>(sizes.size());
  const auto along = static_cast<size_t>(at::maybe_wrap_dim(PyLong_AsLongLong(dim.ptr()), dims));
  int64_t missing = sizes[along];
  for (size_t i = 0; i < step.node->next_edges().size(); ++i) {
    const torch::autograd::Edge& edge = step.node->next_edge(i);
    py::object value = operand(step, i, nullptr);
    if (!value) {
      if (edge.function && c10::multiply_integers(sizes_of(edge.function->input_metadata(edge.input_nr))) > 0) {
        return false;
      }
      continue;
    }
    const at::IntArrayRef each = value_of(value).sizes_of();
    const bool is_stacked = static_cast<int64_t>(each.size()) != dims;
    if (is_stacked && c10::multiply_integers(each) == 0) {
      continue;  // cat takes an empty one of any shape
    }
    missing -= is_stacked ? 1 : each[along];
    operands->push_back(std::move(value));
  }
  return missing == 0;
}

// The recipe of an output by a rule that is data.
py::object by_data(Step& step, const py::object& name, const Data& rule) {
  if (!rule.when.is_none() && attribute(step.python(), rule.when.ptr()).ptr() != Py_True) {
    return {};
  }
  py::object object = make_value();
  Value& recipe = value_of(object);
  recipe.formula = rule.formula;
  for (size_t i = 0; i < rule.operands.size(); ++i) {
    const auto& [saved_as, has_edge] = rule.operands[i];
    recipe.operands.push_back(has_edge ? operand(step, i, saved_as) : saved(step.python(), saved_as));
    if (!recipe.operands.back()) {
      return {};
    }
  }
  py::tuple values(rule.arguments.size());
  for (size_t i = 0; i < rule.arguments.size(); ++i) {
    values[i] = argument(step, rule.arguments[i]);
  }
  if (rule.is_joined && !append_joined(step, values[0], &recipe.operands)) {
    return {};
  }
  recipe.arguments = rule.convert.is_none() ? py::object(std::move(values)) : rule.convert(*values);
  if (recipe.arguments.is_none()) {
    return {};
  }
  return complete(step, name, object, /*is_assumed=*/false) ? object : py::object();
}

// The same by a rule that is a function.
py::object by_function(Step& step, const py::object& name, const py::object& rule) {
  const py::object tensor = step.tensor ? wrapped(*step.tensor) : py::object(py::none());
  const py::object given = callbacks->step(step.hook, step.python(), step.number, tensor, step.depth, rule);
  if (given.is_none()) {
    return {};
  }
  const py::tuple result = given;
  py::object object = make_value();
  Value& recipe = value_of(object);
  recipe.formula = result[0];
  for (const py::handle each : result[1]) {
    recipe.operands.push_back(py::reinterpret_borrow<py::object>(each));
  }
  recipe.arguments = result[2];
  return complete(step, name, object, /*is_assumed=*/py::cast<bool>(result[3])) ? object : py::object();
}

// The same of what a function of this package made.
py::object by_origin(Step& step, const py::object& name, const Origin& origin) {
  py::object input = origin.op ? operand(step, 0, nullptr) : py::object();
  if (!input) {
    return {};
  }
  static auto& functions = *new std::map<std::pair<const char*, const char*>, py::object>();
  py::object& function = functions[{origin.op, origin.overload}];
  if (!function) {
    function = callbacks->functions.attr(function_name(origin.op, origin.overload).c_str());
  }
  py::object object = make_value();
  Value& recipe = value_of(object);
  recipe.formula = function;
  recipe.operands = {std::move(input)};
  py::tuple parameters(origin.parameters.size());
  for (size_t i = 0; i < origin.parameters.size(); ++i) {
    parameters[i] = std::visit([](const auto& parameter) { return py::object(py::cast(parameter)); }, origin.parameters[i]);
  }
  recipe.arguments = std::move(parameters);
  return complete(step, name, object, /*is_assumed=*/false) ? object : py::object();
}

// The same of a float32 tensor that was cast from a half type which nobody kept: it goes back to that without loss, and is
// kept so.
py::object by_narrowing(Step& step, const py::object& name) {
  const torch::autograd::Edge& edge = step.node->next_edge(0);
  if (!step.tensor || step.tensor->scalar_type() != at::kFloat || step.tensor->_version() > 0 || !edge.function ||
      is_leaf(edge)) {
    return {};
  }
  const auto& source = edge.function->input_metadata(edge.input_nr);
  const auto dtype = c10::typeMetaToScalarType(source.dtype());
  if (!is_half(dtype) || source.device() != step.tensor->device()) {
    return {};
  }
  const at::NoGradGuard no_grad;
  py::object object = make_value();
  Value& recipe = value_of(object);
  recipe.formula = formulas().cast;
  recipe.operands = {keep(step.tensor->to(dtype), name_of(*edge.function), attribute(step.hook, NAME("outer")))};
  recipe.arguments = py::make_tuple(dtype_object(at::kFloat));
  note(recipe.operands[0], edge.function, edge.input_nr);
  return complete(step, name, object, /*is_assumed=*/false) ? object : py::object();
}

py::object derive(Step step) {
  const py::object name = name_of(*step.node);
  const py::object rules = attribute(step.hook, NAME("rules"));  // by the names of nodes
  const auto rule = py::reinterpret_borrow<py::object>(PyDict_GetItem(rules.ptr(), name.ptr()));
  if (step.depth > kMaxDepth || (step.number && !contains(callbacks->of_all_outputs, name))) {
    return {};
  }
  if (!rule) {
    const auto* made = dynamic_cast<const WithOrigin*>(step.node.get());
    return made ? by_origin(step, name, made->origin) : py::object();
  }
  if (!is_instance(rule, callbacks->rule_of_op)) {
    return by_function(step, name, rule);
  }
  const Data& data = data_of(rule);
  py::object result = by_data(step, name, data);
  if (!result && name.equal(callbacks->cast_node)) {
    return by_narrowing(step, name);
  }
  return result || data.otherwise.is_none() ? result : by_function(step, name, data.otherwise);
}

bool assumes(py::handle hook) {
  return attribute(hook, NAME("assumes")).ptr() == Py_True;
}

// Whether a recipe gives its tensor, of which the untried ones and a scope that checks want proof.
bool is_right(
    py::handle hook, const py::object& recipe, const Derivation& derivation, const NodePointer& node,
    const at::Tensor& tensor) {
  const bool is_checked = attribute(hook, NAME("check")).ptr() == Py_True;
  if (assumes(hook) || (derivation.untried.empty() && !is_checked)) {
    return true;
  }
  py::list untried;
  for (const auto& [each, formula] : derivation.untried) {
    untried.append(py::make_tuple(each, formula));
  }
  return py::cast<bool>(callbacks->is_right(hook, recipe, untried, wrapped(node), wrapped(tensor)));
}

// A recipe that replaces a tensor, or null.
py::object replacement(py::handle hook, const NodePointer& node, uint32_t number, const at::Tensor& tensor) {
  Derivation derivation;
  py::object object = derive({hook, node, number, &tensor, 0});
  if (!object) {
    return {};
  }
  Value& recipe = value_of(object);
  if (!assumes(hook)) {
    if (recipe.version > recipe.max_writes) {
      return {};  // somebody has written to it since its op
    }
    recipe.replaced = torch::autograd::impl::version_counter(tensor);
  }
  if (!is_right(hook, object, derivation, node, tensor)) {
    return {};
  }
  for (const auto& [output, value] : derivation.between) {
    note(value.first, value.second, output.second);
  }
  return object;
}

// A recipe that no node made: this tensor is formula(operand, *arguments). `numbers` tell it from others of the same geometry.
py::object recipe_of(
    const char* source, const py::object& formula, const py::object& operand, const py::tuple& arguments,
    const at::Tensor& tensor, Configuration numbers) {
  py::object object = make_value();
  Value &recipe = value_of(object), &value = value_of(operand);
  recipe.take_layout_of(tensor);
  recipe.source = py::str(source);
  recipe.formula = formula;
  recipe.operands = {operand};
  recipe.arguments = arguments;
  recipe.roots = value.is_recipe() ? value.roots : std::vector<py::object>{operand};
  recipe.depth = value.depth + 1;
  numbers.push_back(configuration_of(value));
  append(numbers, recipe.sizes);
  append(numbers, recipe.strides);
  recipe.configuration = number_of(numbers);
  ++value.readers;
  return object;
}

// Keeps integers that only this node has saved in a narrower dtype, which holds them all: the value becomes a cast back.
void narrow(py::handle hook, const NodePointer& node, const py::object& object, at::ScalarType dtype) {
  Value& value = value_of(object);
  if (!value.held.defined() || value.readers != 1 || !value.is_current() ||
      (!assumes(hook) && value.held.storage().use_count() > 1)) {
    return;
  }
  const at::Tensor tensor = value.tensor();  // which another stream may have made
  const at::NoGradGuard no_grad;
  const py::object operand = keep(tensor.to(dtype), py::none(), py::none());
  const auto original = tensor.scalar_type();
  const py::tuple arguments = py::make_tuple(dtype_object(original));
  const py::object replacing = recipe_of("", formulas().cast, operand, arguments, tensor, {-6, static_cast<int64_t>(original)});
  Value& recipe = value_of(replacing);
  Derivation derivation;
  if (!choose(replacing, /*is_assumed=*/false) || !is_right(hook, replacing, derivation, node, tensor)) {
    return;
  }
  value.take_layout_of(tensor);
  value.source = name_of(*node);
  value.formula = recipe.formula;
  value.operands = recipe.operands;
  value.arguments = recipe.arguments;
  value.roots = recipe.roots;
  value.depth = recipe.depth;
  value.configuration = recipe.configuration;
  value.replaced = torch::autograd::impl::version_counter(tensor);
  value.held.reset();
}

py::object view_of(const py::object& base, const at::Tensor& view, const at::Tensor& of) {
  const int64_t offset = view.storage_offset() - of.storage_offset();
  return recipe_of("view", formulas().as_strided, base, py::make_tuple(offset), view, {-3, offset});
}

// The value of a tensor that is about to be written to, which isn't written to with it.
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
    return recipe_of("written to", callbacks->same, value, py::tuple(), tensor, {-5});
  }
  const at::NoGradGuard no_grad;
  py::object copy = keep(tensor.clone(), value_of(value).source, outer);
  value_of(copy).max_writes = 1;  // what follows from it may have been written once, by this op
  note(copy, tensor.grad_fn(), static_cast<uint32_t>(tensor.output_nr()));
  return copy;
}

// A view, as its base's value and a geometry; null where that saves nothing, or the hooks outside would be given more.
py::object value_of_view(py::handle hook, const py::object& outer, const at::Tensor& tensor, const at::Tensor& base) {
  const NodePointer& node = base.grad_fn();
  if (!node) {
    return {};
  }
  const auto number = static_cast<uint32_t>(base.output_nr());
  py::object value = noted(node, number);
  if (!value || !value_of(value).stands_for(base)) {
    value = replacement(hook, node, number, base);
    if (!value) {
      if (!outer.is_none()) {
        return {};
      }
      value = keep(base, name_of(*node), py::none());
    }
    note(value, node, number);
  }
  return value_of(value).depth < kMaxDepth ? view_of(value, tensor, base) : py::object();
}

// A mask that was packed: a weak reference to it, its version then, and weak references to its value and to the hook.
struct PackedMask {
  c10::weak_intrusive_ptr<c10::TensorImpl> mask;
  int64_t version;
  py::weakref value, hook;
};

// By their addresses; those that are gone are found when there are many.
struct PackedMasks {
  std::unordered_map<const c10::TensorImpl*, PackedMask> masks;
  size_t many = 64;

  void forget_dead() {
    for (auto each = masks.begin(); each != masks.end();) {
      each = each->second.mask.expired() ? masks.erase(each) : std::next(each);
    }
    many = std::max<size_t>(64, 2 * masks.size());
  }
};

auto& packed_masks() {
  static auto& packed = *new PackedMasks();
  return packed;
}

// The value of a mask, such as those of dropout and `where`: its bits, which the hooks around the scope get too. Null for one
// that somebody holds from scope to scope, as a model's buffer, and for a small part of a larger one: it would save nothing.
py::object value_of_mask(py::handle hook, const py::object& outer, const at::Tensor& tensor, const at::Tensor& owner) {
  const int64_t numel = owner.numel();
  const bool is_whole = numel == static_cast<int64_t>(owner.storage().nbytes()) && owner.is_non_overlapping_and_dense();
  const bool has_kernel = owner.is_cpu() || owner.is_cuda();
  if (owner.scalar_type() != at::kBool || numel == 0 || numel > 2 * tensor.numel() || !is_whole || !has_kernel) {
    return {};
  }
  const auto version = static_cast<int64_t>(owner._version());
  auto& [masks, many] = packed_masks();
  const auto found = masks.find(owner.unsafeGetTensorImpl());
  py::object value = py::none();
  if (found != masks.end() && !found->second.mask.expired()) {
    if (!found->second.hook().is(hook)) {
      return {};
    }
    value = found->second.version == version ? py::object(found->second.value()) : value;
  }
  if (value.is_none()) {
    const at::NoGradGuard no_grad;
    const at::Tensor bits = assumes(hook) ? owner.new_empty({(numel + 7) / 8}, at::kByte) : pack_mask(owner);
    value = recipe_of("bits", formulas().unpack_mask, keep(bits, py::none(), outer), py::tuple(), owner, {-4});
    if (masks.size() >= many) {
      packed_masks().forget_dead();
    }
    masks.insert_or_assign(
        owner.unsafeGetTensorImpl(),
        PackedMask{
            c10::weak_intrusive_ptr<c10::TensorImpl>(owner.getIntrusivePtr()), version, py::weakref(value), py::weakref(hook)});
  }
  return owner.is_same(tensor) ? value : view_of(value, tensor, owner);
}

// As factories make it: no subclass, not sparse, quantised, nested, conjugate or batched.
bool is_plain(py::handle hook, PyObject* object, const at::Tensor& tensor) {
  static auto& keys = *new std::unordered_map<int, c10::DispatchKeySet>();
  const auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  const auto& types = callbacks->plain_types;
  if (std::none_of(types.begin(), types.end(), [&](py::handle each) { return each.ptr() == type; })) {
    return py::cast<bool>(attribute(hook, NAME("assumes"))) && tensor.layout() == at::kStrided;
  }
  if (c10::impl::dispatch_mode_enabled()) {
    return false;
  }
  c10::DispatchKeySet& plain = keys[static_cast<int>(tensor.device().type())];
  if (plain.empty()) {
    plain = at::empty({0}, at::TensorOptions().device(tensor.device())).key_set();
  }
  return tensor.key_set() == plain;
}

// Whether a tensor's memory isn't worth the time to compute it again; a parameter's copy in another dtype, of which there is
// one in a forward pass, may be larger.
bool is_small(const at::Tensor& owner) {
  const auto bytes = static_cast<int64_t>(owner.storage().nbytes());
  if (bytes < smallest.any || bytes >= smallest.of_parameter) {  // as most are: the node needn't be asked
    return bytes < smallest.any;
  }
  const auto& node = owner.grad_fn();
  return node && name_of(*node).equal(callbacks->cast_node) && is_leaf(node->next_edge(0));
}

py::object pack(py::handle hook, PyObject* object, const at::Tensor& tensor) {
  const py::object outer = attribute(hook, NAME("outer"));
  if (!is_plain(hook, object, tensor)) {
    return keep(tensor, py::none(), outer);
  }
  const NodePointer& node = tensor.grad_fn();
  const at::Tensor owner = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
  if (!node) {
    if (tensor.scalar_type() == at::kBool && !is_small(owner)) {
      if (py::object value = value_of_mask(hook, outer, tensor, owner)) {
        return value;
      }
    }
    py::object value = keep(tensor, py::none(), outer);
    if (is_freed_parameter(owner)) {
      value_of(value).is_private = true;
      value_of(value).copy = sharding.is_there ? copy_of(tensor) : py::object();
    }
    return value;
  }
  const auto number = static_cast<uint32_t>(tensor.output_nr());
  py::object value = noted(node, number);
  if (value && value_of(value).stands_for(tensor)) {
    return value;
  }
  const bool is_written = value && value_of(value).version != static_cast<int64_t>(tensor._version());  // past autograd
  const bool is_view = tensor.is_view() && owner.requires_grad() && owner.dtype() == tensor.dtype();
  value = is_written || is_small(owner) ? py::object()
          : is_view                     ? value_of_view(hook, outer, tensor, owner)
                                        : replacement(hook, node, number, tensor);
  if (!value) {
    const bool is_of_leaf = !owner.grad_fn();  // which the hooks outside needn't have
    value = keep(tensor, name_of(*node), is_of_leaf ? py::object(py::none()) : outer);
    value_of(value).is_private = is_of_leaf && is_freed_parameter(owner);
  }
  note(value, node, number);
  return value;
}

// Whether autograd's pack hook is called for save_before_write.
thread_local bool is_before_write = false;

// Autograd's pack hook, with the Python Hook as self. Whatever goes wrong, the tensor is kept: an error here would leave a hole
// in the graph.
PyObject* pack_hook(PyObject* hook, PyObject* object) {
  HANDLE_TH_ERRORS
  const at::Tensor& tensor = THPVariable_Unpack(object);
  const bool is_to_be_written = std::exchange(is_before_write, false);
  const Packing packing;
  py::object value;
  const auto report = [&](const py::object& error) { callbacks->failed(py::handle(object), error); };
  try {
    value = pack(hook, object, tensor);
  } catch (py::error_already_set& error) {
    if (error.matches(PyExc_KeyboardInterrupt)) {
      PyErr_SetInterrupt();  // raised as soon as this is done
    } else {
      report(error.value());
    }
  } catch (const std::exception& error) {
    report(py::str(error.what()));
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

// A recipe by itself: a tensor like this one is formula(*operands, *arguments).
py::object recipe_like(py::handle like, const py::object& formula, const py::tuple& operands, const py::tuple& arguments) {
  py::object object = make_value();
  Value& recipe = value_of(object);
  recipe.take_layout_of(THPVariable_Unpack(like.ptr()));
  recipe.formula = formula;
  recipe.arguments = arguments;
  for (const py::handle each : operands) {
    recipe.operands.push_back(
        THPVariable_Check(each.ptr()) ? keep(THPVariable_Unpack(each.ptr()), py::none(), py::none())
                                      : py::reinterpret_borrow<py::object>(each));
  }
  return object;
}

py::object wrapped_or_none(const std::optional<at::Tensor>& tensor) {
  return tensor ? wrapped(*tensor) : py::object(py::none());
}

PyMethodDef pack_method = {"pack", pack_hook, METH_O, nullptr};

// What a rule asks for; if there is none it gets an exception.
py::object or_underivable(py::object value) {
  if (!value) {
    PyErr_SetNone(callbacks->underivable.ptr());
    throw py::error_already_set();
  }
  return value;
}

}  // namespace

#if FASTACT_TORCH_VERSION >= 211

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

#else  // has no recompute()

bool is_in_scope() {
  return false;
}

py::object value_behind(const torch::autograd::SavedVariable&) {
  return {};
}

#endif

torch::autograd::SavedVariable save_before_write(const at::Tensor& tensor) {
  is_before_write = true;
  return {tensor, /*is_output=*/false};
}

void add_hook(py::module_& module) {
  add_value_type(module);
  module.def("set_up", [](const py::kwargs& given) {
    const auto formula = [&](const char* name) { return py::object(given[name]); };
    set_formulas({given["in_place"], formula("movements"), formula("as_strided"), formula("cast"), formula("unpack_mask")});
    callbacks = new Callbacks(given);
  });
  module.def("set_smallest", [](int64_t any, int64_t of_parameter) { smallest = {any, of_parameter}; });
  module.def("set_sharding", [](bool is_there, bool may_be_flat) { sharding = {is_there, may_be_flat}; });
  module.def("pack_hook", [](const py::object& hook) {
    return py::reinterpret_steal<py::object>(PyCFunction_New(&pack_method, hook.ptr()));
  });
  module.attr("unpack") = unpack_hook();
  module.def("operand", [](py::handle hook, py::handle node, size_t i, py::handle name, int depth) {
    const NodePointer pointer = node_behind(node);
    Step step(hook, pointer, 0, nullptr, depth);
    if (!pointer->next_edge(i).function && name.is_none()) {
      return py::object(py::none());
    }
    return or_underivable(operand(step, i, name.is_none() ? nullptr : name.ptr()));
  });
  module.def("argument", [](py::handle node, py::handle name) { return with_sign(attribute(node, name.ptr())); });
  module.def("saved", [](py::handle node, py::handle name) { return or_underivable(saved(node, name.ptr())); });
  module.def("keep", [](py::handle tensor, const py::object& hooks) {
    return keep(THPVariable_Unpack(tensor.ptr()), py::none(), hooks);
  });
  module.def("narrow", [](py::handle hook, py::handle node, const py::object& value, py::handle dtype) {
    narrow(hook, node_behind(node), value, reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
  });
  module.def("packed_masks", [] {
    packed_masks().forget_dead();
    return packed_masks().masks.size();
  });
  module.def("choose", [](int64_t configuration, const py::object& formula, bool fuses) {
    chosen()[configuration] = {formula, fuses};
  });
  module.def("set_programs", &set_programs);
  module.attr("steps") = steps();
  module.def("recipe", &recipe_like);
  module.def(
      "fused", [](const py::object& recipe) { return wrapped_or_none(compute_fused(value_of(recipe), /*is_alone=*/true)); });
  module.def("gradient", [](const py::object& recipe, py::handle grad, const std::string& step) {
    return wrapped_or_none(compute_gradient(value_of(recipe), THPVariable_Unpack(grad.ptr()), step.c_str()));
  });
  module.def("gradient", [](const py::object& recipe, py::handle grad, py::handle factors) {
    return wrapped_or_none(
        compute_gradient(value_of(recipe), THPVariable_Unpack(grad.ptr()), THPVariable_Unpack(factors.ptr())));
  });
  module.def("chosen", [] {
    py::dict result;
    for (const auto& [configuration, choice] : chosen()) {
      result[py::int_(configuration)] = choice.formula;
    }
    return result;
  });
  module.def("forget_chosen", [] { chosen().clear(); });
}

}  // namespace fastact::recipes
