#include "../masks.h"

#include "../../mask.h"

namespace fastact::cuda {
namespace {

constexpr int kBlock = 256;
static_assert(kMaskBits == sizeof(unsigned long long));  // in which a thread reads and writes bools

unsigned int grid(int64_t n) {
  return static_cast<unsigned int>((mask_bytes(n) + kBlock - 1) / kBlock);
}

// Multiplied by kGather, eight bytes have their lowest bits side by side in the highest.
constexpr unsigned long long kGather = 0x0102040810204080, kPlaces = 0x8040201008040201, kOnes = 0x0101010101010101;

__global__ void pack_kernel(const uint8_t* bools, uint8_t* bits, int64_t n) {
  const int64_t byte = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x, first = byte * kMaskBits;
  if (first >= n) {
    return;
  }
  unsigned long long eight = 0;
  if (first + kMaskBits <= n) {
    eight = *reinterpret_cast<const unsigned long long*>(bools + first);
  } else {
    for (int i = 0; first + i < n; ++i) {
      eight |= static_cast<unsigned long long>(bools[first + i]) << (8 * i);
    }
  }
  eight = (((eight & 0x7f * kOnes) + 0x7f * kOnes) | eight) >> 7 & kOnes;  // 1 where a byte isn't 0
  bits[byte] = static_cast<uint8_t>(eight * kGather >> 56);
}

__global__ void unpack_kernel(const uint8_t* bits, uint8_t* bools, int64_t n) {
  const int64_t byte = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x, first = byte * kMaskBits;
  if (first >= n) {
    return;
  }
  // Each byte keeps its own of the eight bits, which the sum carries into its highest.
  const unsigned long long eight = ((bits[byte] * kOnes & kPlaces) + 0x7f * kOnes) >> 7 & kOnes;
  if (first + kMaskBits <= n) {
    *reinterpret_cast<unsigned long long*>(bools + first) = eight;
  } else {
    for (int i = 0; first + i < n; ++i) {
      bools[first + i] = static_cast<uint8_t>(eight >> (8 * i));
    }
  }
}

}  // namespace

Error pack_mask(const uint8_t* bools, uint8_t* bits, int64_t n, Stream stream) {
  pack_kernel<<<grid(n), kBlock, 0, stream>>>(bools, bits, n);
  return cudaGetLastError();
}

Error unpack_mask(const uint8_t* bits, uint8_t* bools, int64_t n, Stream stream) {
  unpack_kernel<<<grid(n), kBlock, 0, stream>>>(bits, bools, n);
  return cudaGetLastError();
}

}  // namespace fastact::cuda
