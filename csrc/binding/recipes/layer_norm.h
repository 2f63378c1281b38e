// The backward pass of PyTorch's own layer norm, in a scope, by a kernel: see answers.h. Under autocast the casts on both sides
// of it leave their gradients in the half type, which the kernel takes and gives.
#pragma once

#include <torch/csrc/autograd/function.h>

namespace fastact::recipes {

// Adds hooks that compute its gradients to a layer norm's node, or to that of a cast behind one.
void speed_up_layer_norm(torch::autograd::Node& node);

}  // namespace fastact::recipes
