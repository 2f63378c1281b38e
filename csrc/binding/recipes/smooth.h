// The smooth activations in a scope. There they save their input, which mostly is a recipe or what others save anyway, where
// elsewhere they save a code; and their backward pass goes through that recipe without writing the input.
#pragma once

#include <ATen/core/Tensor.h>

#include <typeinfo>

#include "../codes/activations.h"
#include "../node.h"
#include "../origin.h"

namespace fastact::recipes {

// Makes `output` a differentiable function of `self`.
void record_input(const Smooth& activation, Origin origin, const at::Tensor& self, at::Tensor& output);

// In place: a node before `self`, which is dense, is written to, and the record after.
NodePointer node_before_write(const Smooth& activation, Origin origin, const at::Tensor& self);
void record_write(at::Tensor& self, NodePointer node);

// The class of these nodes, and its name; whether a node is one whose gradient, in float32, an instruction computes.
const std::type_info& smooth_node_type();
bool is_smooth_with_instruction(const torch::autograd::Node& node);
constexpr const char* kSmoothNodeName = "SmoothBackward";

}  // namespace fastact::recipes
