// How a GPU kernel finds what it reads and writes: vectors of 16 bytes, aligned or not, rows, and walks.
#pragma once

#include "layout.h"

namespace fastact::cuda {
namespace {

// Measured on an H200, forward pass of 2^28 float32 elements: one vector a thread 504 us, two 522 us, four 525 us; eight
// consecutive elements a thread 545 us; streaming cache hints 558 us. A device-to-device copy takes 506 us.
constexpr int kVectorBytes = 16;

// Blocks of 128 threads gain the half types 1 to 2% (2^28 elements: backward of hardsigmoid 266 us against 271 us, forward with
// mask 265 us against 268 us) and lose float32 up to 0.5% (forward with mask 525.7 us against 523.7 us).
template <class scalar_t>
constexpr int kThreads = sizeof(scalar_t) == 2 ? 128 : 256;

template <class scalar_t>
struct alignas(kVectorBytes) Vector {
  static constexpr int size = kVectorBytes / sizeof(scalar_t);
  scalar_t element[size];
};

// The index of the first element of the calling thread's k-th vector. 64 bits wide, which the address arithmetic needs anyway.
template <class scalar_t, int vectors = 1>
__device__ int64_t first_element(int k = 0) {
  const int64_t piece = static_cast<int64_t>(blockIdx.x) * vectors + k;
  return (piece * kThreads<scalar_t> + threadIdx.x) * Vector<scalar_t>::size;
}

template <class scalar_t, int vectors = 1>
__host__ unsigned int blocks(int64_t n) {
  constexpr int64_t elements = int64_t{kThreads<scalar_t>} * vectors * Vector<scalar_t>::size;
  return static_cast<unsigned int>((n + elements - 1) / elements);
}

__host__ __device__ bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
}

// How a kernel finds its input: in 16-byte vectors, as it then writes its output; in vectors that may lie across two of those;
// or in rows of any length.
enum class Access { aligned, across, rows };

// The bytes of a vector that lies across two aligned ones, `shift` bytes into the first.
__device__ uint4 load_across(const void* from, int shift) {
  constexpr int words = kVectorBytes / sizeof(unsigned int);
  const auto* aligned = reinterpret_cast<const uint4*>(reinterpret_cast<uintptr_t>(from) - shift);
  const uint4 low = aligned[0], high = aligned[1];
  unsigned int word[2 * words] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  // Whole words move in steps of two and one, so that no index is known only at run time: the array stays in registers.
#pragma unroll
  for (int step = words / 2; step > 0; step /= 2) {
    if (shift & (step * sizeof(unsigned int))) {
#pragma unroll
      for (int i = 0; i + step < 2 * words; ++i) {
        word[i] = word[i + step];
      }
    }
  }
  const unsigned int bits = shift % sizeof(unsigned int) * 8;
  return {
      __funnelshift_r(word[0], word[1], bits), __funnelshift_r(word[1], word[2], bits), __funnelshift_r(word[2], word[3], bits),
      __funnelshift_r(word[3], word[4], bits)};
}

// Divides indices below n. A division by a number that is known only at run time takes about as long as all the rest of a
// kernel; multiplying by its reciprocal, rounded up, gives the same quotient for every 31-bit index.
class Divisor {
 public:
  Divisor() = default;
  Divisor(int64_t divisor, int64_t n) : divisor_(divisor), small_(n <= INT32_MAX && divisor > 0) {
    while (small_ && (int64_t{1} << shift_) < divisor) {
      ++shift_;
    }
    reciprocal_ = small_ ? static_cast<uint32_t>(((uint64_t{1} << (31 + shift_)) + divisor - 1) / divisor) : 0;
  }

  // Leaves the remainder in `i`.
  __device__ int64_t divide(int64_t* i) const {
    const int64_t quotient =
        small_ ? static_cast<int64_t>((static_cast<uint64_t>(*i) * reciprocal_) >> (31 + shift_)) : *i / divisor_;
    *i -= quotient * divisor_;
    return quotient;
  }

  // With fewer instructions, for an n below 2^31 only.
  __device__ int32_t divide(int32_t* i) const {
    const uint64_t index = static_cast<uint32_t>(*i);  // zero-extended: a sign extension would take more instructions
    const auto quotient = static_cast<int32_t>((index * reciprocal_) >> (31 + shift_));
    *i -= quotient * static_cast<int32_t>(divisor_);
    return quotient;
  }

 private:
  int64_t divisor_;
  uint32_t reciprocal_;
  int shift_ = 0;
  bool small_;
};

// Splits an index into row and column.
class RowIndex {
 public:
  RowIndex(Rows rows, int64_t n) : rows_(rows), length_(rows.dense() ? 1 : rows.length, n) {}

