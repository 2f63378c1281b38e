// The layout of a code of a few bits per element, which numbers the inputs that share an output. Eight elements that follow
// each other in the output's memory order are a group. The low bits of its numbers, 4 or 8 of each, are one word of a first
// plane, the other bits one word of a second plane behind it: what a thread reads or writes is two words. Numbers past the last
// element are 0. Besides the kernels only `aligned` in binding/codes/launch.cpp depends on it.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../host_device.h"

namespace fastact {

constexpr int kGroup = 8;

// Templates, because the number of elements may be symbolic while PyTorch traces.
template <class Int>
FASTACT_HOST_DEVICE Int groups_of(const Int& numel) {
  return (numel + (kGroup - 1)) / kGroup;
}
template <class Int>
Int code_bytes(const Int& numel, int bits) {
  return groups_of(numel) * bits;
}

// The numbers of a group.
template <int bits>
class Numbers {
 public:
  Numbers() = default;
  FASTACT_HOST_DEVICE Numbers(const uint8_t* code, int64_t group, int64_t groups)
      : low_(low_plane(code)[group]), high_(kHigh > 0 ? high_plane(code, groups)[group] : High(0)) {}

  FASTACT_HOST_DEVICE void store(uint8_t* code, int64_t group, int64_t groups) const {
    const_cast<Low*>(low_plane(code))[group] = low_;
    if (kHigh > 0) {
      const_cast<High*>(high_plane(code, groups))[group] = high_;
    }
  }

  FASTACT_HOST_DEVICE uint32_t get(int i) const {
    const auto low = static_cast<uint32_t>(low_ >> (kLow * i)) & ((1u << kLow) - 1);
    const auto high = static_cast<uint32_t>(high_ >> (kHigh * i)) & ((1u << kHigh) - 1);
    return low | high << kLow;
  }

  // Number i must still be 0.
  FASTACT_HOST_DEVICE void set(int i, uint32_t number) {
    low_ |= static_cast<Low>(number & ((1u << kLow) - 1)) << (kLow * i);
    high_ |= static_cast<High>((number >> kLow) << (kHigh * i));
  }

 private:
  static constexpr int kLow = bits < 8 ? 4 : 8;
  static constexpr int kHigh = bits - kLow;
  static_assert(0 <= kHigh && kHigh <= 2);
  using Low = std::conditional_t<kLow == 4, uint32_t, uint64_t>;
  using High = std::conditional_t<kHigh == 2, uint16_t, uint8_t>;

  FASTACT_HOST_DEVICE static const Low* low_plane(const uint8_t* code) { return reinterpret_cast<const Low*>(code); }
  FASTACT_HOST_DEVICE static const High* high_plane(const uint8_t* code, int64_t groups) {
    return reinterpret_cast<const High*>(code + groups * sizeof(Low));
  }

  Low low_ = 0;
  High high_ = 0;
};

// The numbers of bits that a code may have in a dtype: for no others are there kernels.
struct CodeBits {
  int fewer, more;
};
constexpr CodeBits code_bits(bool is_float16) {
  return is_float16 ? CodeBits{8, 10} : CodeBits{5, 8};
}

// Calls function(std::integral_constant) with the number of bits as a template argument.
template <class Function>
auto with_bits(int bits, const Function& function) {
  switch (bits) {
    case 5:
      return function(std::integral_constant<int, 5>());
    case 8:
      return function(std::integral_constant<int, 8>());
    default:
      return function(std::integral_constant<int, 10>());
  }
}

}  // namespace fastact
