// What the kernels offer to the binding for the smooth activations. In a dtype of 16 bits these have 65,536 inputs, so a
// function is a table. The inputs that share an output are numbered, and an element's number, saved as a code of a few bits,
// gives together with the output the input back, or whatever a table holds of it: the factor that its gradient is multiplied
// by.
//
// Inputs and outputs are bit patterns. All walk the output in memory order; outputs, code and what is written are dense and
// aligned as an allocation is, where nothing else is said.
#pragma once

#include <cstdint>

#include "../layout.h"
#include "../runtime.h"

namespace fastact {

// A table over the numbered inputs of all outputs: `list[first[output] + number]`. The CUDA kernels find the first kDirect
// numbers of each output in `direct[number][output]`: one lookup in place of two. Since the first numbers are the most
// common ones, this order keeps what is used together (2^28 elements in bfloat16, on an H200: 409 us, `direct[output][number]`
// 831 us).
constexpr uint32_t kDirect = 32;
template <class T>
struct ByNumber {
  const uint32_t* first;
  const T* list;
  const T* direct;
};

#pragma GCC visibility push(default)

namespace cpu {

// Writes each input's number as a code, for the elements from `begin`, a multiple of kGroup, up to `end`.
void encode(const uint16_t* numbers, const uint16_t* x, uint8_t* code, int bits, int64_t n, int64_t begin, int64_t end);

// The inputs again.
void decode(
    ByNumber<uint16_t> inputs, const uint16_t* y, const uint8_t* code, int bits, uint16_t* x, int64_t n, int64_t begin,
    int64_t end);

}  // namespace cpu

namespace cuda {

// y = outputs[x]. `y` may have any alignment, and may be `x`.
FASTACT_WEAK Error look_up(const uint16_t* outputs, const uint16_t* x, Rows rows, uint16_t* y, int64_t n, Stream stream);

// y = outputs[x], and its code. An entry holds an output in its lower half and the input's number in its upper: with one group
// a thread these take 321 us for 2^28 elements in bfloat16 on an H200, the outputs alone 262 us, both tables 348 us.
FASTACT_WEAK Error
encode(const uint32_t* entries, const uint16_t* x, Rows rows, uint16_t* y, uint8_t* code, int bits, int64_t n, Stream stream);

FASTACT_WEAK Error
decode(ByNumber<uint16_t> inputs, const uint16_t* y, const uint8_t* code, int bits, uint16_t* x, int64_t n, Stream stream);

// grad times the input's factors, in float16 or bfloat16. An input has one factor, or two that lie next to each other and are
// multiplied one after the other; -0 stands for PyTorch's selecting +0, whatever the gradient. grad and y may have
// any alignment; with a walk, of which y and code are the mask, grad lies as that says.
FASTACT_WEAK Error scale(
    Dtype dtype, ByNumber<float> slopes, int factors, const void* grad, const uint16_t* y, const uint8_t* code, int bits,
    void* to, int64_t n, Stream stream);
FASTACT_WEAK Error scale(
    Dtype dtype, ByNumber<float> slopes, int factors, const void* grad, const Walk& walk, const uint16_t* y,
    const uint8_t* code, int bits, void* to, int64_t n, Stream stream);

}  // namespace cuda

#pragma GCC visibility pop

}  // namespace fastact
