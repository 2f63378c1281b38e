// The GPU's kernels: a thread loads one 16-byte vector, computes, and stores one. Only where a tensor is small it does two.
#include "../../access.cuh"
#include "../../mask.h"
#include "../../typed.h"
#include "../formula.h"

namespace fastact::cuda {
namespace {

// Up to here a forward pass without a mask gives each thread two vectors: launching a block then costs more than moving its
// data (2^21 float32 elements: 8.0 us against 8.3 us with one; ATen's 7.9 us). Elsewhere ptxas would spill registers for it.
constexpr int64_t kSmallBytes = int64_t{8} << 20;

// Joins the bits of the neighboring threads that share a mask byte; the first of them writes it. All threads of a warp must
// call this; out-of-range threads pass bits = 0.
template <int size>
__device__ void store_mask(uint8_t* mask, unsigned int bits, int64_t first, int64_t n) {
#pragma unroll
  for (int threads = 1; threads * size < kMaskBits; threads *= 2) {
    bits |= __shfl_down_sync(0xffffffffu, bits, threads) << (threads * size);
  }
  if (first % kMaskBits == 0 && first < n) {
    mask[first / kMaskBits] = static_cast<uint8_t>(bits);
  }
}

template <bool with_mask, Access access, int vectors, class F, class scalar_t>
__global__ void __launch_bounds__(kThreads<scalar_t>)
    forward_kernel(F f, const scalar_t* x, RowIndex rows, scalar_t* y, uint8_t* mask, int64_t n) {
  constexpr int size = Vector<scalar_t>::size;
  using T = opmath_t<scalar_t>;
  uint4 bytes[vectors];
  bool is_whole[vectors];
  load_all<access>(x, n, rows, bytes, is_whole);
#pragma unroll
  for (int k = 0; k < vectors; ++k) {
    const int64_t first = first_element<scalar_t, vectors>(k);
    unsigned int bits = 0;
    if (is_whole[k]) {
      auto vector = unpack<scalar_t>(bytes[k]);
#pragma unroll
      for (int i = 0; i < size; ++i) {
        const T element = static_cast<T>(vector.element[i]);
        vector.element[i] = static_cast<scalar_t>(f(element));
        bits |= static_cast<unsigned int>(f.inside(element)) << i;
      }
      store<access>(y + first, vector);
    } else {
#pragma unroll 1
      for (int i = 0; i < size && first + i < n; ++i) {
        const T element = static_cast<T>(x[offset_of<access>(first + i, rows)]);
        y[first + i] = static_cast<scalar_t>(f(element));
        bits |= static_cast<unsigned int>(f.inside(element)) << i;
      }
    }
    if constexpr (with_mask) {
      store_mask<size>(mask, bits, first, n);
    }
  }
}

// A slope of 1 returns the gradient's own bits, a slope of 0 returns +0 for every gradient: neither multiplies. `selects`: the
// slopes are 1 and 0, so that elements are only selected. That spares the half types their conversions: 264 us against 277 us
// for 2^28 bfloat16 elements on an H200.
template <bool selects, class scalar_t>
__device__ scalar_t scale(scalar_t grad, bool bit, opmath_t<scalar_t> inside, opmath_t<scalar_t> outside) {
  if constexpr (selects) {
    return bit ? grad : scalar_t(0);
  } else {
    const opmath_t<scalar_t> slope = bit ? inside : outside;
    const auto scaled = static_cast<scalar_t>(static_cast<opmath_t<scalar_t>>(grad) * slope);
    return slope == 1 ? grad : slope == 0 ? scalar_t(0) : scaled;
  }
}

template <bool selects, Access access, class scalar_t>
__global__ void __launch_bounds__(kThreads<scalar_t>) backward_kernel(
    const scalar_t* grad, RowIndex rows, const uint8_t* mask, scalar_t* y, opmath_t<scalar_t> inside,
    opmath_t<scalar_t> outside, int64_t n) {
  constexpr int size = Vector<scalar_t>::size;
  const int64_t first = first_element<scalar_t>();
  if (first >= n) {
    return;
  }
  const auto load_bits = [&] { return static_cast<unsigned int>(mask[first / kMaskBits]) >> (first % kMaskBits); };
  if (const scalar_t* from; find_vector<access>(grad, first, n, rows, &from)) {
    // Both loads must be under way before either is used: with the bits loaded, and shifted, first it took 564 us, not 510.
    auto vector = unpack<scalar_t>(load<access>(from));
    const unsigned int bits = load_bits();
#pragma unroll
    for (int i = 0; i < size; ++i) {
      vector.element[i] = scale<selects>(vector.element[i], (bits >> i) & 1, inside, outside);
    }
    store<access>(y + first, vector);
  } else {
    const unsigned int bits = load_bits();
#pragma unroll 1
    for (int i = 0; i < size && first + i < n; ++i) {
      y[first + i] = scale<selects>(grad[offset_of<access>(first + i, rows)], (bits >> i) & 1, inside, outside);
    }
  }
}

// Reads element by element, wherever they are, and stores a vector a thread. What neighboring threads read lies together in
// one of the gradient, the mask and the output; caches serve the rest.
template <class scalar_t>
__global__ void __launch_bounds__(kThreads<scalar_t>) backward_walk_kernel(
    const scalar_t* grad, const __grid_constant__ WalkIndex walk, const uint8_t* mask, scalar_t* y, opmath_t<scalar_t> inside,
    opmath_t<scalar_t> outside, int64_t n) {
  constexpr int size = Vector<scalar_t>::size;
  const int64_t first = first_element<scalar_t>();
  if (first >= n) {
    return;
  }
  int64_t offset, bit, rest;
  walk.find(first, &offset, &bit, &rest);
  Vector<scalar_t> vector;
#pragma unroll
  for (int i = 0; i < size; ++i) {
    if (first + i < n) {
      vector.element[i] = scale<false>(grad[offset], (mask[bit / kMaskBits] >> (bit % kMaskBits)) & 1, inside, outside);
      walk.next(first + i + 1, &offset, &bit, &rest);
    }
  }
  if (first + size <= n) {
    store<Access::aligned>(y + first, vector);
    return;
  }
#pragma unroll
  for (int i = 0; i < size; ++i) {
    if (first + i < n) {
      y[first + i] = vector.element[i];
    }
  }
}

}  // namespace

Error forward(
    Formula formula, Dtype dtype, const void* activation, const void* input, Rows rows, void* output, uint8_t* mask, int64_t n,
    Stream stream) {
  with_type(dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    const auto* x = static_cast<const scalar_t*>(input);
    auto* y = static_cast<scalar_t*>(output);
    with_activation<Device::cuda, scalar_t>(formula, activation, [&](const auto& f) {
      with_constant(mask != nullptr, [&](auto with_mask) {
        with_access(x, rows, y, [&](auto access) {
          const auto launch = [&](auto vectors) {
            forward_kernel<with_mask.value, access.value, vectors.value>
                <<<blocks<scalar_t, vectors.value>(n), kThreads<scalar_t>, 0, stream>>>(f, x, RowIndex(rows, n), y, mask, n);
          };
          if constexpr (!with_mask.value && access.value == Access::aligned) {
            if (n * static_cast<int64_t>(sizeof(scalar_t)) <= kSmallBytes) {
              return launch(Constant<2>());
            }
          }
          launch(Constant<1>());
        });
      });
    });
  });
  return cudaGetLastError();
}

