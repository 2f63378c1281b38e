// The backward pass of PyTorch's own group norm, in a scope, by kernels: see answers.h. Under autocast they take and give the
// half types of the casts on both sides: see casts.h.
#pragma once

#include <torch/csrc/autograd/function.h>

namespace fastact::recipes {

// Adds the hooks to a group norm's node.
void speed_up_group_norm(torch::autograd::Node& node);

}  // namespace fastact::recipes
