// The CPU's kernels: plain loops, vectorised by the compiler for each instruction set and chosen when the library is loaded.
#include "../kernels.h"

#include <algorithm>
#include <cstring>

#include "../mask.h"
#include "../typed.h"

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

// Calls visit(i, offset, bit, count) for the elements of a walk from `begin` up to `end`, which i counts from 0: runs of
// `count` along the innermost dimension, from the gradient's `offset` and the mask's `bit` on.
template <class Visit>
inline void follow(const Walk& walk, int64_t begin, int64_t end, const Visit& visit) {
  int64_t at[Walk::kMaxDims], offset = 0, bit = 0, rest = begin;
  for (int dim = 0; dim < walk.dims; ++dim) {
    at[dim] = rest % walk.size[dim];
    rest /= walk.size[dim];
    offset += at[dim] * walk.grad[dim];
    bit += at[dim] * walk.mask[dim];
  }
  for (int64_t i = begin; i < end;) {
    const int64_t count = std::min(end - i, walk.size[0] - at[0]);
    visit(i - begin, offset, bit, count);
    i += count;
    int64_t steps = count;
    for (int dim = 0; dim < walk.dims; ++dim) {
      at[dim] += steps;
      offset += steps * walk.grad[dim];
      bit += steps * walk.mask[dim];
      if (at[dim] < walk.size[dim]) {
        break;
      }
      offset -= at[dim] * walk.grad[dim];
      bit -= at[dim] * walk.mask[dim];
      at[dim] = 0;
      steps = 1;
    }
  }
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

const bool has_f16c = __builtin_cpu_supports("avx2");  // which none has without the other; clang can't be asked for f16c itself
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

// y = function(x, i), likewise.
template <class scalar_t, class Function>
inline void transform(const scalar_t* x, scalar_t* y, int64_t n, const Function& function) {
  in_opmath(x, y, n, [&](const auto* from, auto* to) {
    FASTACT_VECTORIZE
    for (int64_t i = 0; i < n; ++i) {
      to[i] = function(from[i], i);
    }
  });
}

// Eight elements, those of a mask byte, as bits: choosing one of two needs no arithmetic, and for the half types no conversion.
template <class scalar_t>
struct Octet {
  using Element =
      std::conditional_t<sizeof(scalar_t) == 8, uint64_t, std::conditional_t<sizeof(scalar_t) == 4, uint32_t, uint16_t>>;
  typedef Element Lanes __attribute__((vector_size(kMaskBits * sizeof(Element))));
};

// y = grad * (the mask's bit ? inside : outside). A slope of 1 leaves the gradient as it is, a slope of 0 leaves nothing of it:
// neither multiplies, and so a half type's bits will do. Written with vectors, which the compiler doesn't find in eight shifts
// of one byte; by way of a byte for each flag it took a quarter longer (2^18 float32 elements, 47 us against 36 us).
template <class scalar_t>
inline void scale(
    const scalar_t* grad, const uint8_t* mask, scalar_t* y, opmath_t<scalar_t> inside, opmath_t<scalar_t> outside, int64_t n) {
  using T = opmath_t<scalar_t>;
  using Lanes = typename Octet<scalar_t>::Lanes;
  constexpr Lanes bit = {1, 2, 4, 8, 16, 32, 64, 128};
  const auto times = [](Lanes& x, T slope) {
    if (slope == 0) {
      x = Lanes{};
    } else if constexpr (std::is_same_v<T, scalar_t>) {
      if (slope != 1) {
        typedef T Values __attribute__((vector_size(sizeof(Lanes))));
        x = reinterpret_cast<Lanes>(reinterpret_cast<Values>(x) * slope);
      }
    }
  };
  const auto octet = [&](int64_t i, size_t bytes) {
    Lanes a{};
    std::memcpy(&a, grad + i, bytes);
    Lanes b = a;
    times(a, inside);
    times(b, outside);
    const auto is_inside = reinterpret_cast<Lanes>((bit & mask[i / kMaskBits]) != 0);
    a = (a & is_inside) | (b & ~is_inside);
    std::memcpy(y + i, &a, bytes);
  };
  int64_t i = 0;
  for (; i + kMaskBits <= n; i += kMaskBits) {
    octet(i, sizeof(Lanes));
  }
  if (i < n) {
    octet(i, (n - i) * sizeof(scalar_t));
  }
}

// As scale, in opmath where a slope multiplies.
template <class scalar_t>
inline void scale_block(
    const scalar_t* grad, const uint8_t* mask, scalar_t* y, opmath_t<scalar_t> inside, opmath_t<scalar_t> outside, int64_t n) {
  const auto multiplies = [](opmath_t<scalar_t> slope) { return slope != 0 && slope != 1; };
  const auto scaled = [&](const auto* x, auto* to) { scale(x, mask, to, inside, outside, n); };
  if (multiplies(inside) || multiplies(outside)) {
    in_opmath(grad, y, n, scaled);
  } else {
    scaled(grad, y);
  }
}

}  // namespace

