// What the kernels offer to the binding: for each device, one forward kernel for the whole family and one backward kernel.
// Both walk the output in memory order, take any alignment and may run in place. A mask's bit says whether the element is
// inside the linear piece. Backward has a second form, for a gradient or a mask in another order.
//
// Each device's kernels are a library of their own, which serves the bindings of all releases of PyTorch: no type of PyTorch's
// appears in this interface.
#pragma once

#include <cstdint>

#include "../layout.h"
#include "../runtime.h"

namespace fastact {

// An activation's struct, by name.
enum class Formula {
#define ACTIVATION(op, overload, F, parameters, in_pytorch) F,
#include "../family.def"
};

#pragma GCC visibility push(default)

namespace cpu {

// A range of elements that a kernel is called for begins at a multiple of this, so that no two threads share a mask byte.
// It is also how many are buffered at a time (2^18 float16 elements, forward: 32 us, and 41 us with 512 or 256; other
// dtypes show no difference).
constexpr int64_t kBlock = 1024;

// y = f(x) for the elements from `begin` up to `end`, where `activation` is the struct of the formula for this dtype and
// device. Writes the mask too unless `mask` is null.
void forward(
    Formula formula, Dtype dtype, const void* activation, const void* x, Rows rows, void* y, uint8_t* mask, int64_t begin,
    int64_t end);

// y = grad * (the mask's bit ? inside : outside) for the elements from `begin` up to `end`.
void backward(
    Dtype dtype, const void* grad, Rows rows, const uint8_t* mask, void* y, double inside, double outside, int64_t begin,
    int64_t end);
void backward(
    Dtype dtype, const void* grad, const Walk& walk, const uint8_t* mask, void* y, double inside, double outside, int64_t begin,
    int64_t end);

}  // namespace cpu

namespace cuda {

// As the CPU's for all `n` elements, at least 1, queued on `stream` of the current device.
FASTACT_WEAK Error forward(
    Formula formula, Dtype dtype, const void* activation, const void* x, Rows rows, void* y, uint8_t* mask, int64_t n,
    Stream stream);

FASTACT_WEAK Error backward(
    Dtype dtype, const void* grad, Rows rows, const uint8_t* mask, void* y, double inside, double outside, int64_t n,
    Stream stream);
FASTACT_WEAK Error backward(
    Dtype dtype, const void* grad, const Walk& walk, const uint8_t* mask, void* y, double inside, double outside, int64_t n,
    Stream stream);

}  // namespace cuda

#pragma GCC visibility pop

}  // namespace fastact
