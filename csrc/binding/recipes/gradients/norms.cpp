#include "norms.h"

#include "../../dispatch.h"
#include "../../dtypes.h"
#include "../verification.h"

namespace fastact::recipes {

Needed needed_of(const torch::autograd::Node& node) {
  return {node.task_should_compute_output(0), node.task_should_compute_output(1), node.task_should_compute_output(2)};
}

bool may_be_in_any_layout(torch::autograd::Node& node, const at::Tensor& grad) {
  const auto* const norm = node.next_edge(0).function.get();
  return norm && hook_of<NormPreHook>(*norm) && may_answer(*norm, grad) && passes_unnoticed(node, /*has_saved=*/true);
}

bool are_in_vectors(const at::Tensor& grad, const at::Tensor& input, at::ScalarType dtype) {
  const at::ScalarType of_grad = grad.scalar_type(), of_input = input.scalar_type();
  const auto is_taken = [&](at::ScalarType type) { return type == dtype || (dtype == at::kFloat && is_half(type)); };
  const bool has_one_half = !is_half(of_grad) || !is_half(of_input) || of_grad == of_input;
  return is_float_or_half(dtype) && is_taken(of_grad) && is_taken(of_input) && has_one_half &&
         grad.device() == input.device() && grad.sizes() == input.sizes() && is_in_vectors(grad) && is_in_vectors(input);
}

at::Tensor some_like(const at::Tensor& tensor, at::IntArrayRef sizes, int64_t seed) {
  return tensor.defined() ? some_numbers(sizes, tensor.options(), seed) : at::Tensor();
}

}  // namespace fastact::recipes
