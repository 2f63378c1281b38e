#include "joined.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "../../recipes/join.h"
#include "../devices.h"
#include "../dispatch.h"
#include "formulas.h"
#include "leaves.h"

namespace fastact::recipes {
namespace {

using torch::autograd::Edge;

int64_t dim_of(const py::object& dim, const at::DimVector& sizes) {
  return at::maybe_wrap_dim(PyLong_AsLongLong(dim.ptr()), static_cast<int64_t>(sizes.size()));
}

// An operand that can't be derived: its edge, its place among the operands, and where it lies in the output.
struct Part {
  Edge edge;
  size_t operand;
  int64_t start, length;
};

// The operands of a cat or stack, without the empty ones; null for those that can't be derived.
struct Parts {
  Objects operands;
  std::vector<Part> unknown;
};

// None where the output isn't made of these.
std::optional<Parts> parts_of(Step& step, const py::object& formula, int64_t along) {
  const at::DimVector sizes = sizes_of(step.node->input_metadata(step.output_nr));
  const auto is_joined_alike = [&](const Value& value) {  // by a recipe that was compared with its tensor
    return value.formula.is(formula) && value.replaced && dim_of(value.arguments[0], sizes) == along;
  };
  Parts parts;
  Objects& operands = parts.operands;
  int64_t length = 0;
  for (size_t i = 0; i < step.node->next_edges().size(); ++i) {
    const Edge& edge = step.node->next_edge(i);
    py::object value = operand(step, i, nullptr);
    if (!value && !edge.function) {
      continue;  // of any size, which shows in the sum
    }
    const at::DimVector part =
        value ? at::DimVector(value_of(value).sizes_of()) : sizes_of(edge.function->input_metadata(edge.input_nr));
    const bool is_empty = c10::multiply_integers(part) == 0;
    const bool is_stacked = part.size() != sizes.size();
    if (is_empty && (!value || is_stacked)) {
      continue;  // cat takes an empty one of any shape
    }
    if (!value) {
      if (is_stacked) {  // so it can't be kept
        return std::nullopt;
      }
      parts.unknown.push_back({edge, operands.size(), length, part[along]});
    }
    length += is_stacked ? 1 : part[along];
    if (value && !is_stacked && is_joined_alike(value_of(value))) {
      const Objects& before = value_of(value).operands;
      operands.insert(operands.end(), before.begin(), before.end());
    } else {
      operands.push_back(std::move(value));
    }
  }
  return length == sizes[along] ? std::optional(std::move(parts)) : std::nullopt;
}

// Whether the unknown ones can be kept in place of the output, and it pays. One that is alone is the output.
bool can_be_kept(const Parts& parts, const Step& step, int64_t dim) {
  if (!step.tensor || step.tensor->_version() > 0 || parts.operands.size() > kMaxRoots) {
    return false;
  }
  int64_t length = 0;
  for (const Part& part : parts.unknown) {
    const auto dtype = part.edge.function->input_metadata(part.edge.input_nr).dtype();
    if (is_leaf(part.edge) || dtype != step.tensor->dtype()) {
      return false;
    }
    length += part.length;
  }
  return parts.operands.size() == 1 || 2 * length <= step.tensor->size(dim);
}

py::object keep_part(const Part& part, const Step& step, int64_t dim) {
  const at::NoGradGuard no_grad;
  const bool is_alone = part.length == step.tensor->size(dim);
  const at::Tensor tensor = is_alone ? *step.tensor : step.tensor->narrow(dim, part.start, part.length).clone();
  py::object value = keep(tensor, name_of(*part.edge.function), attribute(step.hook, NAME("outer")));
  value_of(value).is_copy = true;
  value_of(value).is_rearranged = true;
  note(value, part.edge.function, part.edge.input_nr);
  return value;
}

// The bytes of a tensor of this memory format from one place in a dimension to the next.
int64_t bytes_between(const at::Tensor& tensor, int64_t dim, at::MemoryFormat format) {
  int64_t bytes = tensor.element_size();
  if (dim == 1 && format != at::MemoryFormat::Contiguous) {
    return bytes;
  }
  for (int64_t inner = dim + 1; inner < tensor.dim(); ++inner) {
    bytes *= tensor.size(inner);
  }
  return dim == 0 || format == at::MemoryFormat::Contiguous ? bytes : bytes * tensor.size(1);
}

// What the kernel is to do, without its output; none where it can't.
std::optional<Join> join_of(const std::vector<at::Tensor>& tensors, int64_t dim, at::MemoryFormat format) {
  const at::Tensor& first = tensors[0];
  const int64_t inner = bytes_between(first, dim, format);
  Join join = {};
  join.parts = static_cast<int>(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const bool is_alike = is_plain(tensor) && tensor.device() == first.device() && tensor.dtype() == first.dtype() &&
                          tensor.dim() == first.dim() && tensor.suggest_memory_format() == format &&
                          tensor.is_contiguous(format);
    at::DimVector sizes(tensor.sizes());
    if (!is_alike) {
      return std::nullopt;
    }
    sizes[dim] = first.size(dim);
    const int64_t bytes = inner * tensor.size(dim);
    if (first.sizes() != at::IntArrayRef(sizes) || tensor.numel() == 0 || bytes % Join::kPiece != 0 || !is_aligned(tensor)) {
      return std::nullopt;
    }
    join.part[i] = {tensor.const_data_ptr(), bytes / Join::kPiece};
  }
  join.rows = static_cast<int64_t>(first.nbytes()) / (inner * first.size(dim));
  return join;
}

}  // namespace

at::Tensor join(const std::vector<at::Tensor>& tensors, int64_t dim) {
  const bool may_be_served = kHasCuda && !tensors.empty() && tensors.size() <= Join::kMostParts && tensors[0].is_cuda() &&
                             tensors[0].numel() > 0 && tensors[0].dim() > 0;
  if (may_be_served) {
    const at::Tensor& first = tensors[0];
    const at::MemoryFormat format = first.suggest_memory_format();
    dim = at::maybe_wrap_dim(dim, first.dim());
    if (auto join = join_of(tensors, dim, format)) {
      at::DimVector sizes(first.sizes());
      sizes[dim] = std::accumulate(tensors.begin(), tensors.end(), int64_t{0}, [&](int64_t sum, const at::Tensor& each) {
        return sum + each.size(dim);
      });
      at::Tensor result = at::empty(sizes, first.options(), format);
      join->output = result.mutable_data_ptr();
      Cuda::launch(result, [&](cuda::Stream stream) { return cuda::run(*join, stream); });
      return result;
    }
  }
  return at::cat(tensors, dim);
}

bool by_joining(Step& step, const py::object& formula, const py::object& dim, Value& recipe) {
  const auto& meta = step.node->input_metadata(step.output_nr);
  const at::DimVector sizes = sizes_of(meta);
  if (c10::multiply_integers(sizes) == 0) {
    return false;  // empty ones of one dimension are joined along any
  }
  const int64_t along = dim_of(dim, sizes);
  std::optional<Parts> parts = parts_of(step, formula, along);
  if (!parts || (!parts->unknown.empty() && !can_be_kept(*parts, step, along))) {
    return false;
  }
  auto& [operands, unknown] = *parts;
  for (auto part = unknown.begin(); part != unknown.end(); ++part) {
    const auto same = std::find_if(unknown.begin(), part, [&](const Part& other) { return other.edge == part->edge; });
    operands[part->operand] = same == part ? keep_part(*part, step, along) : operands[same->operand];
  }
  // One that an empty part of a wider dtype has widened is joined, and cast.
  const bool is_alone = operands.size() == 1 && value_of(operands[0]).sizes_of() == sizes &&
                        value_of(operands[0]).dtype_of() == c10::typeMetaToScalarType(meta.dtype());
  recipe.operands = std::move(operands);
  recipe.formula = is_alone ? formulas().same : formula;
  recipe.arguments = is_alone ? Objects() : Objects{dim};
  return true;
}

}  // namespace fastact::recipes
