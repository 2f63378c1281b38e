// Which strides an output and a gradient have, and how a kernel that walks them in memory order finds what it reads.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

#include "../layout.h"

namespace fastact {

// TensorIterator's rule, which PyTorch's elementwise ops follow.
inline at::MemoryFormat elementwise_format(const at::Tensor& self) {
  return self.is_contiguous()                                 ? at::MemoryFormat::Contiguous
         : self.is_contiguous(at::MemoryFormat::ChannelsLast) ? at::MemoryFormat::ChannelsLast
                                                              : at::MemoryFormat::Preserve;
}

template <class Op>
at::MemoryFormat output_format(const at::Tensor& self) {
  using Activation = typename Op::template Activation<double>;
  return Activation::uses_empty_like ? at::MemoryFormat::Preserve : elementwise_format(self);
}

// What TensorIterator makes of two operands of one shape, which is what PyTorch's backward returns.
inline at::DimVector elementwise_strides(at::IntArrayRef sizes, at::IntArrayRef first, at::IntArrayRef second) {
  const auto like = [&](at::IntArrayRef strides) { return at::detail::empty_strided_meta(sizes, strides, at::kByte); };
  return at::DimVector(
      at::TensorIteratorConfig()
          .add_owned_output(at::TensorBase())
          .add_owned_input(like(first))
          .add_owned_input(like(second))
          .build()
          .output()
          .strides());
}

// Whether two strides mean the same elements. The strides of dimensions of size 1 are ignored.
inline bool agree(at::IntArrayRef sizes, at::IntArrayRef strides, at::IntArrayRef others) {
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] != 1 && strides[dim] != others[dim]) {
      return false;
    }
  }
  return true;
}

// The dimensions of a tensor that isn't empty, but for those of size 1, from the innermost of the strides outwards.
inline at::DimVector inner_to_outer(at::IntArrayRef sizes, at::IntArrayRef strides) {
  at::DimVector dims;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] != 1) {
      dims.push_back(static_cast<int64_t>(dim));
    }
  }
  std::sort(dims.begin(), dims.end(), [&](int64_t a, int64_t b) { return strides[a] < strides[b]; });
  return dims;
}

// Whether a tensor with these strides fills its memory, each element in a place of its own.
inline bool is_dense(at::IntArrayRef sizes, at::IntArrayRef strides) {
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
    return true;
  }
  int64_t next = 1;
  for (const int64_t dim : inner_to_outer(sizes, strides)) {
    if (strides[dim] != next) {
      return false;
    }
    next *= sizes[dim];
  }
  return true;
}

// The input's elements in the memory order of `output`, if they lie in rows: the dimensions that are inner in the output's
// memory are dense in the input, and the outer ones step evenly over them. So lie x[:, :d] and x.chunk(2, dim).
inline std::optional<Rows> rows_of(const at::Tensor& input, const at::Tensor& output) {
  int64_t length = 1, pitch = 0, next = 0;  // `next`: where the next dimension must continue, once there is a pitch
  for (const int64_t dim : inner_to_outer(output.sizes(), output.strides())) {
    const int64_t size = input.size(dim), stride = input.stride(dim);
    if (pitch == 0 && stride == length) {
      length *= size;
    } else if (pitch == 0 ? stride > length && length > 1 : stride == next) {
      pitch = pitch == 0 ? stride : pitch;
      next = stride * size;
    } else {
      return std::nullopt;
    }
  }
  return Rows{length, pitch == 0 ? length : pitch};
}

// A tensor to read, and the rows that its elements lie in.
struct Source {
  at::Tensor tensor;
  Rows rows;
};

// The input itself where it is dense or in rows, else the output, which gets a copy of the input that the kernel rewrites in
// place.
inline Source source_of(const at::Tensor& input, const at::Tensor& output) {
  const Rows dense = {input.numel(), input.numel()};
  if (input.is_non_overlapping_and_dense()) {
    return {input, dense};
  }
  if (const auto rows = rows_of(input, output)) {
    return {input, *rows};
  }
  return {output.copy_(input), dense};
}

// How a kernel that writes `output`, which isn't empty, finds the elements of `grad` and the bits of a mask with these strides.
inline Walk walk_of(const at::Tensor& grad, at::IntArrayRef mask_strides, const at::Tensor& output) {
  Walk walk;
  walk.dims = 0;
  for (const int64_t dim : inner_to_outer(output.sizes(), output.strides())) {
    const int64_t size = grad.size(dim), grad_stride = grad.stride(dim), mask_stride = mask_strides[dim];
    const int inner = walk.dims - 1;
    if (walk.dims > 0 && grad_stride == walk.grad[inner] * walk.size[inner] &&
        mask_stride == walk.mask[inner] * walk.size[inner]) {
      walk.size[inner] *= size;
      continue;
    }
    TORCH_INTERNAL_ASSERT(walk.dims < Walk::kMaxDims);
    walk.size[walk.dims] = size;
    walk.grad[walk.dims] = grad_stride;
    walk.mask[walk.dims] = mask_stride;
    ++walk.dims;
  }
  return walk;
}

}  // namespace fastact
