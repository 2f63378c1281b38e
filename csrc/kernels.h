// What the kernels offer to the binding: for each device, one forward kernel for the whole family and one backward kernel.
// Both walk the output in memory order, take any alignment and may run in place. Backward has a second form, for a gradient or
// a mask in another order.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

#include "activations.h"

#if defined(FASTACT_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace fastact {

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
  // What has more dimensions of two elements or more than this has more elements than memory.
  static constexpr int kMaxDims = 48;

  int dims;
  int64_t size[kMaxDims], grad[kMaxDims], mask[kMaxDims];
};

namespace cpu {

// A range of elements that a kernel is called for must begin at a multiple of this, so that no two threads share a mask byte.
// It is also how many are buffered at a time (2^18 float16 elements, forward: 32 us, with 512 or 256 41 us; the others don't
// mind).
constexpr int64_t kBlock = 1024;

// y = f(x) for the elements from `begin` up to `end`. Writes the mask too unless `mask` is null.
template <class F, class scalar_t>
void forward(F f, const scalar_t* x, Rows rows, scalar_t* y, uint8_t* mask, int64_t begin, int64_t end);

// y = grad * (the mask's bit ? inside : outside) for the elements from `begin` up to `end`.
template <class scalar_t>
void backward(
    const scalar_t* grad, Rows rows, const uint8_t* mask, scalar_t* y, opmath_t<scalar_t> inside, opmath_t<scalar_t> outside,
    int64_t begin, int64_t end);
template <class scalar_t>
void backward(
    const scalar_t* grad, const Walk& walk, const uint8_t* mask, scalar_t* y, opmath_t<scalar_t> inside,
    opmath_t<scalar_t> outside, int64_t begin, int64_t end);

}  // namespace cpu

#if defined(FASTACT_CUDA)
namespace cuda {

// As the CPU's for all `n` elements, at least 1, queued on `stream` of the current device.
template <class F, class scalar_t>
cudaError_t forward(F f, const scalar_t* x, Rows rows, scalar_t* y, uint8_t* mask, int64_t n, cudaStream_t stream);

template <class scalar_t>
cudaError_t backward(
    const scalar_t* grad, Rows rows, const uint8_t* mask, scalar_t* y, opmath_t<scalar_t> inside, opmath_t<scalar_t> outside,
    int64_t n, cudaStream_t stream);
template <class scalar_t>
cudaError_t backward(
    const scalar_t* grad, const Walk& walk, const uint8_t* mask, scalar_t* y, opmath_t<scalar_t> inside,
    opmath_t<scalar_t> outside, int64_t n, cudaStream_t stream);

}  // namespace cuda
#endif

}  // namespace fastact
