// Masks of bools, each a byte, true unless it is 0, as bits (../mask.h).
#pragma once

#include <cstdint>

#include "../runtime.h"

namespace fastact {

#pragma GCC visibility push(default)

namespace cpu {

// Both work on the elements from `begin`, a multiple of kMaskBits, up to `end`.
void pack_mask(const uint8_t* bools, uint8_t* bits, int64_t begin, int64_t end);
void unpack_mask(const uint8_t* bits, uint8_t* bools, int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

// Both work on all elements, queued on `stream` of the current device. Bools are aligned to 8 bytes.
FASTACT_WEAK Error pack_mask(const uint8_t* bools, uint8_t* bits, int64_t n, Stream stream);
FASTACT_WEAK Error unpack_mask(const uint8_t* bits, uint8_t* bools, int64_t n, Stream stream);

}  // namespace cuda

#pragma GCC visibility pop

}  // namespace fastact
