#include "operands.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

#include "derivation.h"
#include "leaves.h"

namespace fastact::recipes {
namespace {

using torch::autograd::Node;

// Whether other recipes may read it.
bool may_be_read(const Value& value) {
  return value.is_current() && !value.is_partial && !value.is_private &&
         std::none_of(value.roots.begin(), value.roots.end(), [](const py::object& root) { return value_of(root).is_private; });
}

// The value of a parameter, which is a leaf of the graph.
py::object find_leaf(const at::Tensor& parameter, const Node& reader, const NodePointer& node, uint32_t output_nr, int depth) {
  if (!is_sharded(parameter)) {
    py::object value = keep(parameter);
    note(value, node, output_nr);
    return value;
  }
  if (depth > 1 || !is_cast(reader)) {
    return copy_if_small(parameter);
  }
  py::object value = keep(parameter);  // a module's own weight, cast
  value_of(value).is_private = true;
  return value;
}

const at::Tensor& leaf_of(const Node& node) {
  return static_cast<const torch::autograd::AccumulateGrad&>(node).variable;
}

bool is_on_cpu(const Value& value) {
  return value.device_of() && value.device_of()->is_cpu();
}

// Whether a leaf that an op read may have been written to since.
bool is_outdated(const Step& step) {
  const auto begins = [&] { return static_cast<uint64_t>(PyLong_AsLongLong(attribute(step.hook, NAME("begins")).ptr())); };
  return !is_dry_run(step.hook) && is_of_earlier_pass(step.node->sequence_nr(), step.node->thread_id(), begins());
}

// The value of an operand: somebody keeps it, it is a parameter, or it follows from such.
py::object find(py::handle hook, const Node& reader, const NodePointer& node, uint32_t output_nr, int depth) {
  py::object value = noted(node, output_nr);
  const bool is_of_leaf = is_leaf({node, output_nr});
  if (is_of_leaf && is_alias(leaf_of(*node))) {
    return {};
  }
  if (value && is_of_leaf && !value_of(value).is_current()) {
    value = py::object();  // of a graph that had it before it was written to
  }
  auto& between = Derivation::current->between;
  if (!value) {
    const auto found = between.find({node.get(), output_nr});
    value = found != between.end() ? found->second.first : py::object();
  }
  if (value) {
    if (may_be_read(value_of(value))) {
      return value;
    }
    dead_ends().add(node, output_nr);
    return {};
  }
  if (is_of_leaf) {
    value = find_leaf(leaf_of(*node), reader, node, output_nr, depth);
    Derivation::current->may_succeed_later |= !value;  // once it is gathered
    return value;
  }
  if (dead_ends().contains(node, output_nr)) {
    return {};
  }
  value = derive({hook, node, output_nr, nullptr, depth});
  if (value) {
    between[{node.get(), output_nr}] = {value, node};
  } else {
    dead_ends().add(node, output_nr);
  }
  return value;
}

// The strides of an operand, where the node has saved it or a clone of it.
void take_strides_of_saved(Step& step, PyObject* name, Value& value) {
  if (!PyObject_HasAttr(step.python_node().ptr(), name)) {
    return;
  }
  const py::object other = saved(step, name);
  if (other && is_value(other) && value_of(other).strides_of()) {
    value.strides_of_output = std::make_unique<const at::DimVector>(*value_of(other).strides_of());
  }
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

// Which of the node's outputs is saved under a name: 1 under result1; 0 if the name doesn't say.
uint32_t output_nr_of(PyObject* name) {
  constexpr std::string_view prefix = "_raw_saved_result";
  const std::string_view text = PyUnicode_AsUTF8(name);
  return text.size() == prefix.size() + 1 && text.substr(0, prefix.size()) == prefix ? text.back() - '0' : 0;
}

// Whether a backward pass has freed what the node saved: that is None as well, but PyTorch raises an error for it.
bool was_freed(Step& step, PyObject* raw_name) {
  const std::string name = "_saved" + std::string(PyUnicode_AsUTF8(raw_name)).substr(std::string_view("_raw_saved").size());
  const auto found = py::reinterpret_steal<py::object>(PyObject_GetAttrString(step.python_node().ptr(), name.c_str()));
  if (!found) {
    PyErr_Clear();
  }
  return !found;
}

// The value, number or None behind one of the tensors that a node saved under a name; None also once it was freed.
py::object behind(const py::object& raw) {
  const py::object data = attribute(raw, NAME("data"));
  if (is_value(data)) {
    const Value& value = value_of(data);
    if (value.is_private || value.copy) {
      return value.copy;  // or null
    }
    return may_be_read(value) ? data : py::object();
  }
  if (!attribute(raw, NAME("unpack_hook")).is_none()) {
    return {};
  }
  if (THPVariable_Check(data.ptr())) {
    // A number in an expression, as 2 in x * 2, is a tensor that hooks don't see. Any other was saved before the scope.
    const bool is_number = THPVariable_Unpack(data.ptr()).unsafeGetTensorImpl()->is_wrapped_number();
    return is_number ? py::object(data.attr("item")()) : py::object();
  }
  return data;
}

}  // namespace

py::object saved(Step& step, PyObject* name) {
  if (const uint32_t output_nr = output_nr_of(name)) {  // as layer norm saves its statistics; the registry is faster to ask
    py::object value = noted(step.node, output_nr);
    if (value && value_of(value).version == 0 && value_of(value).is_current()) {
      return value;
    }
  }
  const py::object raw = attribute(step.python_node(), name);
  if (!PyTuple_CheckExact(raw.ptr())) {
    py::object value = behind(raw);
    return value && value.is_none() && was_freed(step, name) ? py::object() : value;
  }
  py::list values;
  bool has_any = false;  // else they were freed
  for (const py::handle each : py::reinterpret_borrow<py::tuple>(raw)) {
    const py::object value = behind(py::reinterpret_borrow<py::object>(each));
    if (!value) {
      return {};
    }
    has_any |= !value.is_none();
    values.append(value);
  }
  return has_any ? py::object(py::tuple(values)) : py::object();
}

py::object output(Step& step, const NodePointer& node, uint32_t output_nr) {
  return find(step.hook, *step.node, node, output_nr, step.depth + 1);
}

py::object operand(Step& step, size_t i, PyObject* name) {
  const torch::autograd::Edge& edge = step.node->next_edge(i);
  // A sharded parameter may be freed by now, but what was saved of it has a copy.
  const bool is_saved = is_leaf(edge) && ((name && sharding().has_fsdp2) || is_outdated(step));
  if (!edge.function || is_saved) {
    py::object value = name && PyObject_HasAttr(step.python_node().ptr(), name) ? saved(step, name) : py::object();
    return edge.function && value && value.is_none() ? py::object() : value;  // there is one, which backward doesn't need
  }
  py::object value = output(step, edge.function, edge.input_nr);
  if (value && name && is_on_cpu(value_of(value)) && !value_of(value).strides_of() && value_of(value).is_recipe()) {
    take_strides_of_saved(step, name, value_of(value));
  }
  return value;
}

at::DimVector sizes_of(const torch::autograd::InputMetadata& meta) {
  return at::DimVector(C10_AS_INTARRAYREF_SLOW(meta.shape_as_dim_vector()));
}

py::object argument(py::handle node, PyObject* name) {
  return with_sign(attribute(node, name));
}

py::object argument(Step& step, PyObject* name) {
  const auto& meta = step.node->input_metadata(step.output_nr);
  if (name == from_python().dtype.ptr()) {
    return dtype_object(c10::typeMetaToScalarType(meta.dtype()));
  }
  if (name == from_python().shape.ptr()) {
    const at::DimVector sizes = sizes_of(meta);
    py::tuple shape(sizes.size());
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      shape[dim] = sizes[dim];
    }
    return std::move(shape);
  }
  if (name == from_python().output_nr.ptr()) {
    return py::int_(step.output_nr);
  }
  return argument(step.python_node(), name);
}

}  // namespace fastact::recipes
