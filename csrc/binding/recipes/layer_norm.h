// The backward pass of PyTorch's own layer norm, in a scope, by a kernel: see answers.h. Under autocast it takes and gives the
// half types of the casts on both sides: see casts.h.
#pragma once

#include <torch/csrc/autograd/function.h>

namespace fastact::recipes {

// Adds the hooks to a layer norm's node.
void speed_up_layer_norm(torch::autograd::Node& node);

}  // namespace fastact::recipes
