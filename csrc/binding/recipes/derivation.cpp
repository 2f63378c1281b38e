#include "derivation.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <variant>

#include "../origin.h"
#include "../strides.h"
#include "formulas.h"
#include "from_half.h"
#include "gradients/gradients.h"
#include "joined.h"
#include "leaves.h"
#include "lowering.h"
#include "scalars.h"

namespace fastact::recipes {
namespace {

using torch::autograd::CopySlices;
using torch::autograd::generated::AsStridedBackward0;

// Called for a recipe that is given up: its operands lose a reader.
void drop(const Value& recipe) {
  for (const py::object& each : recipe.operands) {
    if (is_value(each)) {
      --value_of(each).readers;
    }
  }
}

// A value and all that it follows from.
std::unordered_set<PyObject*> with_all_behind(const py::object& value) {
  std::unordered_set<PyObject*> found;
  std::vector<py::object> left = {value};
  while (!left.empty()) {
    const py::object each = std::move(left.back());
    left.pop_back();
    if (is_value(each) && found.insert(each.ptr()).second) {
      const auto& operands = value_of(each).operands;
      left.insert(left.end(), operands.begin(), operands.end());
    }
  }
  return found;
}

}  // namespace

thread_local Derivation* Derivation::current = nullptr;

Derivation::~Derivation() {
  current = outer;
  if (may_succeed_later) {
    dead_ends().forget();
  }
  for (const auto& [output, value] : between) {
    drop(value_of(value.first));
  }
}

bool Derivation::is_untried(const py::object& recipe) const {
  if (untried.empty()) {
    return false;
  }
  const auto found = with_all_behind(recipe);
  return std::any_of(untried.begin(), untried.end(), [&](const auto& each) { return found.count(each.first.ptr()) > 0; });
}

void Derivation::keep_operands_of(const py::object& recipe) {
  const auto found = with_all_behind(recipe);
  const auto is_other = [&](const py::object& value) { return found.count(value.ptr()) == 0; };
  untried.erase(
      std::remove_if(untried.begin(), untried.end(), [&](const auto& each) { return is_other(each.first); }), untried.end());
  for (auto each = between.begin(); each != between.end();) {
    const py::object& value = each->second.first;
    if (!is_other(value)) {
      ++each;
      continue;
    }
    drop(value_of(value));
    each = between.erase(each);
  }
}

namespace {

// An id of an object by its value.
int64_t id_of_value(py::handle object) {
  static auto& ids = *new py::dict();
  PyObject* const found = PyDict_GetItemWithError(ids.ptr(), object.ptr());
  if (found) {
    return PyLong_AsLongLong(found);
  }
  if (PyErr_Occurred()) {
    throw py::error_already_set();
  }
  const auto id = static_cast<int64_t>(ids.size());
  ids[object] = id;
  return id;
}

// As id_of_value(), but a float stands for its type, since other values take the same path.
int64_t id_of_object(py::handle object) {
  return id_of_value(PyFloat_CheckExact(object.ptr()) ? reinterpret_cast<PyObject*>(&PyFloat_Type) : object);
}

// An argument of a formula that moves elements, as far as bits depend on it: of a position only the alignment, since kernels
// read vectors.
py::object aligned(py::handle object) {
  if (PyLong_CheckExact(object.ptr())) {
    int overflow = 0;
    return py::int_(PyLong_AsLongLongAndOverflow(object.ptr(), &overflow) & 15);
  }
  if (!PyTuple_CheckExact(object.ptr())) {
    return py::reinterpret_borrow<py::object>(object);
  }
  py::tuple result(PyTuple_GET_SIZE(object.ptr()));
  for (size_t i = 0; i < result.size(); ++i) {
    result[i] = aligned(PyTuple_GET_ITEM(object.ptr(), i));
  }
  return std::move(result);
}

int64_t id_of_position(py::handle object) {
  return id_of_object(aligned(object));
}

// Gives a recipe the formula that fits its configuration, or has it tried. False if none fits.
bool choose(const py::object& object) {
  Value& recipe = value_of(object);
  const auto known = chosen().find(recipe.configuration_id);
  if (known != chosen().end()) {
    if (known->second.formula.is_none()) {
      return false;
    }
    recipe.formula = known->second.formula;
    recipe.fuses = known->second.fuses;
    return true;
  }
  Derivation::current->untried.emplace_back(object, recipe.formula);
  return true;
}

// Whether PyTorch's op on the CPU rounds differently where its operands have other strides: most ops on complex numbers do.
bool depends_on_layout(const Value& recipe) {
  return facts_of(recipe.formula).varies_with(recipe.arguments) || c10::isComplexType(recipe.dtype) ||
         std::any_of(recipe.operands.begin(), recipe.operands.end(), [](const py::object& each) {
           return is_value(each) && c10::isComplexType(value_of(each).dtype_of());
         });
}

// What follows from a recipe's operands: its roots, its depth, the writes that it explains and a part of its configuration.
// False if it can't be a recipe.
bool take_operands(Value& recipe, c10::Device device, Configuration& configuration) {
  const int own_writes = facts_of(recipe.formula).is_movement ? 0 : 1;  // it may be in place
  const auto add_root = [&](const py::object& root) {
    if (std::none_of(recipe.roots.begin(), recipe.roots.end(), [&](const py::object& other) { return other.is(root); })) {
      recipe.roots.push_back(root);
    }
  };
  for (const py::object& each : recipe.operands) {
    if (!is_value(each)) {
      configuration.push_back(-2 - id_of_object(py::handle(reinterpret_cast<PyObject*>(Py_TYPE(each.ptr())))));
      continue;
    }
    Value& value = value_of(each);
    const bool is_number = value.sizes_of().empty();
    if (value.device_of() && *value.device_of() != device && !is_number) {
      return false;  // a copy between devices isn't cheap
    }
    configuration.push_back(configuration_id_of(value));
    recipe.depth = std::max(recipe.depth, value.depth + 1);
    if (!value.is_recipe()) {
      add_root(each);
      recipe.max_writes = std::max(recipe.max_writes, value.max_writes);
      continue;
    }
    std::for_each(value.roots.begin(), value.roots.end(), add_root);
    if (!value.replaced) {  // what somebody saved wasn't written to by this op
      recipe.max_writes = std::max(recipe.max_writes, value.max_writes + own_writes);
    }
  }
  return 0 < recipe.depth && recipe.depth <= kMaxDepth && recipe.roots.size() <= kMaxRoots;
}

void append_arguments(Configuration& configuration, const Value& recipe) {
  // A norm's eps counts by its value: where the variance is next to nothing, it decides whether formulas differ.
  const bool is_norm = py::isinstance(recipe.formula, from_python().candidates);
  const bool is_movement = facts_of(recipe.formula).is_movement;
  const auto id_of_argument = is_norm ? id_of_value : is_movement ? id_of_position : id_of_object;
  for (const py::object& argument : recipe.arguments) {
    configuration.push_back(id_of_argument(argument));
  }
  if (is_movement) {
    configuration.push_back(half_shown(recipe));
  }
}

// Whether it needs strides of its operands that nobody knows yet.
bool lacks_strides(const Value& recipe) {
  const auto has_none = [](const py::object& each) { return is_value(each) && !value_of(each).strides_of(); };
  return recipe.device->is_cpu() && depends_on_layout(recipe) &&
         std::any_of(recipe.operands.begin(), recipe.operands.end(), has_none);
}

// What several ops compute of the same, as autocast's casts for query, key and value, is computed once.
void refer_to_equal(Value& recipe, const torch::autograd::Node& node) {
  const py::object equal = equal_or_add(recipe, node);
  if (equal && value_of(equal).depth < kMaxDepth) {
    recipe.formula = formulas().same;
    recipe.operands = {equal};
    recipe.arguments.clear();
    recipe.depth = value_of(equal).depth + 1;
    recipe.configuration_id = id_of({static_cast<int64_t>(ConfigurationOf::equal), recipe.configuration_id});
  }
}

// Completes a recipe that has a formula, operands and arguments. Returns whether it can be one.
bool complete(const Step& step, const py::object& name, const py::object& object) {
  Value& recipe = value_of(object);
  const auto& meta = step.node->input_metadata(step.output_nr);
  recipe.source = name;
  recipe.sizes = sizes_of(meta);
  Configuration configuration = {id_of_object(name), id_of_object(recipe.formula), step.output_nr};
  if (!take_operands(recipe, meta.device(), configuration)) {
    return false;
  }
  append_arguments(configuration, recipe);
  append(configuration, recipe.sizes);
  if (step.tensor) {
    recipe.take_layout_of(*step.tensor);
    append(configuration, recipe.strides);
    configuration.push_back(recipe.version);  // in place or not
  }
  recipe.dtype = c10::typeMetaToScalarType(meta.dtype());
  recipe.device = meta.device();
  if (lacks_strides(recipe)) {
    Derivation::current->may_succeed_later = true;
    return false;
  }
  append(configuration, recipe.dtype, meta.device());
  recipe.configuration_id = id_of(configuration);
  refer_to_equal(recipe, *step.node);
  if (!choose(object)) {
    return false;
  }
  for (const py::object& each : recipe.operands) {
    if (is_value(each)) {
      ++value_of(each).readers;
    }
  }
  add_gradient_hooks(*step.node);
  return true;
}

// An OpRule of recipes/step.py, read once.
struct OpRule {
  explicit OpRule(const py::object& rule)
      : rule(rule),
        formula(rule.attr("formula")),
        when(rule.attr("when")),
        otherwise(rule.attr("otherwise")),
        convert(rule.attr("convert")),
        is_joined(rule.attr("operands").is_none()) {
    const auto add_operands = [&](const py::object& names, bool have_edges) {
      for (const py::handle name : py::reinterpret_borrow<py::tuple>(names)) {
        const bool may_be_number = name.is(from_python().number);
        operands.push_back({name.is_none() || may_be_number ? nullptr : name.ptr(), have_edges, may_be_number});
      }
    };
    if (!is_joined) {
      add_operands(rule.attr("operands"), true);
    }
    add_operands(rule.attr("saved"), false);
    for (const py::handle name : py::reinterpret_borrow<py::tuple>(rule.attr("contiguous"))) {
      contiguous.push_back(name.ptr());
    }
    for (const py::handle name : py::reinterpret_borrow<py::tuple>(rule.attr("behind"))) {
      behind.push_back(name.ptr());
    }
    for (const py::handle name : py::reinterpret_borrow<py::tuple>(rule.attr("arguments"))) {
      arguments.push_back(name.ptr());
      is_of_each_output |= name.is(from_python().output_nr);
    }
  }

