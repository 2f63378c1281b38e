// A chain of recipes as a program: a few steps that compute each element of the output on its own, and are run by one kernel.
//
// An element is a float, which starts as an operand's and is rounded after each step that was an op's last, as that op rounded
// it. An operand is a tensor, of which a step reads the element that belongs to the output's.
//
// Each device's kernels are a library of their own, which serves the bindings of all releases of PyTorch: no type of PyTorch's
// appears in this interface.
#pragma once

#include <cstdint>

#if defined(FASTACT_CUDA)
#include <cuda_runtime_api.h>
#endif

#include "../host_device.h"

namespace fastact {

// The steps, with how many references each has, which the formulas in steps.h name a, b, c and d.
#define FASTACT_STEPS(STEP) \
  STEP(load, 1)             \
  STEP(stash, 0)            \
  STEP(add, 2)              \
  STEP(multiply, 1)         \
  STEP(power, 1)            \
  STEP(batch_norm, 4)       \
  STEP(scaled_norm, 4)      \
  STEP(affine_norm, 4)      \
  STEP(group_norm, 4)       \
  STEP(layer_norm, 4)       \
  STEP(clamp, 2)            \
  STEP(tanh, 0)             \
  STEP(silu, 0)             \
  STEP(silu_gradient, 1)    \
  STEP(look_up, 1)          \
  STEP(gradient, 2)

enum class Code : uint8_t {
#define STEP(name, references) name,
  FASTACT_STEPS(STEP)
#undef STEP
};

FASTACT_HOST_DEVICE constexpr int references_of(Code code) {
  switch (code) {
#define STEP(name, references) \
  case Code::name:             \
    return references;
    FASTACT_STEPS(STEP)
#undef STEP
  }
  return 0;
}

FASTACT_HOST_DEVICE constexpr bool is_norm(Code code) {
  return code == Code::batch_norm || code == Code::scaled_norm || code == Code::affine_norm || code == Code::group_norm ||
         code == Code::layer_norm;
}

// The exponents of the step `power`.
constexpr bool is_known_exponent(float a) {
  return a == 2 || a == 3;
}

enum class Element : uint8_t { float32, float16, bfloat16, bit };

// What a step reads: an operand by its index, what was stashed, or a number.
struct Reference {
  static constexpr int8_t kNumber = -1, kStash = -2;

  int8_t operand;
  float number;
};

struct Step {
  static constexpr int kMaxReferences = 4;

  Code code;
  Element rounded_to;  // float32: not at all
  Reference reference[kMaxReferences];
};

struct Program {
  static constexpr int kMaxDims = 5, kMaxOperands = 12, kMaxSteps = 20;

  struct Operand {
    const void* data;
    Element element;
    int64_t stride[kMaxDims];  // 0 where it is the same along a dimension; of bits, in bits
  };

  // The output's dimensions, the innermost in memory first; it is dense. There is at least one.
  int dims, operands, steps;
  int64_t size[kMaxDims];
  Operand operand[kMaxOperands];
  Step step[kMaxSteps];  // the first is a load
  void* output;
  Element element;  // of the output

  int64_t numel() const {
    int64_t n = 1;
    for (int dim = 0; dim < dims; ++dim) {
      n *= size[dim];
    }
    return n;
  }
};

#pragma GCC visibility push(default)

namespace cpu {

// Computes the elements from `begin` up to `end`.
void run(const Program& program, int64_t begin, int64_t end);

}  // namespace cpu

#if defined(FASTACT_CUDA)
namespace cuda {

// Computes all, queued on `stream` of the current device.
cudaError_t run(const Program& program, cudaStream_t stream);

}  // namespace cuda
#endif

#pragma GCC visibility pop

}  // namespace fastact
