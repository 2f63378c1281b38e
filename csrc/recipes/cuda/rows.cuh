// What the passes over rows have in common: a thread's vectors of four, and sums over lanes.
#pragma once

#include "vectors.cuh"

namespace fastact::cuda {
namespace {

constexpr int kWarp = 32;

// Elements as floats, or as they are in memory, at its start.
constexpr int kElements = 4;
using Vector = float[kElements];

// As they are: converting would wait for them.
__device__ void read(const void* data, Element element, int64_t vector, Vector& to) {
  if (element == Element::float32) {
    move<kElements>(static_cast<const float*>(data) + vector * kElements, to);
  } else {
    move<kElements / 2>(static_cast<const uint16_t*>(data) + vector * kElements, to);
  }
}

// Makes floats of them. T is the half type.
template <class T>
__device__ void convert(Element element, Vector& vector) {
  if (element != Element::float32) {
    const Pairs<kElements> pairs = {__float_as_uint(vector[0]), __float_as_uint(vector[1])};
    unpack<T>(pairs, vector);
  }
}

// Adds up what two lanes have: one the first half of n sums, the other the second, or both the only one.
template <int n>
__device__ void add_up(float* sums, int distance) {
  if constexpr (n == 1) {
    sums[0] += __shfl_xor_sync(~0u, sums[0], distance);
  } else {
    const bool takes_second = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const float first = sums[i], second = sums[i + n / 2];
      sums[i] = (takes_second ? second : first) + __shfl_xor_sync(~0u, takes_second ? first : second, distance);
    }
  }
}

}  // namespace
}  // namespace fastact::cuda
