// The backward pass of a layer norm: what ATen's kernels compute, to the bit, since each sum is added up in their order. Under
// autocast those are in float32, between casts from and to a half type, which are here part of the kernels.
#pragma once

#include <cstdint>

#include "../runtime.h"
#include "program.h"

namespace fastact {

struct LayerNormGradient {
  static constexpr int kMultiple = 8, kMostColumns = 4096;  // of columns; elements are aligned to 16 bytes
  // ATen treats the columns alike, a tile at a time; if there are more rows, how depends on how many tiles there are.
  static constexpr int kTile = 32, kManyRows = 64 * 1024;

  int rows, columns;  // fewer than 2^31 elements
  // The dtypes of the incoming gradient, of the input and its gradient, and of the weight and the bias and theirs. There is one
  // half type.
  Element grad_element, input_element, weight_element;
  const void *grad, *input;
  const float *mean, *rstd;
  const void* weight;  // null: ones
  // The outputs. The last two are null if neither is wanted.
  void *grad_input, *grad_weight, *grad_bias;
  void* sums;  // null as well
};

// The sums over some of the rows that become the gradients of the bias and the weight: [2, many, columns].
struct LayerNormSums {
  int many;
  // ATen has its usual reduction add these up, which are in the weight's dtype, not in float32. So the kernel doesn't, and
  // leaves the gradients unwritten.
  bool are_results;
};

#pragma GCC visibility push(default)

namespace cuda {

// On the current device.
FASTACT_WEAK Error sums_of(const LayerNormGradient& norm, LayerNormSums* result);

// Queued on `stream` of the current device.
FASTACT_WEAK Error run(const LayerNormGradient& norm, Stream stream);

}  // namespace cuda

#pragma GCC visibility pop

}  // namespace fastact