  // The offset of element i, and how many elements follow it in its row, itself included.
  __device__ int64_t offset(int64_t i, int64_t* rest) const {
    const int64_t row = length_.divide(&i);
    *rest = rows_.length - i;
    return row * rows_.pitch + i;
  }

 private:
  Rows rows_;
  Divisor length_;
};

// Finds the elements of a walk: from any one on, step by step.
class WalkIndex {
 public:
  WalkIndex(const Walk& walk, int64_t n) : walk_(walk) {
    for (int dim = 0; dim < walk.dims; ++dim) {
      size_[dim] = Divisor(walk.size[dim], n);
    }
  }

  // The offset of element i in the gradient, its bit in the mask, and how many elements follow it in the innermost dimension,
  // itself included.
  __device__ void find(int64_t i, int64_t* offset, int64_t* bit, int64_t* rest) const {
    *offset = *bit = 0;
    for (int dim = 0; dim < walk_.dims; ++dim) {
      const int64_t outer = size_[dim].divide(&i);
      *offset += i * walk_.grad[dim];
      *bit += i * walk_.mask[dim];
      *rest = dim == 0 ? walk_.size[0] - i : *rest;
      i = outer;
    }
  }

  // The same for the element that follows.
  __device__ void next(int64_t following, int64_t* offset, int64_t* bit, int64_t* rest) const {
    if (--*rest > 0) {
      *offset += walk_.grad[0];
      *bit += walk_.mask[0];
    } else {
      find(following, offset, bit, rest);
    }
  }

 private:
  Walk walk_;
  Divisor size_[Walk::kMaxDims];
};

// Where in the input element i of the output comes from.
template <Access access>
__device__ int64_t offset_of(int64_t i, const RowIndex& rows) {
  int64_t rest;
  return access == Access::rows ? rows.offset(i, &rest) : i;
}

// Finds the input of the vector that begins with element `first`; false where that is not one vector: at the end of the tensor
// or of a row. A vector that lies across two aligned ones must not be the tensor's first or last: a byte outside of it would
// be read.
template <Access access, class scalar_t>
__device__ bool find_vector(const scalar_t* x, int64_t first, int64_t n, const RowIndex& rows, const scalar_t** from) {
  constexpr int size = Vector<scalar_t>::size;
  *from = x + first;
  if constexpr (access == Access::aligned) {
    return first + size <= n;
  }
  const bool is_between = first >= size && first + 2 * size <= n;
  if constexpr (access == Access::across) {
    return is_between;
  }
  int64_t rest;
  *from = x + rows.offset(first, &rest);
  return is_between && rest >= size;
}

// A vector's bytes.
template <Access access>
__device__ uint4 load(const void* from) {
  if constexpr (access == Access::aligned) {
    return *static_cast<const uint4*>(from);
  } else {
    return load_across(from, reinterpret_cast<uintptr_t>(from) % kVectorBytes);
  }
}

// The bytes of the calling thread's vectors, where these are whole. They are unpacked when all are on their way: the first use
// of one waits for it.
template <Access access, int vectors, class scalar_t>
__device__ void load_all(
    const scalar_t* x, int64_t n, const RowIndex& rows, uint4 (&bytes)[vectors], bool (&is_whole)[vectors]) {
#pragma unroll
  for (int k = 0; k < vectors; ++k) {
    const scalar_t* from;
    is_whole[k] = find_vector<access>(x, first_element<scalar_t, vectors>(k), n, rows, &from);
    if (is_whole[k]) {
      bytes[k] = load<access>(from);
    }
  }
}

template <class scalar_t>
__device__ Vector<scalar_t> unpack(const uint4& bytes) {
  return *reinterpret_cast<const Vector<scalar_t>*>(&bytes);
}

template <Access access, class scalar_t>
__device__ void store(scalar_t* to, const Vector<scalar_t>& vector) {
  if constexpr (access != Access::aligned) {
    if (!is_aligned(to)) {
#pragma unroll
      for (int i = 0; i < Vector<scalar_t>::size; ++i) {
        to[i] = vector.element[i];
      }
      return;
    }
  }
  *reinterpret_cast<Vector<scalar_t>*>(to) = vector;
}

template <auto value>
using Constant = std::integral_constant<decltype(value), value>;

// Calls launch(Constant), which makes a template argument of what is known only at run time.
template <class Launch>
void with_constant(bool condition, const Launch& launch) {
  condition ? launch(Constant<true>()) : launch(Constant<false>());
}

template <class Launch>
void with_access(const void* from, Rows rows, const void* to, const Launch& launch) {
  if (!rows.dense()) {
    launch(Constant<Access::rows>());
  } else if (is_aligned(from) && is_aligned(to)) {
    launch(Constant<Access::aligned>());
  } else {
    launch(Constant<Access::across>());
  }
}

}  // namespace
}  // namespace fastact::cuda
