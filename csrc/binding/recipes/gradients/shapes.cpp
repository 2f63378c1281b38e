#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include "../hook.h"
#include "answers.h"
#include "gradients.h"

namespace fastact::recipes {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::generated::GatherBackward0;
using torch::autograd::generated::NllLoss2DBackward0;
using torch::autograd::generated::NllLossBackward0;

// What of a node's only serves its op for the shape of the gradient, or null.
const SavedVariable* saved_for_shape(Node* node) {
  if (const auto* loss = as<NllLossBackward0>(node)) {
    return &loss->self_;
  }
  if (const auto* loss = as<NllLoss2DBackward0>(node)) {  // of images
    return &loss->self_;
  }
  const auto* gather = as<GatherBackward0>(node);
  return gather ? &gather->self_ : nullptr;
}

}  // namespace

bool is_read_for_shape(py::handle value) {
  const auto node = torch::autograd::get_current_node();
  const SavedVariable* const saved = saved_for_shape(node.get());
  if (!saved || at::GradMode::is_enabled() || c10::impl::dispatch_mode_enabled() || is_hooked(*node)) {
    return false;  // somebody else may read it, or the graph that is made
  }
  return value_behind(*saved).is(value);
}

}  // namespace fastact::recipes
