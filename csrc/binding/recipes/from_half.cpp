#include "from_half.h"

#include <ATen/core/grad_mode.h>

#include "../dtypes.h"
#include "derivation.h"
#include "formulas.h"
#include "leaves.h"

namespace fastact::recipes {

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

}  // namespace fastact::recipes
