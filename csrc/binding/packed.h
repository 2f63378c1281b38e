// The packed body: allocation and dtype dispatch around the kernels, below autograd, for a strided tensor on the CPU or on
// CUDA.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>

#include <tuple>

#include "arguments.h"
#include "device.h"

namespace fastact {

// The strides of PyTorch's own op. Its hardtanh allocates with empty_like, every other op of the family through TensorIterator;
// the two differ in the strides of dimensions of size 1.
constexpr bool is_hardtanh(decltype(&at::hardtanh) op) {
  return op == &at::hardtanh;
}
template <class Other>
constexpr bool is_hardtanh(const Other&) {
  return false;
}

inline at::MemoryFormat elementwise_format(const at::Tensor& self) {
  return self.is_contiguous()                                 ? at::MemoryFormat::Contiguous
         : self.is_contiguous(at::MemoryFormat::ChannelsLast) ? at::MemoryFormat::ChannelsLast
                                                              : at::MemoryFormat::Preserve;
}

inline at::Tensor empty_elementwise(const at::Tensor& self) {
  return at::empty_like(self, self.options(), elementwise_format(self));
}

template <class Op>
at::Tensor empty_output(const at::Tensor& self) {
  return is_hardtanh(Op::pytorch) ? at::empty_like(self) : empty_elementwise(self);
}

// The tensor that holds the input's elements in the memory order of `output`: the input itself where it is dense, else the
// output, which the kernel then rewrites in place.
inline at::Tensor source_of(const at::Tensor& input, const at::Tensor& output) {
  return input.is_non_overlapping_and_dense() ? input : output.copy_(input);
}

inline at::Tensor empty_mask(const at::Tensor& self) {
  return at::empty_symint({mask_bytes(self.sym_numel())}, self.options().dtype(at::kByte));
}

template <class Op, class Device, class... Parameters>
void run(const at::Tensor& source, const at::Tensor& output, uint8_t* mask, Parameters... parameters) {
  if (output.numel() == 0) {
    return;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, output.scalar_type(), Op::name, [&] {
    Device::forward(
        output, typename Op::template Activation<scalar_t>(parameters...), source.const_data_ptr<scalar_t>(),
        output.mutable_data_ptr<scalar_t>(), mask, output.numel());
  });
}

template <class Op, class Device, class... Parameters>
at::Tensor packed(const at::Tensor& self, Parameters... parameters) {
  const at::Tensor output = empty_output<Op>(self);
  run<Op, Device>(source_of(self, output), output, nullptr, parameters...);
  return output;
}

template <class Op, class Device, class... Parameters>
std::tuple<at::Tensor, at::Tensor> packed_with_mask(const at::Tensor& self, Parameters... parameters) {
  check_arguments_with_mask<Op>(self, parameters...);
  const at::Tensor output = empty_output<Op>(self);
  const at::Tensor mask = empty_mask(self);
  run<Op, Device>(source_of(self, output), output, mask.mutable_data_ptr<uint8_t>(), parameters...);
  return {output, mask};
}

template <class Op, class... Parameters>
std::tuple<at::Tensor, at::Tensor> meta_with_mask(const at::Tensor& self, Parameters... parameters) {
  check_arguments_with_mask<Op>(self, parameters...);
  return {empty_output<Op>(self), empty_mask(self)};
}

template <class Device>
at::Tensor masked_scale(const at::Tensor& grad, const at::Tensor& mask, double inside, double outside) {
  check_mask(grad, mask);
  const at::Tensor output = empty_elementwise(grad);
  const at::Tensor source = source_of(grad, output);
  if (output.numel() == 0) {
    return output;
  }
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, output.scalar_type(), "masked_scale", [&] {
    using T = opmath_t<scalar_t>;
    Device::masked_scale(
        output, source.const_data_ptr<scalar_t>(), mask.const_data_ptr<uint8_t>(), output.mutable_data_ptr<scalar_t>(),
        static_cast<T>(inside), static_cast<T>(outside), output.numel());
  });
  return output;
}

inline at::Tensor meta_masked_scale(const at::Tensor& grad, const at::Tensor& mask, double, double) {
  check_mask(grad, mask);
  return empty_elementwise(grad);
}

}  // namespace fastact
