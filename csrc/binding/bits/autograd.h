// The derivative of every op of the family, and of itself: grad times one of two slopes, chosen by the saved bit.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <typeinfo>

#include "../../bits/activations.h"
#include "../origin.h"

namespace fastact {

// A member's derivative, and what PyTorch's own does that shows in a gradient's strides.
struct Derivative {
  Slopes slopes;
  Saves saves;
  bool reads_gradient_first;
  Origin origin;
};

// Whether anybody wants a derivative with respect to `self`, in reverse or in forward mode.
bool needs_derivative(const at::Tensor& self);

// Makes `output` a differentiable function of `self`. `inside` says which elements were inside: a mask in the memory order of
// the dense `mask_strides`, or a tensor of bool.
void record(
    const at::Tensor& self, at::Tensor& output, const at::Tensor& inside, c10::SymIntArrayRef mask_strides,
    Derivative derivative);

// Raises where autograd forbids that `self` is written to.
void check_inplace(const at::Tensor& self);

// As record, for `self` that was written to itself; `mask` has the memory order of `ordered`.
void record_inplace(at::Tensor& self, const at::Tensor& ordered, const at::Tensor& mask, Derivative derivative);

// All there is to record of a write to `self` where nobody wants a derivative.
void increment_version(at::Tensor& self);

// The graph's nodes that the two make.
struct MaskedNode {
  virtual ~MaskedNode() = default;
  virtual Slopes slopes() const = 0;
  // A mask, in the memory order of mask_strides(), or a tensor of bool.
  virtual const torch::autograd::SavedVariable& mask() const = 0;
  virtual c10::SymIntArrayRef mask_strides() const = 0;
};

// Their class, and its name.
const std::type_info& node_type();
constexpr const char* kNodeName = "MaskedScaleBackward";

}  // namespace fastact
