// A vector of an operand's elements, from memory to floats and back.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "../../mask.h"
#include "../instructions.h"

namespace fastact::cuda {
namespace {

// Two numbers of a half type, which are converted at once: one by one it takes several times as long.
template <class T>
__device__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
  } else {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
}

template <class T>
__device__ float2 unpack(uint32_t both) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    return {__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&both));
  }
}

template <int n>
using Pairs = uint32_t[(n + 1) / 2];

template <class T, int n>
__device__ void pack(const float (&x)[n], Pairs<n>& to) {
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    to[i / 2] = pack<T>(x[i], i + 1 < n ? x[i + 1] : 0);
  }
}

template <class T, int n>
__device__ void unpack(const Pairs<n>& from, float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    const float2 both = unpack<T>(from[i / 2]);
    x[i] = both.x;
    if (i + 1 < n) {
      x[i + 1] = both.y;
    }
  }
}

template <int n>
struct alignas(n * 4) Words {
  uint32_t word[n];
};

// Moves n words, in pieces of 16 bytes where there are as many.
template <int n>
__device__ void move(const void* from, void* to) {
  constexpr int piece = n < 4 ? n : 4;
#pragma unroll
  for (int i = 0; i < n / piece; ++i) {
    static_cast<Words<piece>*>(to)[i] = static_cast<const Words<piece>*>(from)[i];
  }
}

// Reads n elements as they are in memory, or one that is all of them: half types two to a word, bits all in the first.
template <int n>
__device__ void fetch(const void* data, Element element, bool is_one, int64_t offset, uint32_t (&to)[n]) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  const auto* words = static_cast<const uint32_t*>(data) + offset;
  const auto* halves = static_cast<const uint16_t*>(data) + offset;
  if (element == Element::bit) {
    to[0] = bytes[offset / kMaskBits] >> (offset % kMaskBits);
  } else if (n == 1 || is_one) {
    const uint32_t one = element == Element::float32 ? *words : *halves * 0x10001u;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      to[i] = one;
    }
  } else if (element == Element::float32) {
    move<n>(words, to);
  } else {
    move<(n + 1) / 2>(halves, to);
  }
}

// What was fetched, as numbers. T is the half type of the program.
template <class T, int n>
__device__ void convert(const uint32_t (&from)[n], Element element, float (&to)[n]) {
  if (element != Element::float32 && element != Element::bit) {
    Pairs<n> pairs;
#pragma unroll
    for (int i = 0; i < (n + 1) / 2; ++i) {
      pairs[i] = from[i];
    }
    return unpack<T>(pairs, to);
  }
#pragma unroll
  for (int i = 0; i < n; ++i) {
    to[i] = element == Element::bit ? static_cast<float>(from[0] >> i & 1) : __uint_as_float(from[i]);
  }
}

// One element, as a number.
template <class T>
__device__ float load(const void* data, Element element, int64_t offset) {
  uint32_t word[1];
  float number[1];
  fetch(data, element, /*is_one=*/true, offset, word);
  convert<T>(word, element, number);
  return number[0];
}

// The offset is a multiple of n.
template <class T, int n>
__device__ void store(const float (&x)[n], Element element, int64_t offset, void* output) {
  const uint64_t vector = static_cast<uint64_t>(offset) / n;  // an index of vectors tells the compiler that they are aligned
  if (element == Element::float32) {
    move<n>(x, static_cast<Words<n>*>(output) + vector);
    return;
  }
  Pairs<n> pairs;
  pack<T>(x, pairs);
  if constexpr (n == 1) {
    static_cast<uint16_t*>(output)[vector] = static_cast<uint16_t>(pairs[0]);
  } else {
    move<n / 2>(pairs, static_cast<Words<n / 2>*>(output) + vector);
  }
}

template <int size>
__device__ void fill(float number, float (&to)[size]) {
#pragma unroll
  for (int i = 0; i < size; ++i) {
    to[i] = number;
  }
}

template <int n, int size>
__device__ void assign(const float (&from)[n], float (&to)[size]) {
#pragma unroll
  for (int i = 0; i < size; ++i) {
    to[i] = from[i];
  }
}

// What an instruction makes of an element.
template <Opcode opcode, class T>
__device__ float compute(float x, float a, float b, float c, float d) {
  if constexpr (opcode == Opcode::addend) {
    return addend<T>(x, a);
  } else {
    return apply<opcode>(x, a, b, c, d);
  }
}

template <class T, int n>
__device__ void round(float (&x)[n]) {
  Pairs<n> pairs;
  pack<T>(x, pairs);
  unpack<T>(pairs, x);
}

template <class T, int n>
__device__ void look_up(const uint16_t* table, float (&x)[n]) {
  Pairs<n> pairs;
  pack<T>(x, pairs);
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    const uint32_t low = __ldg(table + (pairs[i / 2] & 0xffff));
    const uint32_t high = i + 1 < n ? __ldg(table + (pairs[i / 2] >> 16)) : 0;
    pairs[i / 2] = low | high << 16;
  }
  unpack<T>(pairs, x);
}

template <class T, int n>
__device__ void differentiate(const float (&grad)[n], const float2* factors, float (&x)[n]) {
  Pairs<n> pairs;
  pack<T>(x, pairs);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const float2 of_number = __ldg(factors + (pairs[i / 2] >> (i % 2 * 16) & 0xffff));
    x[i] = scaled(grad[i], of_number.x, of_number.y);
  }
}

// Whether vectors of n elements that begin there can be moved.
bool is_aligned(const void* data, Element element, int n) {
  const int bytes = element == Element::bit ? 1 : std::min(16, element == Element::float32 ? 4 * n : 2 * n);
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

}  // namespace
}  // namespace fastact::cuda
