// y = f(x), and the mask.
#include "block.h"

namespace fastact::cpu {
namespace {

// y = function(x, i) for a block of elements, computed in opmath.
template <class scalar_t, class Function>
inline void transform(const scalar_t* x, scalar_t* y, int64_t n, const Function& function) {
  in_opmath(x, y, n, [&](const auto* from, auto* to) {
    FASTACT_VECTORIZE
    for (int64_t i = 0; i < n; ++i) {
      to[i] = function(from[i], i);
    }
  });
}

}  // namespace

template <class F, class scalar_t>
FASTACT_CLONES void forward_range(F f, const scalar_t* x, Rows rows, scalar_t* y, uint8_t* mask, int64_t begin, int64_t end) {
  using T = opmath_t<scalar_t>;
  for (; begin < end; begin += kBlock) {
    const int64_t count = std::min(kBlock, end - begin);
    scalar_t buffer[kBlock];
    const scalar_t* from = in_one_piece(x, rows, begin, count, buffer);
    if (mask == nullptr) {
      transform(from, y + begin, count, [&](T element, int64_t) { return f(element); });
      continue;
    }
    uint8_t flags[kBlock];
    transform(from, y + begin, count, [&](T element, int64_t i) {
      flags[i] = f.inside(element);
      return f(element);
    });
    pack(flags, mask + begin / kMaskBits, count);
  }
}

void forward(
    Formula formula, Dtype dtype, const void* activation, const void* x, Rows rows, void* y, uint8_t* mask, int64_t begin,
    int64_t end) {
  with_type(dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    with_activation<Device::cpu, scalar_t>(formula, activation, [&](const auto& f) {
      forward_range(f, static_cast<const scalar_t*>(x), rows, static_cast<scalar_t*>(y), mask, begin, end);
    });
  });
}

}  // namespace fastact::cpu
