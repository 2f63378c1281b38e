// The CPU's side of the smooth activations: value and gradient are PyTorch's own ops', so all there is to do is to find an
// input again.
#include "../kernels.h"

#include "../code.h"

namespace fastact::cpu {

void encode(const uint16_t* numbers, const uint16_t* x, uint8_t* code, int bits, int64_t n, int64_t begin, int64_t end) {
  const int64_t groups = groups_of(n);
  with_bits(bits, [&](auto constant) {
    for (int64_t first = begin; first < end; first += kGroup) {
      Numbers<constant.value> of_group;
      for (int i = 0; i < kGroup && first + i < end; ++i) {
        of_group.set(i, numbers[x[first + i]]);
      }
      of_group.store(code, first / kGroup, groups);
    }
  });
}

void decode(
    ByNumber<uint16_t> inputs, const uint16_t* y, const uint8_t* code, int bits, uint16_t* x, int64_t n, int64_t begin,
    int64_t end) {
  const int64_t groups = groups_of(n);
  with_bits(bits, [&](auto constant) {
    for (int64_t first = begin; first < end; first += kGroup) {
      const Numbers<constant.value> of_group(code, first / kGroup, groups);
      for (int i = 0; i < kGroup && first + i < end; ++i) {
        x[first + i] = inputs.list[inputs.first[y[first + i]] + of_group.get(i)];
      }
    }
  });
}

}  // namespace fastact::cpu
