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

// The half type of what an edge leads to, unless that is a leaf, or undefined.
at::ScalarType half_behind(const Edge& edge) {
  if (!edge.function || is_leaf(edge)) {
    return at::ScalarType::Undefined;
  }
  const auto dtype = c10::typeMetaToScalarType(edge.function->input_metadata(edge.input_nr).dtype());
  return is_half(dtype) ? dtype : at::ScalarType::Undefined;
}

bool is_sum(const torch::autograd::Node& node) {
  return typeid(node) == typeid(AddBackward0);
}

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

// A cast from a half type. Or its clone, as group norm makes one of what is channels-last.
bool by_downcast(Step& step, Value& recipe) {
  const bool is_of_clone = is_clone(*step.node);
  const NodePointer& cast = is_of_clone ? step.node->next_edge(0).function : step.node;
  if (!cast || !is_cast(*cast)) {
    return false;
  }
  const Edge& edge = cast->next_edge(0);
  const at::ScalarType dtype = half_behind(edge);
  if (!is_half(dtype) || edge.function->input_metadata(edge.input_nr).device() != step.tensor->device()) {
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

// A sum of something that is known and a tensor in a half type, as a residual stream under autocast. What was added is found
// anew, as far as it shows in the sum: all that is kept follows from the sum and what is known.
bool by_addend(Step& step, const py::object& formula, Value& recipe) {
  if (!static_cast<const AddBackward0&>(*step.node).alpha.equal(1)) {
    return false;
  }
  for (const size_t i : {0, 1}) {
    const Edge& edge = step.node->next_edge(1 - i);
    const at::ScalarType dtype = half_behind(edge);
    if (!is_half(dtype) || at::IntArrayRef(sizes_of(edge.function->input_metadata(edge.input_nr))) != step.tensor->sizes()) {
      continue;
    }
    const py::object known = operand(step, i, nullptr);
    const auto addend = known && is_base_of(known, *step.tensor) ? addend_of(step, known, dtype) : std::nullopt;
    if (addend) {
      const py::object kept = keep(*addend, name_of(*edge.function), attribute(step.hook, NAME("outer")));
      recipe.formula = formula;
      recipe.operands = i == 0 ? Objects{known, kept} : Objects{kept, known};
      recipe.arguments = {py::int_(1)};
      return true;
    }
  }
  return false;
}

}  // namespace

bool may_come_from_half(const Step& step) {
  return step.tensor && step.tensor->scalar_type() == at::kFloat && step.tensor->_version() == 0 &&
         (is_cast(*step.node) || is_clone(*step.node) || is_sum(*step.node));
}

bool by_half(Step& step, const py::object& formula, Value& recipe) {
  return is_sum(*step.node) ? by_addend(step, formula, recipe) : by_downcast(step, recipe);
}

}  // namespace fastact::recipes
