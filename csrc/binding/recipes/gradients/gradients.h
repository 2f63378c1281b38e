// Backward passes of PyTorch's own ops, in a scope, in less time or memory and to the bit. The nodes stay as they are: hooks on
// them compute what they would (answers.h).
#pragma once

#include <torch/csrc/autograd/function.h>

namespace fastact::recipes {

// Adds the hooks to a node whose output is a recipe: a norm, a cast, a product, a power, tanh or SiLU; and to a softmax
// before it.
void add_gradient_hooks(torch::autograd::Node& node);

// Adds them to nodes whose output no recipe is made of, given the node of a tensor that is saved: an activation behind a batch
// norm, a softmax, a dropout, or, of an rsqrt, the square in its RMS norm.
void add_gradient_hooks_of_saved(torch::autograd::Node& node);

// Adds one to a ReLU of whose output only the signs are kept (partial.h).
void add_signs_hook(torch::autograd::Node& relu);

// Whether the node that runs has its results already, and reads what it saved for nothing.
bool is_answered();

}  // namespace fastact::recipes
