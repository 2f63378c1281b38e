// The backward pass of a batch norm in training, in half types: what ATen's kernels compute, to the bit, since each sum is
// added up in their order, but with more of the memory read at once.
#pragma once

#include <cstdint>

#include "../runtime.h"
#include "program.h"

namespace fastact {

struct BatchNormGradient {
  static constexpr int kVector = 8;
  static constexpr int kMostElements = 0x7ffffc00;  // a thread counts on by up to 1023

  // [samples, channels, plane] in memory, aligned to 16 bytes. Where channels are innermost, the plane is 1 and each position
  // is a sample; channels are then a multiple of kVector, and the statistics are aligned, too.
  int samples, channels, plane;
  Element element;  // of the input and its gradients; statistics are in float32
  const void *grad, *input;
  const float *mean, *invstd;
  const void* weight;  // in float32, or as the input
  bool has_float_weight;
  // If `grad` is that of an activation's output, behind the norm: the norm's bias for a ReLU, or a mask (../mask.h) of where
  // the gradient passes.
  const void* bias;
  const uint8_t* mask;
  // The outputs. Those of the weight and the bias are in the weight's dtype.
  void *grad_input, *grad_weight, *grad_bias;
  float* scratch;  // scratch_floats() of them
};

#pragma GCC visibility push(default)

namespace cuda {

FASTACT_WEAK int64_t scratch_floats(const BatchNormGradient& norm);

// Queued on `stream` of the current device.
FASTACT_WEAK Error run(const BatchNormGradient& norm, Stream stream);

}  // namespace cuda

#pragma GCC visibility pop

}  // namespace fastact
