// The nodes that have hooks. Each function adds them to a node if it is of its kind.
#pragma once

#include <torch/csrc/autograd/function.h>

namespace fastact::recipes {

// Batch norm's backward pass by kernels; and together with that of a ReLU behind it, or of an activation that has a mask.
void add_batch_norm_hooks(torch::autograd::Node& node);
void add_activation_hooks(torch::autograd::Node& node);

// Layer and group norm's backward pass. Under autocast the kernels take and give the half types of the casts on both sides
// (casts.h).
void add_layer_norm_hooks(torch::autograd::Node& node);
void add_group_norm_hooks(torch::autograd::Node& node);

// The gradients of products, powers, tanh, SiLU and dropout that have saved recipes, in the pass that computes these. Which
// node saves a tensor isn't known while that is packed, so they are added once something is derived from its output. From the
// square in an RMS norm nothing is; its rsqrt's node leads to it.
void add_elementwise_hooks(torch::autograd::Node& node);
void add_square_hooks(torch::autograd::Node& rsqrt);

// The gradient of a dropout whose mask is packed, for the node of a tensor that is saved: of dropout's output or, mostly, of a
// sum behind it.
void add_dropout_hooks(torch::autograd::Node& node);

// The gradient of a softmax or its logarithm, in the incoming one's memory; and of a cast to float32 behind it.
void add_softmax_hooks(torch::autograd::Node& node, torch::autograd::Node* behind = nullptr);

// The gradients of what was concatenated in float32 for a cast.
void add_cat_hooks(torch::autograd::Node& node);

// A cast behind a node that takes half types.
void add_cast_hooks(torch::autograd::Node& node);

}  // namespace fastact::recipes
