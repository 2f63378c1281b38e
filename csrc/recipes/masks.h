// Masks of bools, each a byte, true unless it is 0, as bits: the first of eight elements is the lowest.
#pragma once

#include <cstdint>

#if defined(FASTACT_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace fastact {

#pragma GCC visibility push(default)

namespace cpu {

// Of the bytes of bits from `begin` up to `end`; there are `n` bools.
void pack_mask(const uint8_t* bools, uint8_t* bits, int64_t n, int64_t begin, int64_t end);
void unpack_mask(const uint8_t* bits, uint8_t* bools, int64_t n, int64_t begin, int64_t end);

}  // namespace cpu

#if defined(FASTACT_CUDA)
namespace cuda {

// All, queued on `stream` of the current device. Bools are aligned to 8 bytes.
cudaError_t pack_mask(const uint8_t* bools, uint8_t* bits, int64_t n, cudaStream_t stream);
cudaError_t unpack_mask(const uint8_t* bits, uint8_t* bools, int64_t n, cudaStream_t stream);

}  // namespace cuda
#endif

#pragma GCC visibility pop

}  // namespace fastact
