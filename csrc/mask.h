// A mask's layout: bit i % 8, least significant first, of byte i / 8 is that of element i, counted in memory order. Bits past
// the last element are 0. Besides the kernels only `unpacked` in binding/bits/composite.h depends on it;
// docs/one-bit.md has it for those who save masks themselves.
#pragma once

#include <cstdint>

namespace fastact {

constexpr int kMaskBits = 8;

// A template, because the number of elements may be symbolic while PyTorch traces.
template <class Int>
Int mask_bytes(const Int& numel) {
  return (numel + (kMaskBits - 1)) / kMaskBits;
}

}  // namespace fastact
