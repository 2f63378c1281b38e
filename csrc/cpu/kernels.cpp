// The CPU's kernels: plain loops, vectorised by the compiler for each instruction set and chosen when the library is loaded.
#include "../kernels.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "../mask.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define FASTACT_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FASTACT_CLONES
#endif

// Each loop touches one element a turn, so it may be vectorised even where input and output are the same memory.
#if defined(__GNUC__) && !defined(__clang__)
#define FASTACT_VECTORIZE _Pragma("GCC ivdep")
#else
#define FASTACT_VECTORIZE
#endif

namespace fastact::cpu {
namespace {

// Eight bytes, each 0 or 1, to eight bits: the multiplication moves every byte's bit to its own place at once.
inline uint8_t pack(const uint8_t* flags) {
  constexpr uint64_t gather = 0x0102040810204080;
  uint64_t bytes;
  std::memcpy(&bytes, flags, sizeof(bytes));
  return static_cast<uint8_t>((bytes * gather) >> 56);
}

// And back, by a table: computing the bytes made masked_scale a fifth slower (2^18 float32 elements, 94 us against 79 us).
constexpr auto kFlags = [] {
  std::array<uint64_t, 256> flags{};
  for (uint64_t byte = 0; byte < flags.size(); ++byte) {
    for (int bit = 0; bit < kMaskBits; ++bit) {
      flags[byte] |= (byte >> bit & 1) << (8 * bit);
    }
  }
  return flags;
}();

inline void unpack(uint8_t byte, uint8_t* flags) {
  std::memcpy(flags, &kFlags[byte], sizeof(kFlags[byte]));
}

// y = flags ? x : +0. A half type's elements are the integers it wraps: moving them needs no conversion.
template <class scalar_t>
inline void keep(const scalar_t* x, const uint8_t* flags, scalar_t* y, int64_t n) {
  if constexpr (std::is_floating_point_v<scalar_t>) {
    FASTACT_VECTORIZE
    for (int64_t i = 0; i < n; ++i) {
      y[i] = flags[i] ? x[i] : 0;
    }
  } else {
    const auto* from = &x->x;
    auto* to = &y->x;
    FASTACT_VECTORIZE
    for (int64_t i = 0; i < n; ++i) {
      to[i] = flags[i] ? from[i] : 0;
    }
  }
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
// for which x86 has instructions (0.14 ns an element in the cache against 0.37).
#if defined(__x86_64__) && defined(__GNUC__)
#define FASTACT_F16C __attribute__((target("avx,f16c")))

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

const bool has_f16c = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
#else
constexpr bool has_f16c = false;
template <class From, class To>
void convert_f16c(const From*, To*, int64_t) {}
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

// y = function(x, i) for a block of elements, computed in opmath.
template <class scalar_t, class Function>
inline void transform(const scalar_t* x, scalar_t* y, int64_t n, const Function& function) {
  using T = opmath_t<scalar_t>;
  if constexpr (std::is_same_v<T, scalar_t>) {
    FASTACT_VECTORIZE
    for (int64_t i = 0; i < n; ++i) {
      y[i] = function(x[i], i);
    }
  } else {
    T block[kBlock];
    convert(x, block, n);
    FASTACT_VECTORIZE
    for (int64_t i = 0; i < n; ++i) {
      block[i] = function(block[i], i);
    }
    convert(block, y, n);
  }
}

}  // namespace

template <class F, class scalar_t>
FASTACT_CLONES void forward(F f, const scalar_t* x, Rows rows, scalar_t* y, uint8_t* mask, int64_t begin, int64_t end) {
  using T = opmath_t<scalar_t>;
  for (; begin < end; begin += kBlock) {
    const int64_t count = std::min(kBlock, end - begin);
    scalar_t buffer[kBlock];
    const scalar_t* from = in_one_piece(x, rows, begin, count, buffer);
    if (mask == nullptr) {
      transform(from, y + begin, count, [&](T element, int64_t) { return value(f, element); });
      continue;
    }
    uint8_t flags[kBlock];
    transform(from, y + begin, count, [&](T element, int64_t i) {
      flags[i] = f.inside(element);
      return value(f, element);
    });
    for (int64_t i = count; i % kMaskBits != 0; ++i) {
      flags[i] = 0;  // the padding of the last byte
    }
    for (int64_t i = 0; i < count; i += kMaskBits) {
      mask[(begin + i) / kMaskBits] = pack(flags + i);
    }
  }
}

template <class scalar_t>
FASTACT_CLONES void masked_scale(
    const scalar_t* grad, Rows rows, const uint8_t* mask, scalar_t* y, opmath_t<scalar_t> inside, opmath_t<scalar_t> outside,
    int64_t begin, int64_t end) {
  using T = opmath_t<scalar_t>;
  for (; begin < end; begin += kBlock) {
    const int64_t count = std::min(kBlock, end - begin);
    scalar_t buffer[kBlock];
    const scalar_t* from = in_one_piece(grad, rows, begin, count, buffer);
    uint8_t flags[kBlock];
    for (int64_t i = 0; i < count; i += kMaskBits) {
      unpack(mask[(begin + i) / kMaskBits], flags + i);
    }
    if (inside == 1 && outside == 0) {
      keep(from, flags, y + begin, count);
    } else if (inside != 0 && outside == 0) {  // what scale() does, with less to choose from
      transform(from, y + begin, count, [&](T element, int64_t i) { return flags[i] ? element * inside : 0; });
    } else {
      transform(from, y + begin, count, [&](T element, int64_t i) { return scale(element, flags[i] ? inside : outside); });
    }
  }
}

#define INSTANTIATE_FORWARD(F, scalar_t)                     \
  template void forward<F<scalar_t, Device::cpu>, scalar_t>( \
      F<scalar_t, Device::cpu>, const scalar_t*, Rows, scalar_t*, uint8_t*, int64_t, int64_t);
#define ACTIVATION(op, overload, F, parameters, pytorch) \
  INSTANTIATE_FORWARD(F, double)                         \
  INSTANTIATE_FORWARD(F, float)                          \
  INSTANTIATE_FORWARD(F, c10::Half)                      \
  INSTANTIATE_FORWARD(F, c10::BFloat16)
#include "../family.def"

#define INSTANTIATE_MASKED_SCALE(scalar_t) \
  template void masked_scale<scalar_t>(    \
      const scalar_t*, Rows, const uint8_t*, scalar_t*, opmath_t<scalar_t>, opmath_t<scalar_t>, int64_t, int64_t);
INSTANTIATE_MASKED_SCALE(double)
INSTANTIATE_MASKED_SCALE(float)
INSTANTIATE_MASKED_SCALE(c10::Half)
INSTANTIATE_MASKED_SCALE(c10::BFloat16)

}  // namespace fastact::cpu
