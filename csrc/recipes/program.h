// A chain of recipes as a program: a few instructions that compute each element of the output on its own, and are run by one
// kernel.
//
// An element is a float, which starts as an operand's and is rounded after each instruction that was an op's last, as that op
// rounded it. An operand is a tensor, of which an instruction reads the element that belongs to the output's.
//
// Each device's kernels are a library of their own, which serves the bindings of all releases of PyTorch: no type of PyTorch's
// appears in this interface.
#pragma once

#include <cstdint>

#include "../host_device.h"
#include "../runtime.h"

namespace fastact {

// The instructions, with how many references each has, which the formulas in instructions.h name a, b, c and d.
#define FASTACT_INSTRUCTIONS(INSTRUCTION) \
  INSTRUCTION(load, 1)                    \
  INSTRUCTION(stash, 0)                   \
  INSTRUCTION(add, 2)                     \
  INSTRUCTION(subtract, 2)                \
  INSTRUCTION(multiply, 1)                \
  INSTRUCTION(multiply_add, 2)            \
  INSTRUCTION(divide, 1)                  \
  INSTRUCTION(power, 1)                   \
  INSTRUCTION(batch_norm, 4)              \
  INSTRUCTION(scaled_norm, 4)             \
  INSTRUCTION(affine_norm, 4)             \
  INSTRUCTION(folded_norm, 4)             \
  INSTRUCTION(centered_norm, 4)           \
  INSTRUCTION(clamp, 2)                   \
  INSTRUCTION(tanh, 0)                    \
  INSTRUCTION(tanh_gradient, 1)           \
  INSTRUCTION(silu, 0)                    \
  INSTRUCTION(silu_gradient, 1)           \
  INSTRUCTION(addend, 1)                  \
  INSTRUCTION(look_up, 1)                 \
  INSTRUCTION(gradient, 2)

enum class Opcode : uint8_t {
#define INSTRUCTION(name, references) name,
  FASTACT_INSTRUCTIONS(INSTRUCTION)
#undef INSTRUCTION
};

FASTACT_HOST_DEVICE constexpr int references_of(Opcode opcode) {
  switch (opcode) {
#define INSTRUCTION(name, references) \
  case Opcode::name:                  \
    return references;
    FASTACT_INSTRUCTIONS(INSTRUCTION)
#undef INSTRUCTION
  }
  return 0;
}

FASTACT_HOST_DEVICE constexpr bool is_norm(Opcode opcode) {
  return opcode == Opcode::batch_norm || opcode == Opcode::scaled_norm || opcode == Opcode::affine_norm ||
         opcode == Opcode::folded_norm || opcode == Opcode::centered_norm;
}

constexpr bool is_arithmetic(Opcode opcode) {
  return opcode == Opcode::add || opcode == Opcode::subtract || opcode == Opcode::multiply || opcode == Opcode::multiply_add ||
         opcode == Opcode::divide;
}

// Whether the instruction `power` can have this exponent.
constexpr bool is_known_exponent(float a) {
  return a == 2 || a == 3;
}

enum class Element : uint8_t { float32, float16, bfloat16, bit };

// What an instruction reads: an operand by its index, what was stashed, or a number.
struct Reference {
  static constexpr int8_t kNumber = -1, kStash = -2;

  int8_t operand;
  float number;
};

struct Instruction {
  static constexpr int kMaxReferences = 4;

  Opcode opcode;
  Element rounded_to;  // float32: not at all
  Reference reference[kMaxReferences];
};

struct Program {
  static constexpr int kMaxDims = 5, kMaxOperands = 12, kMaxInstructions = 20;

  struct Operand {
    const void* data;  // where the output's first element is read
    Element element;
    int64_t stride[kMaxDims];  // 0 where it is the same along a dimension, and may be negative; of bits, in bits
  };

  // The output's dimensions, the innermost in memory first; it is dense. There is at least one.
  int dims, operands, instructions;
  int64_t size[kMaxDims];
  Operand operand[kMaxOperands];
  Instruction instruction[kMaxInstructions];  // the first is a load
  void* output;
  Element element;  // of the output

  int64_t numel() const {
    int64_t n = 1;
    for (int dim = 0; dim < dims; ++dim) {
      n *= size[dim];
    }
    return n;
  }

  // Whether an operand lies as the output does.
  bool is_dense(const Operand& operand) const {
    int64_t dense = 1;
    for (int dim = 0; dim < dims; dense *= size[dim++]) {
      if (operand.stride[dim] != dense) {
        return false;
      }
    }
    return true;
  }
};

#pragma GCC visibility push(default)

namespace cpu {

// Computes the elements from `begin` up to `end`.
void run(const Program& program, int64_t begin, int64_t end);

}  // namespace cpu

namespace cuda {

// Computes all, queued on `stream` of the current device, and sets `is_run`. It is false, and the output incomplete, if
// `needs_form` and no kernel is compiled for such programs, or if a program is large and can't be run in parts: an operand is
// transposed, or a part would begin within a byte of bits.
FASTACT_WEAK Error run(const Program& program, Stream stream, bool needs_form, bool* is_run);

}  // namespace cuda

#pragma GCC visibility pop

}  // namespace fastact
