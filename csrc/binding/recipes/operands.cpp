#include "operands.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <cstdint>

#include "../../torch_version.h"
#include "derivation.h"
#include "leaves.h"

namespace fastact::recipes {
namespace {

using torch::autograd::Node;

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
  if (depth > 1 || !name_of(reader).equal(callbacks().cast_node)) {
    return copy_of(parameter);
  }
  py::object value = keep(parameter, py::none(), py::none());  // a module's own weight, cast
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
  return !assumes(step.hook) &&
         is_of_earlier_pass(*step.node, static_cast<uint64_t>(PyLong_AsLongLong(attribute(step.hook, NAME("begins")).ptr())));
}

// The value of an operand: somebody keeps it, it is a parameter, or it follows from such.
py::object find(py::handle hook, const Node& reader, const NodePointer& node, uint32_t number, int depth) {
  py::object value = noted(node, number);
  const bool is_of_leaf = is_leaf({node, number});
  if (value && is_of_leaf && !value_of(value).is_current()) {
    value = py::object();  // of a graph that had it before it was written to
  }
  if (!value && Derivation::current) {
    auto& between = Derivation::current->between;
    const auto found = between.find({node.get(), number});
    if (found != between.end()) {
      value = found->second.first;
      if (!value) {
        return {};
      }
    }
  }
  if (!value) {
    if (is_of_leaf) {
      return find_leaf(leaf_of(*node), reader, node, number, depth);
    }
    value = derive({hook, node, number, nullptr, depth});
    if (Derivation::current) {
      Derivation::current->between[{node.get(), number}] = {value, node};
    }
  } else if (!value_of(value).is_current() || is_private(value_of(value))) {
    return {};
  }
  return value;
}

// The strides of an operand, where the node has saved it or a clone of it.
void take_strides_of_saved(Step& step, PyObject* name, Value& value) {
  if (!PyObject_HasAttr(step.python().ptr(), name)) {
    return;
  }
  const py::object other = saved(step.python(), name);
  if (other && is_value(other) && value_of(other).strides_of()) {
    value.strides_of_output = at::DimVector(*value_of(other).strides_of());
  }
}

// An operand of cat that nobody has kept: its edge, its place among the operands, and where it lies in the output.
struct Part {
  torch::autograd::Edge edge;
  size_t operand;
  int64_t start, length;
};

// Keeps such operands, if they are at most half of the output. What a dense block joins again and again is kept once so. One
// alone is the whole output, which is kept as it is.
bool keep_parts(const Step& step, size_t along, const std::vector<Part>& parts, std::vector<py::object>* operands) {
  if (!step.tensor || step.tensor->_version() > 0 || operands->size() > kMaxRoots) {
    return false;
  }
  const auto dim = static_cast<int64_t>(along);
  int64_t length = 0;
  for (const Part& part : parts) {
    const auto dtype = part.edge.function->input_metadata(part.edge.input_nr).dtype();
    if (is_leaf(part.edge) || dtype != step.tensor->dtype()) {
      return false;
    }
    length += part.length;
  }
  const bool is_alone = operands->size() == 1;
  if (!is_alone && 2 * length > step.tensor->size(dim)) {
    return false;
  }
  const at::NoGradGuard no_grad;
  for (auto part = parts.begin(); part != parts.end(); ++part) {
    py::object& value = (*operands)[part->operand];
    const auto same = std::find_if(parts.begin(), part, [&](const Part& other) { return other.edge == part->edge; });
    if (same != part) {  // it is joined twice
      value = (*operands)[same->operand];
      continue;
    }
    const at::Tensor tensor = is_alone ? *step.tensor : step.tensor->narrow(dim, part->start, part->length).clone();
    value = keep(tensor, name_of(*part->edge.function), attribute(step.hook, NAME("outer")));
    note(value, part->edge.function, part->edge.input_nr);
  }
  return true;
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

}  // namespace

py::object saved(py::handle node, PyObject* name) {
  const py::object raw = attribute(node, name), data = attribute(raw, NAME("data"));
  if (is_value(data)) {
    const Value& value = value_of(data);
    if (value.is_private || value.copy) {
      return value.copy;  // or null
    }
    return value.is_current() && !is_private(value) ? data : py::object();
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

py::object operand(Step& step, size_t i, PyObject* name) {
  const torch::autograd::Edge& edge = step.node->next_edge(i);
  // A sharded parameter may be freed by now, but what was saved of it has a copy.
  const bool is_saved = is_leaf(edge) && ((name && sharding().is_there) || is_outdated(step));
  if (!edge.function || is_saved) {
    return name && PyObject_HasAttr(step.python().ptr(), name) ? saved(step.python(), name) : py::object();
  }
  py::object value = find(step.hook, *step.node, edge.function, edge.input_nr, step.depth + 1);
  if (value && name && is_on_cpu(value_of(value)) && !value_of(value).strides_of() && value_of(value).is_recipe()) {
    take_strides_of_saved(step, name, value_of(value));
  }
  return value;
}

at::DimVector sizes_of(const torch::autograd::InputMetadata& meta) {
#if FASTACT_TORCH_VERSION >= 201  // recompute() wants a newer one still, but the binding compiles
  return at::DimVector(C10_AS_INTARRAYREF_SLOW(meta.shape_as_dim_vector()));
#else
  return {};
#endif
}

py::object argument(py::handle node, PyObject* name) {
  return with_sign(attribute(node, name));
}

py::object argument(Step& step, PyObject* name) {
  const auto& meta = step.node->input_metadata(step.number);
  if (name == callbacks().dtype.ptr()) {
    return dtype_object(c10::typeMetaToScalarType(meta.dtype()));
  }
  if (name == callbacks().shape.ptr()) {
    const at::DimVector sizes = sizes_of(meta);
    py::tuple shape(sizes.size());
    for (size_t dim = 0; dim < sizes.size(); ++dim) {
      shape[dim] = sizes[dim];
    }
    return std::move(shape);
  }
  return argument(step.python(), name);
}

bool append_joined(Step& step, py::handle formula, py::handle dim, std::vector<py::object>* operands) {
  const at::DimVector sizes = sizes_of(step.node->input_metadata(step.number));
  const auto dims = static_cast<int64_t>(sizes.size());
  const auto index_of = [&](py::handle dim) {
    return static_cast<size_t>(at::maybe_wrap_dim(PyLong_AsLongLong(dim.ptr()), dims));
  };
  const size_t along = index_of(dim);
  const auto is_joined_alike = [&](const Value& value) {  // by a recipe that was compared with its tensor
    return value.formula.is(formula) && value.replaced && index_of(py::tuple(value.arguments)[0]) == along;
  };
  int64_t length = 0;
  std::vector<Part> unknown;
  for (size_t i = 0; i < step.node->next_edges().size(); ++i) {
    const torch::autograd::Edge& edge = step.node->next_edge(i);
    py::object value = operand(step, i, nullptr);
    if (!value && !edge.function) {
      continue;  // of any size, which shows in the sum
    }
    const at::DimVector part =
        value ? at::DimVector(value_of(value).sizes_of()) : sizes_of(edge.function->input_metadata(edge.input_nr));
    const bool is_empty = c10::multiply_integers(part) == 0;
    const bool is_stacked = static_cast<int64_t>(part.size()) != dims;
    if (is_empty && (!value || is_stacked)) {
      continue;  // cat takes an empty one of any shape
    }
    if (!value) {
      if (is_stacked) {
        return false;
      }
      unknown.push_back({edge, operands->size(), length, part[along]});
    }
    length += is_stacked ? 1 : part[along];
    if (value && !is_stacked && is_joined_alike(value_of(value))) {
      const std::vector<py::object>& before = value_of(value).operands;
      operands->insert(operands->end(), before.begin(), before.end());
    } else {
      operands->push_back(std::move(value));
    }
  }
  return length == sizes[along] && (unknown.empty() || keep_parts(step, along, unknown, operands));
}

}  // namespace fastact::recipes
