#include "module.h"

#include <torch/csrc/autograd/python_cpp_function.h>

#include <optional>
#include <string>
#include <vector>

#include "calls.h"
#include "computing.h"
#include "derivation.h"
#include "formulas.h"
#include "fusion.h"
#include "hook.h"
#include "joined.h"
#include "leaves.h"
#include "masks.h"
#include "scalars.h"

namespace fastact::recipes {
namespace {

NodePointer node_behind(py::handle node) {
  TORCH_CHECK_TYPE(
      torch::autograd::THPCppFunction_Check(node.ptr()), "recompute: expected a node of autograd's graph, got ",
      Py_TYPE(node.ptr())->tp_name);
  return reinterpret_cast<torch::autograd::THPCppFunction*>(node.ptr())->cdata;
}

// A recipe by itself: a tensor like this one is formula(*operands, *arguments).
py::object recipe_like(py::handle like, const py::object& formula, const py::tuple& operands, const py::tuple& arguments) {
  py::object object = make_value();
  Value& recipe = value_of(object);
  recipe.take_layout_of(THPVariable_Unpack(like.ptr()));
  recipe.formula = formula;
  recipe.arguments = objects_of(arguments);
  for (const py::handle each : operands) {
    recipe.operands.push_back(
        THPVariable_Check(each.ptr()) ? keep(THPVariable_Unpack(each.ptr())) : py::reinterpret_borrow<py::object>(each));
  }
  return object;
}

py::object wrapped_or_none(const std::optional<at::Tensor>& tensor) {
  return tensor ? wrapped(*tensor) : py::object(py::none());
}

// What a rule asks for; if there is none it gets an exception.
py::object or_underivable(py::object value) {
  if (!value) {
    PyErr_SetNone(from_python().underivable.ptr());
    throw py::error_already_set();
  }
  return value;
}

// Computing as a context manager, which also disables __torch_function__. Several of Python's own, nested, could leave the
// thread without gradients where an interrupt comes between them.
struct ComputingInPython {
  struct Guards {
    const TorchFunction function{TorchFunction::State::ALL_DISABLED};
    Computing computing;
  };

  void enter() { guards.emplace(); }
  void exit(const py::args&) { guards.reset(); }

  std::optional<Guards> guards;
};

// To set up, in recipes/hook.py and scope.py.
void add_settings(py::module_& module) {
  module.def("set_facts", &set_facts);
  module.def("set_up", [](const py::kwargs& given) {
    set_formulas(given);
    set_from_python(given);
  });
  module.def("set_smallest", &set_smallest);
  module.def("set_sharding", [](bool has_fsdp2, bool may_have_fsdp1) { set_sharding({has_fsdp2, may_have_fsdp1}); });
  module.def("begin_scope", &begin_scope);
  module.def("enter_scope", &enter_scope, py::arg("observes") = false);
  module.def("exit_scope", &exit_scope);
  module.def("pack_hook", &pack_hook);
  module.attr("unpack") = unpack_hook();
}

// For rules that are functions, by way of recipes/step.py.
void add_step(py::module_& module) {
  py::class_<ComputingInPython>(module, "Computing", py::module_local())
      .def(py::init<>())
      .def("__enter__", &ComputingInPython::enter)
      .def("__exit__", &ComputingInPython::exit);
  module.def("operand", [](py::handle hook, py::handle node, size_t i, py::handle name, int depth) {
    const NodePointer pointer = node_behind(node);
    Step step(hook, pointer, 0, nullptr, depth);
    TORCH_CHECK(Derivation::current, "recompute: expected a rule to read its step while it is asked");
    return or_underivable(operand(step, i, name.is_none() ? nullptr : name.ptr()));
  });
  module.def("argument", [](py::handle node, py::handle name) { return argument(node, name.ptr()); });
  module.def("saved", [](py::handle node, py::handle name) {
    const NodePointer pointer = node_behind(node);
    Step step(py::none(), pointer, 0, nullptr, 0);
    return or_underivable(saved(step, name.ptr()));
  });
  module.def("eps_of_call", [](py::handle node) { return or_underivable(eps_of_call(node)); });
  module.def("statistics_of_call", [](py::handle node, py::handle name) {
    return or_underivable(statistics_of_call(node, name.ptr()));
  });
  module.def("bias_of_call", [](py::handle node) { return or_underivable(bias_of_call(node)); });
  module.def("keep", [](py::handle tensor, const py::object& hooks) {
    return keep(THPVariable_Unpack(tensor.ptr()), py::none(), hooks);
  });
  module.def("downcast", [](py::handle hook, py::handle node, const py::object& value, py::handle dtype) {
    downcast(hook, node_behind(node), value, reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
  });
}

// For recipes/verification.py and formulas.py.
void add_verification(py::module_& module) {
  module.def("contiguous", [](py::handle tensor) { return wrapped(contiguous(THPVariable_Unpack(tensor.ptr()))); });
  module.def("join", [](const py::tuple& tensors, int64_t dim) {
    std::vector<at::Tensor> unpacked;
    for (const py::handle each : tensors) {
      unpacked.push_back(THPVariable_Unpack(each.ptr()));
    }
    const py::gil_scoped_release no_gil;
    return join(unpacked, dim);
  });
  module.def("choose", [](int64_t configuration_id, const py::object& formula, bool fuses) {
    chosen()[configuration_id] = {formula, fuses};
  });
  module.def("recipe", &recipe_like);
  module.def(
      "fused", [](const py::object& recipe) { return wrapped_or_none(compute_fused(value_of(recipe), /*force=*/true)); });
}

// For tests and benchmarks.
void add_for_tests(py::module_& module) {
  module.attr("opcodes") = opcodes();
  module.def("packed_masks", &packed_masks);
  module.def("observes_ops", &observes_ops);
  module.def("unpack_mask", [] { return formulas().unpack_mask; });
  module.def("gradient", [](const py::object& recipe, py::handle grad, const std::string& opcode) {
    return wrapped_or_none(compute_gradient(value_of(recipe), THPVariable_Unpack(grad.ptr()), opcode_of(opcode)));
  });
  module.def("gradient", [](const py::object& recipe, py::handle grad, py::handle factors) {
    return wrapped_or_none(compute_gradient(
        value_of(recipe), THPVariable_Unpack(grad.ptr()), Opcode::gradient, THPVariable_Unpack(factors.ptr())));
  });
  module.def("addend", [](const py::object& value, py::handle sum, const py::object& dtype) {
    const auto type = reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type;
    return wrapped_or_none(compute_addend(value_of(value), THPVariable_Unpack(sum.ptr()), type));
  });
  module.def("chosen", [] {
    py::dict result;
    for (const auto& [configuration_id, choice] : chosen()) {
      result[py::int_(configuration_id)] = choice.formula;
    }
    return result;
  });
  module.def("forget_choices", [] { chosen().clear(); });
}

}  // namespace

void add_recipes(py::module_& module) {
  add_value_type(module);
  add_settings(module);
  add_step(module);
  add_verification(module);
  add_for_tests(module);
}

}  // namespace fastact::recipes
