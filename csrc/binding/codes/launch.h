// What the kernels of the smooth activations do, on tensors: from an input to its output and code, and back.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "tables.h"

namespace fastact {

// The output, and unless `with_code` is false the code, in the output's memory order.
std::tuple<at::Tensor, at::Tensor> encode(
    const Smooth& activation, const Tables& tables, const at::Tensor& self, bool with_code);

// In place. Returns beside the code the tensor whose memory order it has: `self`, or where that isn't dense, a dense copy.
std::tuple<at::Tensor, at::Tensor> encode_inplace(const Smooth& activation, const Tables& tables, at::Tensor& self);

// The output alone, in place of a dense input.
void look_up_inplace(const Tables& tables, at::Tensor& self);

// The input of a dense output, with these strides.
at::Tensor decode(const Tables& tables, const at::Tensor& output, const at::Tensor& code, at::IntArrayRef strides);

// What PyTorch's backward returns for an input with these strides. The output is dense.
at::Tensor backward(
    const Smooth& activation, const Tables& tables, const at::Tensor& grad, const at::Tensor& output, const at::Tensor& code,
    at::IntArrayRef input_strides);

}  // namespace fastact