template <class F, class scalar_t>
FASTACT_CLONES void forward_range(F f, const scalar_t* x, Rows rows, scalar_t* y, uint8_t* mask, int64_t begin, int64_t end) {
  using T = opmath_t<scalar_t>;
  for (; begin < end; begin += kBlock) {
    const int64_t count = std::min(kBlock, end - begin);
    scalar_t buffer[kBlock];
    const scalar_t* from = in_one_piece(x, rows, begin, count, buffer);
    if (mask == nullptr) {
      transform(from, y + begin, count, [&](T element, int64_t) { return f(element); });
      continue;
    }
    uint8_t flags[kBlock];
    transform(from, y + begin, count, [&](T element, int64_t i) {
      flags[i] = f.inside(element);
      return f(element);
    });
    pack(flags, mask + begin / kMaskBits, count);
  }
}

// Flattened: what is not inlined into a clone runs on the lowest instruction set, and takes three times as long.
template <class scalar_t>
FASTACT_CLONES __attribute__((flatten)) void backward_range(
    const scalar_t* grad, Rows rows, const uint8_t* mask, scalar_t* y, opmath_t<scalar_t> inside, opmath_t<scalar_t> outside,
    int64_t begin, int64_t end) {
  for (; begin < end; begin += kBlock) {
    const int64_t count = std::min(kBlock, end - begin);
    scalar_t buffer[kBlock];
    const scalar_t* from = in_one_piece(grad, rows, begin, count, buffer);
    scale_block(from, mask + begin / kMaskBits, y + begin, inside, outside, count);
  }
}

template <class scalar_t>
FASTACT_CLONES __attribute__((flatten)) void backward_range(
    const scalar_t* grad, const Walk& walk, const uint8_t* mask, scalar_t* y, opmath_t<scalar_t> inside,
    opmath_t<scalar_t> outside, int64_t begin, int64_t end) {
  for (; begin < end; begin += kBlock) {
    const int64_t count = std::min(kBlock, end - begin);
    scalar_t block[kBlock];
    uint8_t flags[kBlock], bits[kBlock / kMaskBits];
    follow(walk, begin, begin + count, [&](int64_t i, int64_t offset, int64_t bit, int64_t run) {
      for (int64_t k = 0; k < run; ++k) {
        block[i + k] = grad[offset + k * walk.grad[0]];
      }
      for (int64_t k = 0; k < run; ++k, bit += walk.mask[0]) {
        flags[i + k] = (mask[bit / kMaskBits] >> (bit % kMaskBits)) & 1;
      }
    });
    pack(flags, bits, count);
    scale_block(block, bits, y + begin, inside, outside, count);
  }
}

void forward(
    Formula formula, Dtype dtype, const void* activation, const void* x, Rows rows, void* y, uint8_t* mask, int64_t begin,
    int64_t end) {
  with_type(dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    with_activation<Device::cpu, scalar_t>(formula, activation, [&](const auto& f) {
      forward_range(f, static_cast<const scalar_t*>(x), rows, static_cast<scalar_t*>(y), mask, begin, end);
    });
  });
}

namespace {

// `Where` is Rows or Walk.
template <class Where>
void backward_as(
    Dtype dtype, const void* grad, const Where& where, const uint8_t* mask, void* y, double inside, double outside,
    int64_t begin, int64_t end) {
  with_type(dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    using T = opmath_t<scalar_t>;
    backward_range(
        static_cast<const scalar_t*>(grad), where, mask, static_cast<scalar_t*>(y), static_cast<T>(inside),
        static_cast<T>(outside), begin, end);
  });
}

}  // namespace

void backward(
    Dtype dtype, const void* grad, Rows rows, const uint8_t* mask, void* y, double inside, double outside, int64_t begin,
    int64_t end) {
  backward_as(dtype, grad, rows, mask, y, inside, outside, begin, end);
}

void backward(
    Dtype dtype, const void* grad, const Walk& walk, const uint8_t* mask, void* y, double inside, double outside, int64_t begin,
    int64_t end) {
  backward_as(dtype, grad, walk, mask, y, inside, outside, begin, end);
}

}  // namespace fastact::cpu
