// What forward and backward do with a block of elements: plain loops, vectorized by the compiler for each instruction set and
// chosen when the library is loaded.
#pragma once

#include <algorithm>
#include <cstring>

#include "../../mask.h"
#include "../../typed.h"
#include "../formula.h"
#include "../kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define FASTACT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FASTACT_CLONES
#endif

// Each loop touches one element a turn, so it may be vectorized even where input and output are the same memory.
#if defined(__GNUC__) && !defined(__clang__)
#define FASTACT_VECTORIZE _Pragma("GCC ivdep")
#else
#define FASTACT_VECTORIZE
#endif

namespace fastact::cpu {
namespace {  // a copy for each file, which the compiler may inline and specialise

// Flags, each a byte of 0 or 1, to bits; `flags` has room for a multiple of 16, of which those from n on are overwritten by 0.
inline void pack(uint8_t* flags, uint8_t* mask, int64_t n) {
  std::fill(flags + n, flags + (n + 15) / 16 * 16, 0);
#if defined(__SSE2__)
  const auto sixteen = [&](int64_t i) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(flags + i));
    return static_cast<uint16_t>(_mm_movemask_epi8(_mm_slli_epi16(bytes, 7)));
  };
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const uint16_t bits = sixteen(i);
    std::memcpy(mask + i / kMaskBits, &bits, sizeof(bits));
  }
  if (i < n) {
    const uint16_t bits = sixteen(i);
    std::memcpy(mask + i / kMaskBits, &bits, mask_bytes(n - i));
  }
#else
  for (int64_t i = 0; i < n; i += kMaskBits) {
    // The multiplication moves every byte's bit to its own place at once.
    constexpr uint64_t gather = 0x0102040810204080;
    uint64_t bytes;
    std::memcpy(&bytes, flags + i, sizeof(bytes));
    mask[i / kMaskBits] = static_cast<uint8_t>((bytes * gather) >> 56);
  }
#endif
}

// The `count` elements from `begin` on, in one piece: where they lie if that is one, else gathered row by row in `buffer`.
template <class scalar_t>
inline const scalar_t* in_one_piece(const scalar_t* x, Rows rows, int64_t begin, int64_t count, scalar_t* buffer) {
  if (rows.dense()) {
    return x + begin;
  }
  for (int64_t done = 0; done < count;) {
    const int64_t row = (begin + done) / rows.length, column = (begin + done) % rows.length;
    const int64_t piece = std::min(count - done, rows.length - column);
    std::memcpy(buffer + done, x + row * rows.pitch + column, piece * sizeof(scalar_t));
    done += piece;
  }
  return buffer;
}

// The half types are computed in float, a block at a time: conversion by conversion the compiler makes poor code of float16,
// for which x86 has instructions (0.14 ns an element in the cache against 0.37). Inlined into a clone they are slower again
// (backward of 2^16 elements with a slope that multiplies: by 15%).
#if defined(__x86_64__) && defined(__GNUC__)
#define FASTACT_F16C __attribute__((target("avx,f16c"), noinline))

FASTACT_F16C void convert_f16c(const c10::Half* x, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i))));
  }
  for (; i < n; ++i) {
    to[i] = _cvtsh_ss(x[i].x);
  }
}

FASTACT_F16C void convert_f16c(const float* x, c10::Half* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  for (; i < n; ++i) {
    to[i].x = _cvtss_sh(x[i], _MM_FROUND_TO_NEAREST_INT);
  }
}

const bool has_f16c = __builtin_cpu_supports("avx2");  // every CPU with AVX2 has it; clang can't be asked for f16c itself
#else
constexpr bool has_f16c = false;
template <class From, class To>
inline void convert_f16c(const From*, To*, int64_t) {}
#endif

template <class From, class To>
inline void convert(const From* x, To* to, int64_t n) {
  if constexpr (std::is_same_v<From, c10::Half> || std::is_same_v<To, c10::Half>) {
    if (has_f16c) {
      return convert_f16c(x, to, n);
    }
  }
  FASTACT_VECTORIZE
  for (int64_t i = 0; i < n; ++i) {
    to[i] = x[i];
  }
}

// body(x, y) for a block of elements, computed in opmath.
template <class scalar_t, class Body>
inline void in_opmath(const scalar_t* x, scalar_t* y, int64_t n, const Body& body) {
  using T = opmath_t<scalar_t>;
  if constexpr (std::is_same_v<T, scalar_t>) {
    body(x, y);
  } else {
    T block[kBlock];
    convert(x, block, n);
    body(block, block);
    convert(block, y, n);
  }
}

}  // namespace
}  // namespace fastact::cpu
