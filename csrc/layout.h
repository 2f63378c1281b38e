// Where the elements are that a kernel reads, as the binding tells it: dtypes and strides, in plain C++.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace fastact {

enum class Dtype { float64, float32, float16, bfloat16 };

// Where the input's elements lie, in the order of the output's: rows of `length` elements that begin `pitch` apart.
struct Rows {
  int64_t length, pitch;

  // Then it makes no difference where a row ends.
  FASTACT_HOST_DEVICE bool dense() const { return length == pitch; }
};

// Where the elements of an output, in its memory order, have their gradient and their bit: dimension by dimension, the
// innermost first, with the strides of both. A stride may be 0, for a gradient that is expanded. There is at least one
// dimension.
struct Walk {
  // A tensor with more dimensions of two elements or more would not fit in memory.
  static constexpr int kMaxDims = 48;

  int dims;
  int64_t size[kMaxDims], grad[kMaxDims], mask[kMaxDims];
};

}  // namespace fastact
