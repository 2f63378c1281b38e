// The kernels of the one-bit members on tensors: allocation and dtype dispatch, below autograd, for a strided tensor on the CPU
// or on CUDA. Nothing here checks its arguments.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>

#include <tuple>
#include <utility>

#include "../../bits/activations.h"
#include "../../bits/kernels.h"
#include "../../mask.h"
#include "../devices.h"
#include "../dtypes.h"
#include "../strides.h"

namespace fastact {

inline void run_forward(
    Cpu, const at::Tensor&, Formula formula, Dtype dtype, const void* activation, const void* x, Rows rows, void* y,
    uint8_t* mask, int64_t n) {
  Cpu::launch(n, cpu::kBlock, [=](int64_t begin, int64_t end) {
    cpu::forward(formula, dtype, activation, x, rows, y, mask, begin, end);
  });
}

// `Where` is Rows or Walk.
template <class Where>
void run_backward(
    Cpu, const at::Tensor&, Dtype dtype, const void* grad, const Where& where, const uint8_t* mask, void* y, double inside,
    double outside, int64_t n) {
  Cpu::launch(n, cpu::kBlock, [&](int64_t begin, int64_t end) {
    cpu::backward(dtype, grad, where, mask, y, inside, outside, begin, end);
  });
}

inline void run_forward(
    Cuda, const at::Tensor& output, Formula formula, Dtype dtype, const void* activation, const void* x, Rows rows, void* y,
    uint8_t* mask, int64_t n) {
  Cuda::launch(
      output, [=](cuda::Stream stream) { return cuda::forward(formula, dtype, activation, x, rows, y, mask, n, stream); });
}

template <class Where>
void run_backward(
    Cuda, const at::Tensor& output, Dtype dtype, const void* grad, const Where& where, const uint8_t* mask, void* y,
    double inside, double outside, int64_t n) {
  Cuda::launch(
      output, [&](cuda::Stream stream) { return cuda::backward(dtype, grad, where, mask, y, inside, outside, n, stream); });
}

template <class Op, class Backend, class... Parameters>
void run(const at::Tensor& self, const at::Tensor& output, uint8_t* mask, Parameters... parameters) {
  if (output.numel() == 0) {
    return;
  }
  const Source source = source_of(self, output);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, output.scalar_type(), Op::name, [&] {
    const typename Op::template Activation<scalar_t, Backend::device> activation(parameters...);
    run_forward(
        Backend(), output, Op::formula, dtype_of<scalar_t>, &activation, source.tensor.const_data_ptr<scalar_t>(), source.rows,
        output.mutable_data_ptr<scalar_t>(), mask, output.numel());
  });
}

template <class Op, class Backend, class... Parameters>
at::Tensor packed(const at::Tensor& self, Parameters... parameters) {
  at::Tensor output = empty(self, output_format<Op>(self));
  run<Op, Backend>(self, output, nullptr, parameters...);
  return output;
}

template <class Op, class Backend, class... Parameters>
std::tuple<at::Tensor, at::Tensor> packed_with_mask(const at::Tensor& self, Parameters... parameters) {
  at::Tensor output = empty(self, output_format<Op>(self));
  at::Tensor mask = empty_bytes(self, mask_bytes(self.numel()));
  run<Op, Backend>(self, output, mask.mutable_data_ptr<uint8_t>(), parameters...);
  return {std::move(output), std::move(mask)};
}

// In place. A tensor that overlaps itself is not dense, and copy_ refuses it.
template <class Op, class Backend, class... Parameters>
void packed_inplace(const at::Tensor& self, Parameters... parameters) {
  if (self.is_non_overlapping_and_dense()) {
    run<Op, Backend>(self, self, nullptr, parameters...);
  } else {
    self.copy_(packed<Op, Backend>(self, parameters...));
  }
}

// In place. Returns beside the mask the tensor whose memory order it has: `self`, or where that isn't dense, a dense copy.
template <class Op, class Backend, class... Parameters>
std::tuple<at::Tensor, at::Tensor> packed_inplace_with_mask(const at::Tensor& self, Parameters... parameters) {
  if (self.is_non_overlapping_and_dense()) {
    at::Tensor mask = empty_bytes(self, mask_bytes(self.numel()));
    run<Op, Backend>(self, self, mask.mutable_data_ptr<uint8_t>(), parameters...);
    return {self, std::move(mask)};
  }
  auto result = packed_with_mask<Op, Backend>(self, parameters...);
  self.copy_(std::get<0>(result));
  return result;
}

// Without strides the output has those of an elementwise op on `grad`, and the mask the output's memory order.
template <class Backend>
at::Tensor packed_backward(
    const at::Tensor& grad, const at::Tensor& mask, double inside, double outside, at::OptionalIntArrayRef mask_strides,
    at::OptionalIntArrayRef strides) {
  at::Tensor output = strides ? empty_strided(grad, *strides) : empty(grad, elementwise_format(grad));
  if (output.numel() == 0) {
    return output;
  }
  const auto run = [&](const auto& where) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, output.scalar_type(), "masked_scale", [&] {
      run_backward(
          Backend(), output, dtype_of<scalar_t>, grad.const_data_ptr<scalar_t>(), where, mask.const_data_ptr<uint8_t>(),
          output.mutable_data_ptr<scalar_t>(), inside, outside, output.numel());
    });
  };
  const at::IntArrayRef order = mask_strides ? *mask_strides : output.strides();
  const bool in_order = !mask_strides || agree(output.sizes(), order, output.strides());
  if (in_order && agree(output.sizes(), grad.strides(), output.strides())) {
    run(Rows{output.numel(), output.numel()});
  } else if (const auto rows = in_order ? rows_of(grad, output) : std::nullopt) {
    run(*rows);
  } else {
    run(walk_of(grad, order, output));
  }
  return output;
}

}  // namespace fastact
