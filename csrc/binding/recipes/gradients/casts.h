// Casts beside a node in float32, which are left out where a kernel computes its gradients: that takes and gives half types.
#pragma once

#include "answers.h"

namespace fastact::recipes {

// The half type of a cast of what a float32 node has saved, or of a cast whose clone that is, if the cast takes its gradient in
// the half type, and nobody else has it; or undefined.
at::ScalarType half_of_cast_before(torch::autograd::Node& node);

// What the node has saved, in the half type if all of it came from there; or undefined.
at::Tensor saved_in_half(torch::autograd::Node& node, const torch::autograd::SavedVariable& saved, at::ScalarType half);

// Adds hooks to a clone between a norm and a cast before it.
void add_clone_hooks(torch::autograd::Node& norm);

}  // namespace fastact::recipes
