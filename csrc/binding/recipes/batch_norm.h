// The backward pass of PyTorch's own batch norm, in a scope: its node stays as it is, and a hook on it computes what the node
// would, with a kernel that gives the same bits in less time. So it does for a ReLU, or an activation that has a mask, behind
// the norm: both at once.
#pragma once

#include <torch/csrc/autograd/function.h>

namespace fastact::recipes {

// Adds hooks that compute its gradients to a batch norm's node, whose output is a recipe.
void speed_up_batch_norm(torch::autograd::Node& node);

// The same for an activation behind a norm, whose output is saved.
void speed_up_activation(torch::autograd::Node& node);

}  // namespace fastact::recipes
