// The packed body: allocation and dtype dispatch around the kernels, below autograd, for a strided tensor on the CPU or on
// CUDA. Nothing here checks its arguments.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>

#include <tuple>

#include "device.h"
#include "strides.h"

namespace fastact {

template <class Op, class Device, class... Parameters>
void run(const at::Tensor& self, const at::Tensor& output, uint8_t* mask, Parameters... parameters) {
  if (output.numel() == 0) {
    return;
  }
  const auto [source, rows] = source_of(self, output);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, output.scalar_type(), Op::name, [&, &source = source, &rows = rows] {
        Device::forward(
            output, typename Op::template Activation<scalar_t>(parameters...), source.template const_data_ptr<scalar_t>(), rows,
            output.mutable_data_ptr<scalar_t>(), mask, output.numel());
      });
}

template <class Op, class Device, class... Parameters>
at::Tensor packed(const at::Tensor& self, Parameters... parameters) {
  at::Tensor output = Device::empty(self, output_format<Op>(self));
  run<Op, Device>(self, output, nullptr, parameters...);
  return output;
}

template <class Op, class Device, class... Parameters>
std::tuple<at::Tensor, at::Tensor> packed_with_mask(const at::Tensor& self, Parameters... parameters) {
  at::Tensor output = Device::empty(self, output_format<Op>(self));
  at::Tensor mask = Device::empty_mask(self);
  run<Op, Device>(self, output, mask.mutable_data_ptr<uint8_t>(), parameters...);
  return {std::move(output), std::move(mask)};
}

template <class Device>
at::Tensor packed_masked_scale(const at::Tensor& grad, const at::Tensor& mask, double inside, double outside) {
  at::Tensor output = Device::empty(grad, elementwise_format(grad));
  if (output.numel() == 0) {
    return output;
  }
  const auto [source, rows] = source_of(grad, output);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, output.scalar_type(), "masked_scale", [&, &source = source, &rows = rows] {
        using T = opmath_t<scalar_t>;
        Device::masked_scale(
            output, source.template const_data_ptr<scalar_t>(), rows, mask.const_data_ptr<uint8_t>(),
            output.mutable_data_ptr<scalar_t>(), static_cast<T>(inside), static_cast<T>(outside), output.numel());
      });
  return output;
}

}  // namespace fastact
