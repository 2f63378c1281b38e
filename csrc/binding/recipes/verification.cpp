#include "verification.h"

#include <ATen/ops/arange.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

namespace fastact::recipes {

bool are_identical(at::TensorList tensors, at::TensorList others) {
  return std::equal(tensors.begin(), tensors.end(), others.begin(), others.end(), [](const auto& tensor, const auto& other) {
    return tensor.defined() == other.defined() && (!tensor.defined() || is_identical(tensor, other));
  });
}

at::Tensor some_numbers(at::IntArrayRef sizes, at::TensorOptions options, int64_t seed) {
  const auto dtype = options.dtype().toScalarType();
  // Which bits of a word are random, and what the others are.
  const auto [random, fixed] = dtype == at::kFloat  ? std::pair(0x81ffffffu, 0x3e000000u)
                               : dtype == at::kHalf ? std::pair(0x8fff8fffu, 0x30003000u)
                                                    : std::pair(0x81ff81ffu, 0x3e003e00u);
  const int64_t numbers = c10::multiply_integers(sizes), words = dtype == at::kFloat ? numbers : (numbers + 1) / 2;
  at::Tensor bits = at::arange(seed, seed + words, options.dtype(at::kInt));
  bits.mul_(0x61c88647);
  bits.bitwise_xor_(bits.bitwise_right_shift(15)).mul_(0x2c1b3c6d);
  bits.bitwise_xor_(bits.bitwise_right_shift(12));
  bits.bitwise_and_(static_cast<int32_t>(random)).bitwise_or_(static_cast<int32_t>(fixed));
  return bits.view(dtype).narrow(0, 0, numbers).view(sizes);
}

at::Tensor all_numbers(at::TensorOptions options, Order order) {
  const auto dtype = options.dtype().toScalarType();
  const at::Tensor bits = at::arange(1 << 18, options.dtype(at::kInt)).mul_(order == Order::first ? 0x61c88647 : 0x2c1b3c6d);
  return (dtype == at::kFloat ? bits : bits.to(at::kShort)).view(dtype);
}

}  // namespace fastact::recipes
