// What the kernels offer to the binding: for each device, one forward kernel for the whole family and one backward kernel.
// Both walk `n` elements in memory order, take any alignment and may run in place.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>

#include "activations.h"

#if defined(FASTACT_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace fastact {

template <class F, class T>
FASTACT_HOST_DEVICE T value(const F& f, const T& x) {
  return f.inside(x) ? f.linear(x) : f.saturated(x);
}

// A slope of 1 returns the gradient's own bits, a slope of 0 returns +0 for every gradient: neither multiplies.
template <class scalar_t>
FASTACT_HOST_DEVICE scalar_t scale(scalar_t grad, opmath_t<scalar_t> slope) {
  const auto scaled = static_cast<scalar_t>(static_cast<opmath_t<scalar_t>>(grad) * slope);
  return slope == 1 ? grad : slope == 0 ? scalar_t(0) : scaled;
}

namespace cpu {

// The elements that one call of a kernel takes must start at a multiple of this, so that no two threads share a mask byte.
constexpr int64_t kBlock = 512;

// y = f(x). Writes the mask too unless `mask` is null.
template <class F, class scalar_t>
void forward(F f, const scalar_t* x, scalar_t* y, uint8_t* mask, int64_t n);

// y = grad * (the mask's bit ? inside : outside).
template <class scalar_t>
void masked_scale(
    const scalar_t* grad, const uint8_t* mask, scalar_t* y, opmath_t<scalar_t> inside, opmath_t<scalar_t> outside, int64_t n);

}  // namespace cpu

#if defined(FASTACT_CUDA)
namespace cuda {

// As the CPU's, queued on `stream` of the current device; `n` is at least 1.
template <class F, class scalar_t>
cudaError_t forward(F f, const scalar_t* x, scalar_t* y, uint8_t* mask, int64_t n, cudaStream_t stream);

template <class scalar_t>
cudaError_t masked_scale(
    const scalar_t* grad, const uint8_t* mask, scalar_t* y, opmath_t<scalar_t> inside, opmath_t<scalar_t> outside, int64_t n,
    cudaStream_t stream);

}  // namespace cuda
#endif

}  // namespace fastact
