// Gradients of PyTorch's elementwise ops whose nodes have saved recipes. They are computed in the pass that computes those.
#pragma once

#include <torch/csrc/autograd/function.h>

namespace fastact::recipes {

// Adds hooks to a node from which something is derived, if it is a product's, a power's, tanh's or SiLU's that saves a
// recipe. Which node saves a tensor isn't known while that is packed.
void speed_up_elementwise(torch::autograd::Node& node);

// The same for the square in an RMS norm, from which nothing is derived, given the node of its rsqrt.
void speed_up_square_before(torch::autograd::Node& rsqrt);

}  // namespace fastact::recipes
