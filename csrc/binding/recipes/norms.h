// The backward pass of PyTorch's own batch norm, in a scope: its node stays as it is, and a hook on it computes what the node
// would, with a kernel that gives the same bits in less time. So it does for a ReLU, or an activation that has a mask, behind
// the norm: both at once.
#pragma once

#include <torch/csrc/autograd/function.h>

namespace fastact::recipes {

// Has a batch norm's node try, once its output is a recipe.
void speed_up_norm(torch::autograd::Node& node);

// The same for an activation's node, when its output is first saved: later others may hold the norm's node as well.
void speed_up_activation(torch::autograd::Node& node);

// Whether the node that runs has its results already, and needs none of what it saved.
bool is_answered();

}  // namespace fastact::recipes
