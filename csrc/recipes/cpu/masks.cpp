#include "../masks.h"

#include <algorithm>

#include "../../mask.h"

namespace fastact::cpu {

void pack_mask(const uint8_t* bools, uint8_t* bits, int64_t begin, int64_t end) {
  for (int64_t first = begin; first < end; first += kMaskBits) {
    uint8_t packed = 0;
    for (int64_t i = 0; i < std::min<int64_t>(kMaskBits, end - first); ++i) {
      packed |= static_cast<uint8_t>((bools[first + i] != 0) << i);
    }
    bits[first / kMaskBits] = packed;
  }
}

void unpack_mask(const uint8_t* bits, uint8_t* bools, int64_t begin, int64_t end) {
  for (int64_t first = begin; first < end; first += kMaskBits) {
    const uint8_t packed = bits[first / kMaskBits];
    for (int64_t i = 0; i < std::min<int64_t>(kMaskBits, end - first); ++i) {
      bools[first + i] = packed >> i & 1;
    }
  }
}

}  // namespace fastact::cpu
