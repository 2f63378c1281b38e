#include "gradients.h"

#include "nodes.h"

namespace fastact::recipes {

void add_gradient_hooks(torch::autograd::Node& node) {
  add_batch_norm_hooks(node);
  add_layer_norm_hooks(node);
  add_group_norm_hooks(node);
  add_cast_hooks(node);
  add_elementwise_hooks(node);
  for (const auto& edge : node.next_edges()) {
    if (edge.function) {
      add_softmax_hooks(*edge.function, &node);
    }
  }
}

void add_gradient_hooks_of_saved(torch::autograd::Node& node) {
  add_activation_hooks(node);
  add_square_hooks(node);
  add_dropout_hooks(node);
  add_softmax_hooks(node);
}

}  // namespace fastact::recipes
