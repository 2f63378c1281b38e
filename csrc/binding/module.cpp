// The Python module `activations_cuda._C`. Loading it registers the ops; what it holds itself is how it was built, and for each
// member of the family a direct way in: a call through torch.ops costs a microsecond more than the op itself.
#include <ATen/PythonTorchFunctionTLS.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/python_numbers.h>
#include <torch/csrc/utils/python_strings.h>

#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "bits/autograd.h"
#include "codes/autograd.h"
#include "family.h"
#include "find.h"
#include "origin.h"
#include "recipes/module.h"
#include "recipes/smooth.h"

namespace py = pybind11;

// libstdc++'s shared_ptr reads this variable of glibc 2.32; defined here, so that an older one will do. 0: there may be
// threads.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;

namespace fastact {
namespace {

template <class Op, bool inplace>
std::string function_name() {
  return fastact::function_name(Op::name, Op::overload) + (inplace ? "_" : "");
}

template <bool inplace>
struct Functions {
  using Self = std::conditional_t<inplace, at::Tensor&, const at::Tensor&>;
  using Output = std::conditional_t<inplace, at::Tensor&, at::Tensor>;

  // A plain C function of the interpreter, all arguments by position: pybind11's own calling convention costs a fifth of a
  // call.
  template <class Op, class... Parameters>
  struct Function {
    static PyObject* call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
      return unpack_and_call(arguments, count, std::index_sequence_for<Parameters...>());
    }

   private:
    template <class Parameter>
    static Parameter as(PyObject* argument) {
      if constexpr (std::is_same_v<Parameter, double>) {
        return number(argument);
      } else {
        TORCH_CHECK_TYPE(
            PyUnicode_Check(argument), function_name<Op, inplace>(), ": expected a string as parameter, got ",
            Py_TYPE(argument)->tp_name);
        return THPUtils_unpackStringView(argument);
      }
    }

    // As in PyTorch a tensor is accepted if it has no dimensions and doesn't require grad: its gradient would be lost silently.
    static double number(PyObject* argument) {
      if (!PyFloat_Check(argument) && !PyLong_Check(argument) && THPVariable_Check(argument)) {
        const at::Tensor& tensor = THPVariable_Unpack(argument);
        TORCH_CHECK_TYPE(
            tensor.dim() == 0 && !tensor.requires_grad(), function_name<Op, inplace>(),
            ": expected a number as parameter, got a tensor of shape ", tensor.sizes(),
            tensor.requires_grad() ? " that requires grad" : "");
      }
      TORCH_CHECK_TYPE(
          PyNumber_Check(argument), function_name<Op, inplace>(), ": expected a number as parameter, got ",
          Py_TYPE(argument)->tp_name);
      return THPUtils_unpackDouble(argument);
    }

    template <size_t... Index>
    static PyObject* unpack_and_call(PyObject* const* arguments, Py_ssize_t count, std::index_sequence<Index...>) {
      HANDLE_TH_ERRORS
      constexpr Py_ssize_t expected = 1 + sizeof...(Index);
      TORCH_CHECK_TYPE(count == expected, function_name<Op, inplace>(), ": expected ", expected, " arguments, got ", count);
      static const std::string name = std::string(Op::name) + (inplace ? "_" : "");
      if (!THPVariable_CheckExact(arguments[0]) || at::impl::torch_function_mode_enabled()) {
        TORCH_CHECK_TYPE(
            THPVariable_Check(arguments[0]) || PyObject_HasAttrString(arguments[0], "__torch_function__"),
            function_name<Op, inplace>(), ": expected a tensor, got ", Py_TYPE(arguments[0])->tp_name);
        // A subclass's or a mode's __torch_function__ must see the op.
        const py::object packet = py::module_::import("torch").attr("ops").attr("fastact").attr(name.c_str());
        const py::object op = packet.attr(Op::overload[0] == '\0' ? "default" : Op::overload);
        const py::object keywords = Op::keyword == nullptr ? py::object() : py::make_tuple(Op::keyword);
        return PyObject_Vectorcall(op.ptr(), arguments, count - (keywords ? 1 : 0), keywords.ptr());
      }
      static const auto op = find<Output(Self, Parameters...)>(name, Op::overload);
      // An in-place op's signature wants it mutable.
      auto& self = const_cast<at::Tensor&>(THPVariable_Unpack(arguments[0]));
      const std::tuple<Parameters...> parameters{as<Parameters>(arguments[1 + Index])...};
      at::Tensor output;
      {
        const py::gil_scoped_release no_gil;
        output = op.call(self, std::get<Index>(parameters)...);
      }
      return THPVariable_Wrap(std::move(output));
      END_HANDLE_TH_ERRORS
    }
  };
};

template <class Op, bool inplace>
PyMethodDef method() {
  static const std::string name = function_name<Op, inplace>();
  const auto function = &WithParameters<Functions<inplace>::template Function, Op>::call;
  return {name.c_str(), reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

const char* name_of(Saves saves) {
  switch (saves) {
    case Saves::input:
      return "input";
    case Saves::output_in_place:
      return "output in place";
    default:
      return "output";
  }
}

// What Python must know of a member.
struct Member {
  const char* pytorch_saves;  // for backward
  bool saves_output;          // does this package, with a code? Else it saves a mask alone
  std::string packed_op;      // which returns what is saved beside the output
};

template <class Op>
Member member() {
  return {
      name_of(Op::pytorch_saves), Op::saves_output, std::string(Op::name) + (Op::saves_output ? "_with_code" : "_with_mask")};
}

}  // namespace
}  // namespace fastact

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace fastact;
  static PyMethodDef methods[] = {
#define ACTIVATION(op, overload, F, parameters, in_pytorch) method<F##Op, false>(), method<F##Op, true>(),
#define SMOOTH(op, F) method<F##Op, false>(), method<F##Op, true>(),
#include "../family.def"
      {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) {
    throw py::error_already_set();
  }

  py::class_<Member>(module, "Member")
      .def_readonly("pytorch_saves", &Member::pytorch_saves)
      .def_readonly("saves_output", &Member::saves_output)
      .def_readonly("packed_op", &Member::packed_op);
  py::dict family;  // by the name of the op
#define ACTIVATION(op, overload, F, parameters, in_pytorch) family[#op] = member<F##Op>();
#define SMOOTH(op, F) family[#op] = member<F##Op>();
#include "../family.def"
  module.attr("family") = family;

  py::module_ of_recipes = module.def_submodule("recipes");
  recipes::add_recipes(of_recipes);

  // Or Python would show a node as a CppFunction.
  static PyTypeObject node_class = {PyVarObject_HEAD_INIT(nullptr, 0)}, code_node_class = {PyVarObject_HEAD_INIT(nullptr, 0)},
                      smooth_node_class = {PyVarObject_HEAD_INIT(nullptr, 0)};
  const auto add_node = [](const std::type_info& type, PyTypeObject& node_class, const char* name) {
    torch::autograd::registerCppFunction(type, torch::autograd::_initFunctionPyTypeObject(node_class, name, nullptr, nullptr));
    // Where torch.autograd.graph.Node looks for its subclasses.
    py::module_::import("torch._C").attr("_functions").attr(name) = py::handle(reinterpret_cast<PyObject*>(&node_class));
  };
  add_node(node_type(), node_class, kNodeName);
  add_node(code_node_type(), code_node_class, kCodeNodeName);
  add_node(recipes::smooth_node_type(), smooth_node_class, recipes::kSmoothNodeName);

#if defined(__clang__)
  module.attr("compiler") = "clang " __clang_version__;
#else
  module.attr("compiler") = "gcc " __VERSION__;
#endif
}
