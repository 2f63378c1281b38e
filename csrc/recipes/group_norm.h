// The backward pass of a group norm: what ATen's kernels compute, to the bit, since each sum is added up in their order. Under
// autocast those are in float32, between casts from and to a half type, which are here part of the kernels.
#pragma once

#include <cstdint>

#include "../runtime.h"
#include "program.h"

namespace fastact {

struct GroupNormGradient {
  static constexpr int kVector = 4;          // elements of a plane are a multiple of this; elements are aligned to 16 bytes
  static constexpr int kMostChannels = 511;  // of a group: ATen adds up those of larger ones another way

  // Elements of a plane are beside each other in memory, then come the channels. There are fewer than 2^31 in all.
  int samples, channels, groups, plane;
  // The dtypes of the incoming gradient, of the input and its gradient, and of all others. There is one half type.
  Element grad_element, input_element, weight_element;
  const void *grad, *input;
  const void *mean, *rstd;  // of each group of a sample
  const void* weight;       // null: ones
  // The outputs. The last two are null if they aren't wanted.
  void *grad_input, *grad_weight, *grad_bias;
  float* scratch;  // scratch_floats() of them

  FASTACT_HOST_DEVICE int64_t planes() const { return int64_t{samples} * channels; }
  FASTACT_HOST_DEVICE int64_t all_groups() const { return int64_t{samples} * groups; }
  int64_t scratch_floats() const { return 2 * (planes() + all_groups()); }
};

#pragma GCC visibility push(default)

namespace cuda {

// Queued on `stream` of the current device.
FASTACT_WEAK Error run(const GroupNormGradient& norm, Stream stream);

}  // namespace cuda

#pragma GCC visibility pop

}  // namespace fastact
