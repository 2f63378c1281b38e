// The derivative of the smooth activations: what is saved is the output, which others mostly save too, and a code.
#pragma once

#include <ATen/core/Tensor.h>

#include <typeinfo>

#include "activations.h"

namespace fastact {

// Whether a gradient in reverse mode is wanted, and none in forward mode, which would need the input now.
bool needs_gradient_alone(const at::Tensor& self);

// Makes `output` a differentiable function of `self`.
void record_code(const Smooth& activation, const at::Tensor& self, at::Tensor& output, const at::Tensor& code);

// In place: makes `self`, which was written to, a function of what it was; the code has the memory order of `ordered`, which
// has the same values.
void record_code_inplace(const Smooth& activation, at::Tensor& self, const at::Tensor& ordered, const at::Tensor& code);

// The gradient as a function of `grad` and of `input`: PyTorch's op, differentiated.
at::Tensor differentiable_backward(const Smooth& activation, const at::Tensor& grad, const at::Tensor& input);

// The class of the graph's nodes that the two make, and its name.
const std::type_info& code_node_type();
constexpr const char* kCodeNodeName = "CodeBackward";

}  // namespace fastact