Error backward(
    Dtype dtype, const void* grad, Rows rows, const uint8_t* mask, void* y, double inside, double outside, int64_t n,
    Stream stream) {
  with_type(dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    using T = opmath_t<scalar_t>;
    with_constant(inside == 1 && outside == 0, [&](auto selects) {
      with_access(grad, rows, y, [&](auto access) {
        backward_kernel<selects.value, access.value><<<blocks<scalar_t>(n), kThreads<scalar_t>, 0, stream>>>(
            static_cast<const scalar_t*>(grad), RowIndex(rows, n), mask, static_cast<scalar_t*>(y), static_cast<T>(inside),
            static_cast<T>(outside), n);
      });
    });
  });
  return cudaGetLastError();
}

Error backward(
    Dtype dtype, const void* grad, const Walk& walk, const uint8_t* mask, void* y, double inside, double outside, int64_t n,
    Stream stream) {
  with_type(dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    using T = opmath_t<scalar_t>;
    backward_walk_kernel<<<blocks<scalar_t>(n), kThreads<scalar_t>, 0, stream>>>(
        static_cast<const scalar_t*>(grad), WalkIndex(walk, n), mask, static_cast<scalar_t*>(y), static_cast<T>(inside),
        static_cast<T>(outside), n);
  });
  return cudaGetLastError();
}

}  // namespace fastact::cuda
