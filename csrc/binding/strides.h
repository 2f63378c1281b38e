// Which strides an output has, and how a kernel that walks the output's memory in order finds the input's elements.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <tuple>
#include <type_traits>

#include "../kernels.h"

namespace fastact {

// TensorIterator's rule, which PyTorch's elementwise ops follow.
inline at::MemoryFormat elementwise_format(const at::Tensor& self) {
  return self.is_contiguous()                                 ? at::MemoryFormat::Contiguous
         : self.is_contiguous(at::MemoryFormat::ChannelsLast) ? at::MemoryFormat::ChannelsLast
                                                              : at::MemoryFormat::Preserve;
}

// PyTorch's hardtanh, and with it relu6, allocates with empty_like, which differs from TensorIterator in the strides of
// dimensions of size 1.
template <class Op>
at::MemoryFormat output_format(const at::Tensor& self) {
  using Activation = typename Op::template Activation<double>;
  return std::is_base_of_v<Hardtanh<double, Device::cpu>, Activation> ? at::MemoryFormat::Preserve : elementwise_format(self);
}

// The input's elements in the memory order of `output`, if they lie in rows: the dimensions that are inner in the output's
// memory are dense in the input, and the outer ones step evenly over them. So lie x[:, :d] and x.chunk(2, dim).
inline std::optional<Rows> rows_of(const at::Tensor& input, const at::Tensor& output) {
  at::DimVector dims(input.dim());
  std::iota(dims.begin(), dims.end(), 0);
  std::sort(dims.begin(), dims.end(), [&](int64_t a, int64_t b) { return output.stride(a) < output.stride(b); });
  int64_t length = 1, pitch = 0, next = 0;  // `next`: where the next dimension must continue, once there is a pitch
  for (const int64_t dim : dims) {
    const int64_t size = input.size(dim), stride = input.stride(dim);
    if (size == 1) {
      continue;
    }
    if (pitch == 0 && stride == length) {
      length *= size;
    } else if (pitch == 0 ? stride > length && length > 1 : stride == next) {
      pitch = pitch == 0 ? stride : pitch;
      next = stride * size;
    } else {
      return std::nullopt;
    }
  }
  return Rows{length, pitch};
}

// The tensor to read and the rows its elements lie in: the input itself where it is dense or in rows, else the output, which
// gets a copy of the input that the kernel rewrites in place.
inline std::tuple<at::Tensor, Rows> source_of(const at::Tensor& input, const at::Tensor& output) {
  const Rows dense = {input.numel(), input.numel()};
  if (input.is_non_overlapping_and_dense()) {
    return {input, dense};
  }
  if (const auto rows = rows_of(input, output)) {
    return {input, *rows};
  }
  return {output.copy_(input), dense};
}

}  // namespace fastact