  struct Operand {
    PyObject* name;  // under which the node saves it, or null
    bool has_edge, may_be_number;
  };

  py::object rule, formula, when, otherwise, convert;  // the first owns the names
  bool is_joined, is_of_each_output = false;
  std::vector<Operand> operands;
  std::vector<PyObject*> contiguous, arguments, behind;
};

const OpRule& op_of(const py::object& rule) {
  static auto& known = *new std::unordered_map<PyObject*, OpRule>();
  const auto found = known.find(rule.ptr());
  return found != known.end() ? found->second : known.emplace(rule.ptr(), OpRule(rule)).first->second;
}

// Each of the following gives a recipe its formula, operands and arguments. False where it can't.

// Whether a node on the CPU has saved a tensor that isn't contiguous.
bool is_strided(Step& step, PyObject* name) {
  if (!step.node->input_metadata(step.output_nr).device().is_cpu()) {
    return false;
  }
  const py::object data = attribute(attribute(step.python_node(), name), NAME("data"));
  if (!is_value(data)) {
    return false;
  }
  const auto strides = value_of(data).strides_of();
  const at::IntArrayRef sizes = value_of(data).sizes_of();
  return !strides || !agree(sizes, *strides, c10::contiguous_strides(sizes));
}

// Whether a rule's `otherwise` may do: Python is called for few of the many linear layers whose output is a view.
bool may_do_otherwise(const torch::autograd::Node& node, const OpRule& rule) {
  const auto* each = &node;
  return !rule.otherwise.is_none() && std::all_of(rule.behind.begin(), rule.behind.end(), [&](PyObject* name) {
    each = each->num_outputs() > 0 ? each->next_edge(0).function.get() : nullptr;
    return each && name_of(*each).equal(py::handle(name));
  });
}

// By a rule that is an OpRule.
bool by_op(Step& step, const OpRule& rule, Value& recipe) {
  if (!rule.when.is_none() && attribute(step.python_node(), rule.when.ptr()).ptr() != Py_True) {
    return false;
  }
  if (rule.is_joined) {
    return by_joining(step, rule.formula, argument(step, rule.arguments[0]), recipe);
  }
  recipe.formula = rule.formula;
  for (size_t i = 0; i < rule.operands.size(); ++i) {
    const auto& [saved_as, has_edge, may_be_number] = rule.operands[i];
    const bool is_number = may_be_number && (i >= step.node->num_outputs() || !step.node->next_edge(i).function);
    recipe.operands.push_back(
        is_number  ? scalar_of(*step.node)
        : has_edge ? operand(step, i, saved_as)
                   : saved(step, saved_as));
    if (!recipe.operands.back()) {
      return false;
    }
  }
  for (PyObject* name : rule.arguments) {
    recipe.arguments.push_back(argument(step, name));
  }
  if (!rule.convert.is_none()) {
    const py::object converted = rule.convert(*tuple_of(recipe.arguments));
    if (converted.is_none()) {
      return false;
    }
    recipe.arguments = objects_of(converted);
  }
  return true;
}

// By a rule that is a function.
bool by_function(Step& step, const py::object& rule, Value& recipe) {
  const py::object tensor = step.tensor ? wrapped(*step.tensor) : py::object(py::none());
  const py::object given = from_python().step(step.hook, step.python_node(), step.output_nr, tensor, step.depth, rule);
  if (given.is_none()) {
    return false;
  }
  const py::tuple result = given;
  recipe.formula = result[0];
  recipe.operands = objects_of(result[1]);
  recipe.arguments = objects_of(result[2]);
  return true;
}

// Makes the recipe of what a function of this package returned.
bool by_origin(Step& step, const Origin& origin, Value& recipe) {
  py::object input = origin.op ? operand(step, 0, nullptr) : py::object();
  if (!input) {
    return false;
  }
  static auto& functions = *new std::map<std::pair<const char*, const char*>, py::object>();
  py::object& function = functions[{origin.op, origin.overload}];
  if (!function) {
    function = from_python().functions.attr(function_name(origin.op, origin.overload).c_str());
  }
  recipe.formula = function;
  recipe.operands = {std::move(input)};
  for (const auto& each : origin.parameters) {
    recipe.arguments.push_back(std::visit([](const auto& parameter) { return py::object(py::cast(parameter)); }, each));
  }
  return true;
}

// Makes the recipe of a tensor that has the elements of another output in their order.
bool by_reshaping(Step& step, const NodePointer& node, uint32_t output_nr, Value& recipe) {
  recipe.formula = formulas().reshape;
  recipe.operands = {output(step, node, output_nr)};
  recipe.arguments = {argument(step, from_python().shape.ptr())};
  return static_cast<bool>(recipe.operands[0]);
}

// Whether two tensors of the same memory have all the same elements, in the same order.
bool are_whole(const at::TensorGeometry& one, const at::TensorGeometry& other) {
  return one.is_contiguous() && other.is_contiguous() && one.sym_numel() == other.sym_numel() &&
         one.sym_storage_offset() == other.sym_storage_offset();
}

// A contiguous tensor that an op in place has written through a view of all of it, as an activation does behind an instance
// norm; and such a view, which autograd makes anew.
bool by_write(Step& step, const CopySlices& write, Value& recipe) {
  return are_whole(write.base, write.view) && by_reshaping(step, write.fn, 0, recipe);
}

bool by_view(Step& step, const AsStridedBackward0& view, Value& recipe) {
  const at::TensorGeometry& base = view.self_geometry;
  const at::TensorGeometry geometry(view.size, view.stride, view.storage_offset.value_or(base.sym_storage_offset()));
  const torch::autograd::Edge& edge = step.node->next_edge(0);
  return are_whole(base, geometry) && edge.function && by_reshaping(step, edge.function, edge.input_nr, recipe);
}

// Whether a recipe gives its tensor, of which the untried ones and a scope that checks want proof.
bool is_right(
    py::handle hook, const py::object& recipe, const Derivation& derivation, const NodePointer& node,
    const at::Tensor& tensor) {
  const bool is_checked = attribute(hook, NAME("check")).ptr() == Py_True;
  if (is_dry_run(hook) || (derivation.untried.empty() && !is_checked)) {
    return true;
  }
  py::list untried;
  for (const auto& [each, formula] : derivation.untried) {
    untried.append(py::make_tuple(each, formula));
  }
  return py::cast<bool>(from_python().is_right(hook, recipe, untried, wrapped(node), wrapped(tensor)));
}

}  // namespace

std::unordered_map<int64_t, Choice>& chosen() {
  static auto& choices = *new std::unordered_map<int64_t, Choice>();
  return choices;
}

py::object derive(Step step) {
  const py::object name = name_of(*step.node);
  const py::object rules = attribute(step.hook, NAME("rules"));  // by the names of nodes
  const auto rule = py::reinterpret_borrow<py::object>(PyDict_GetItem(rules.ptr(), name.ptr()));
  const bool is_op = rule && py::type::handle_of(rule).is(from_python().op_rule);
  if (step.depth > kMaxDepth) {
    Derivation::current->may_succeed_later = true;  // by a shorter way
    return {};
  }
  if (step.output_nr && !(is_op && op_of(rule).is_of_each_output)) {
    return {};
  }
  const auto made = [&](const auto& describe) {
    py::object recipe = make_value();
    if (describe(value_of(recipe)) && complete(step, name, recipe)) {
      return recipe;
    }
    Derivation::current->has_failed_attempts = true;
    return py::object();
  };
  if (!rule) {
    const auto& node = *step.node;
    if (typeid(node) == typeid(CopySlices)) {
      return made([&](Value& recipe) { return by_write(step, static_cast<const CopySlices&>(node), recipe); });
    }
    if (typeid(node) == typeid(AsStridedBackward0)) {
      return made([&](Value& recipe) { return by_view(step, static_cast<const AsStridedBackward0&>(node), recipe); });
    }
    const auto* ours = dynamic_cast<const WithOrigin*>(step.node.get());
    return ours ? made([&](Value& recipe) { return by_origin(step, ours->origin, recipe); }) : py::object();
  }
  const auto by = [&](const py::object& function) {
    return made([&](Value& recipe) { return by_function(step, function, recipe); });
  };
  if (!is_op) {
    return by(rule);
  }
  const OpRule& op = op_of(rule);
  if (std::any_of(op.contiguous.begin(), op.contiguous.end(), [&](PyObject* name) { return is_strided(step, name); })) {
    return {};
  }
  py::object result = made([&](Value& recipe) { return by_op(step, op, recipe); });
  if (!result && may_come_from_half(step)) {
    result = made([&](Value& recipe) { return by_half(step, op.formula, recipe); });
  }
  return result || !may_do_otherwise(*step.node, op) ? result : by(op.otherwise);
}

bool is_dry_run(py::handle hook) {
  return attribute(hook, NAME("is_dry_run")).ptr() == Py_True;
}

py::object replacement(py::handle hook, const NodePointer& node, uint32_t output_nr, const at::Tensor& tensor) {
  Derivation derivation;
  dead_ends().begin_derivation(
      {PyLong_AsLongLong(attribute(hook, NAME("begins")).ptr()), attribute(hook, NAME("rules")).ptr()});
  py::object object = derive({hook, node, output_nr, &tensor, 0});
  if (!object) {
    return {};
  }
  derivation.between[{node.get(), output_nr}] = {object, node};
  if (derivation.has_failed_attempts) {
    derivation.keep_operands_of(object);
  }
  Value& recipe = value_of(object);
  if (!is_dry_run(hook)) {
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
  derivation.between.clear();
  return object;
}

py::object recipe_of(
    ConfigurationOf kind, py::handle source, const py::object& formula, const py::object& operand, Objects arguments,
    const at::Tensor& tensor, int64_t detail) {
  py::object object = make_value();
  Value &recipe = value_of(object), &value = value_of(operand);
  recipe.take_layout_of(tensor);
  recipe.source = py::reinterpret_borrow<py::object>(source);
  recipe.formula = formula;
  recipe.operands = {operand};
  recipe.arguments = std::move(arguments);
  recipe.roots = value.is_recipe() ? value.roots : std::vector<py::object>{operand};
  recipe.depth = value.depth + 1;
  Configuration configuration = {static_cast<int64_t>(kind), detail, configuration_id_of(value)};
  append(configuration, recipe.sizes);
  append(configuration, recipe.strides);
  recipe.configuration_id = id_of(configuration);
  ++value.readers;
  return object;
}

bool is_held_alone(const Value& value, py::handle hook) {
  // In a dry run the storage has a wrapper, by which the survey knows it.
  return value.held.defined() && value.is_current() && value.held.storage().use_count() == (is_dry_run(hook) ? 2 : 1);
}

void downcast(py::handle hook, const NodePointer& node, const py::object& object, at::ScalarType dtype) {
  Value& value = value_of(object);
  if (!is_held_alone(value, hook) || value.readers != 1) {
    return;
  }
  const at::Tensor tensor = value.tensor();  // which another stream may have made
  const at::NoGradGuard no_grad;
  const py::object operand = keep(tensor.to(dtype));
  const auto original = tensor.scalar_type();
  const py::object replacing = recipe_of(
      ConfigurationOf::downcast, NAME(""), formulas().cast, operand, {dtype_object(original)}, tensor,
      static_cast<int64_t>(original));
  Derivation derivation;
  if (!choose(replacing) || !is_right(hook, replacing, derivation, node, tensor)) {
    return;
  }
  value.become(value_of(replacing), tensor, name_of(*node));
}

py::object view_of(const py::object& value, const at::Tensor& view, const at::Tensor& base) {
  const int64_t offset = view.storage_offset() - base.storage_offset();
  py::object recipe =
      recipe_of(ConfigurationOf::view, NAME("view"), formulas().as_strided, value, {py::int_(offset)}, view, offset % 16);
  value_of(recipe).replaced = torch::autograd::impl::version_counter(view);
  return recipe;
}

}  // namespace fastact::recipes
