#include "casts.h"

#include <torch/csrc/autograd/generated/Functions.h>

#include "../../dtypes.h"
#include "../computing.h"
#include "../smooth.h"
#include "nodes.h"

namespace fastact::recipes {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::autograd::generated::CloneBackward0;
using torch::autograd::generated::ToCopyBackward0;

// On a node of this package's own, which takes half types: whoever else sees its gradient gets it in float32.
class SmoothPreHook : public PreHook {
 public:
  explicit SmoothPreHook(const Node& node) : node_(node) {}

  bool takes_half() const override { return true; }

  variable_list operator()(const variable_list& grads) override {
    return is_watched(node_, /*post_hooks=*/0) ? decline(node_, grads) : grads;
  }

 private:
  const Node& node_;
};

bool takes_half_gradient(const Node& node) {
  const auto* const hook = hook_of<PreHook>(node);
  return hook && hook->takes_half();
}

// Leaves a gradient as it is for the node before the cast, which takes that: one that nobody else has and that keeps nothing
// else alive, so that it may wait in place of a copy.
class CastPreHook : public PreHook {
 public:
  explicit CastPreHook(ToCopyBackward0& node) : node_(node) {}

  variable_list operator()(const variable_list& grads) override {
    const at::Tensor& grad = grads[0];
    const Node& before = *node_.next_edge(0).function;
    const bool is_left = may_answer(node_, grad) && takes_half_gradient(before) && may_answer(before, grad) &&
                         dtype_of_output(before) == at::kFloat && is_half(grad.scalar_type()) &&
                         before.input_metadata(0).device() == grad.device() && is_alone(grad) &&
                         grad.storage().nbytes() == grad.nbytes() && passes_unnoticed(node_);
    return is_left ? answer({grad}, grads.size(), /*for_next=*/1) : grads;
  }

 private:
  ToCopyBackward0& node_;
};

// Hands on what the node behind it has left in a half type, for the cast before it.
class ClonePreHook : public PreHook {
 public:
  explicit ClonePreHook(CloneBackward0& node) : node_(node) {}

  variable_list operator()(const variable_list& grads) override {
    const bool is_left = grads[0].defined() && grads[0].scalar_type() != dtype_of_output(node_);
    return is_left ? answer({grads[0]}, grads.size(), /*for_next=*/1) : grads;
  }

 private:
  const CloneBackward0& node_;
};

}  // namespace

at::ScalarType half_of_cast_before(Node& node) {
  Node* before = node.next_edge(0).function.get();
  Node* const clone = before && hook_of<ClonePreHook>(*before) ? before : nullptr;
  if (clone) {
    before = is_watched(*clone) ? nullptr : clone->next_edge(0).function.get();
  }
  const auto* const cast = as<ToCopyBackward0>(before);
  if (!cast || dtype_of_output(node) != at::kFloat || has_hooks(*cast) ||
      cast->self_options.device() != node.input_metadata(0).device()) {
    return at::ScalarType::Undefined;
  }
  const auto dtype = c10::typeMetaToScalarType(cast->self_options.dtype());
  const bool is_unnoticed =
      is_half(dtype) && passes_unnoticed(node, /*has_saved=*/true) && (!clone || passes_unnoticed(*clone));
  return is_unnoticed ? dtype : at::ScalarType::Undefined;
}

at::Tensor saved_in_half(Node& node, const SavedVariable& saved, at::ScalarType half) {
  if (half == at::ScalarType::Undefined) {
    return {};
  }
  return with_value(node, saved, [&](const py::object& object) {
    if (!object || !value_of(object).is_recipe() || value_of(object).half() != half ||
        value_of(object).must_be_computed_once()) {
      return at::Tensor();
    }
    const Reading reading;
    value_of(object).check_unwritten();
    return in_half(value_of(object));
  });
}

void add_cast_hooks(Node& node) {
  auto* const cast = as<ToCopyBackward0>(&node);
  Node* const before = cast ? node.next_edge(0).function.get() : nullptr;
  if (!before || dtype_of_output(*before) != at::kFloat) {
    return;
  }
  add_cat_hooks(*before);
  if (is_smooth_with_instruction(*before) && !has_hooks(*before)) {
    before->add_pre_hook(std::make_unique<SmoothPreHook>(*before));
  }
  if (takes_half_gradient(*before)) {
    add_hooks<CastPreHook>(*cast);
  }
}

void add_clone_hooks(Node& norm) {
  if (auto* const clone = as<CloneBackward0>(norm.next_edge(0).function.get())) {
    add_hooks<ClonePreHook>(*clone);
  }
}

}  // namespace fastact::recipes
