#include "from_half.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <optional>

#include "../dtypes.h"
#include "computing.h"
#include "derivation.h"
#include "formulas.h"
#include "fusion.h"
#include "leaves.h"

namespace fastact::recipes {
namespace {

using torch::autograd::Edge;
using torch::autograd::generated::AddBackward0;

// Whether the sum may follow from it and what was added: if it is kept, or follows from a single kept tensor of its size. So of
// a residual stream every second sum is kept. To keep only every third would save a third more memory, but take half as much
// time again. A recipe must have been verified, since an addend would make up for what is wrong with it, as long as it can.
bool is_base_of(const py::object& object, const at::Tensor& sum) {
  const Value& known = value_of(object);
  const auto has_its_size = [&](const py::object& root) { return value_of(root).sizes_of() == sum.sizes(); };
  return known.dtype_of() == at::kFloat && known.sizes_of() == sum.sizes() && known.depth < kMaxDepth &&
         (!known.is_recipe() || std::count_if(known.roots.begin(), known.roots.end(), has_its_size) == 1) &&
         !Derivation::current->is_untried(object);
}

std::optional<at::Tensor> addend_of(Step& step, const py::object& known, at::ScalarType dtype) {
  if (is_dry_run(step.hook)) {
    return at::empty_like(*step.tensor, step.tensor->options().dtype(dtype));
  }
  const Computing computing;
  Value& value = value_of(known);
  // The hooks outside would have to give it back now.
  return value.follows_from_outside() ? std::nullopt : compute_addend(value, *step.tensor, dtype);
}

}  // namespace

bool by_downcast(Step& step, Value& recipe) {
  const bool is_of_clone = is_clone(*step.node);
  const NodePointer& cast = is_of_clone ? step.node->next_edge(0).function : step.node;
  if (!cast || !is_cast(*cast)) {
    return false;
  }
  const torch::autograd::Edge& edge = cast->next_edge(0);
  if (!step.tensor || step.tensor->scalar_type() != at::kFloat || step.tensor->_version() > 0 || !edge.function ||
      is_leaf(edge)) {
    return false;
  }
  const auto& source = edge.function->input_metadata(edge.input_nr);
  const auto dtype = c10::typeMetaToScalarType(source.dtype());
  if (!is_half(dtype) || source.device() != step.tensor->device()) {
    return false;
  }
  const at::NoGradGuard no_grad;
  recipe.formula = formulas().cast;
  recipe.operands = {keep(step.tensor->to(dtype), name_of(*edge.function), attribute(step.hook, NAME("outer")))};
  recipe.arguments = {dtype_object(at::kFloat)};
  value_of(recipe.operands[0]).is_copy = true;
  value_of(recipe.operands[0]).is_rearranged = true;
  if (!is_of_clone) {  // a clone's layout is its own
    note(recipe.operands[0], edge.function, edge.input_nr);
  }
  return true;
}

bool by_addend(Step& step, const py::object& formula, Value& recipe) {
  const auto& add = static_cast<const AddBackward0&>(*step.node);
  if (!step.tensor || step.tensor->scalar_type() != at::kFloat || step.tensor->_version() > 0 || !add.alpha.equal(1)) {
    return false;
  }
  for (const size_t i : {0, 1}) {
    const Edge& edge = step.node->next_edge(1 - i);
    if (!edge.function || is_leaf(edge)) {
      continue;
    }
    const auto& meta = edge.function->input_metadata(edge.input_nr);
    const auto dtype = c10::typeMetaToScalarType(meta.dtype());
    const bool is_added = is_half(dtype) && sizes_of(meta) == step.tensor->sizes();
    const py::object known = is_added ? operand(step, i, nullptr) : py::object();
    if (!known || !is_base_of(known, *step.tensor)) {
      continue;
    }
    if (const auto addend = addend_of(step, known, dtype)) {
      const py::object kept = keep(*addend, name_of(*edge.function), attribute(step.hook, NAME("outer")));
      recipe.formula = formula;
      recipe.operands = i == 0 ? Objects{known, kept} : Objects{kept, known};
      recipe.arguments = {py::int_(1)};
      return true;
    }
  }
  return false;
}

}  // namespace fastact::recipes
