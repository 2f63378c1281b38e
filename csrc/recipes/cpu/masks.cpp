#include "../masks.h"

#include <algorithm>

namespace fastact::cpu {

void pack_mask(const uint8_t* bools, uint8_t* bits, int64_t n, int64_t begin, int64_t end) {
  for (int64_t byte = begin; byte < end; ++byte) {
    uint8_t packed = 0;
    for (int64_t i = 0; i < std::min<int64_t>(8, n - byte * 8); ++i) {
      packed |= static_cast<uint8_t>((bools[byte * 8 + i] != 0) << i);
    }
    bits[byte] = packed;
  }
}

void unpack_mask(const uint8_t* bits, uint8_t* bools, int64_t n, int64_t begin, int64_t end) {
  for (int64_t byte = begin; byte < end; ++byte) {
    for (int64_t i = 0; i < std::min<int64_t>(8, n - byte * 8); ++i) {
      bools[byte * 8 + i] = bits[byte] >> i & 1;
    }
  }
}

}  // namespace fastact::cpu
