// y = grad times the slope that the mask chooses.
#include "block.h"

namespace fastact::cpu {
namespace {

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
