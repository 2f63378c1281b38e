// The CPU's kernel: each instruction for a block of elements.
#include <algorithm>

#include "../../mask.h"
#include "../instructions.h"

namespace fastact::cpu {
namespace {

constexpr int kBlock = 256;

// Calls piece(offset in the block, its length, where it begins in each dimension) for what lies in one row.
template <class Piece>
void for_each_piece(const Program& program, int64_t begin, int64_t end, const Piece& piece) {
  for (int64_t at = begin; at < end;) {
    int64_t coordinate[Program::kMaxDims], i = at;
    for (int dim = 0; dim < program.dims; ++dim) {
      coordinate[dim] = i % program.size[dim];
      i /= program.size[dim];
    }
    const int64_t length = std::min(end - at, program.size[0] - coordinate[0]);
    piece(at - begin, length, coordinate);
    at += length;
  }
}

void load(const Program& program, const Program::Operand& operand, int64_t begin, int64_t end, float* to) {
  for_each_piece(program, begin, end, [&](int64_t into, int64_t length, const int64_t* coordinate) {
    int64_t offset = 0;
    for (int dim = 0; dim < program.dims; ++dim) {
      offset += coordinate[dim] * operand.stride[dim];
    }
    const int64_t stride = operand.stride[0];
    if (operand.element == Element::bit) {
      for (int64_t i = 0; i < length; ++i, offset += stride) {
        to[into + i] =
            static_cast<float>(static_cast<const uint8_t*>(operand.data)[offset / kMaskBits] >> (offset % kMaskBits) & 1);
      }
      return;
    }
    with_element(operand.element, [&](auto zero) {
      const auto* from = static_cast<const decltype(zero)*>(operand.data) + offset;
      if (stride == 1) {  // in vectors
        std::transform(from, from + length, to + into, [](auto x) { return static_cast<float>(x); });
        return;
      }
      for (int64_t i = 0; i < length; ++i) {
        to[into + i] = static_cast<float>(from[i * stride]);
      }
    });
  });
}

void run_instruction(
    const Program& program, const Instruction& instruction, int64_t begin, int64_t end, float* x, float* stashed,
    float (&given)[Instruction::kMaxReferences][kBlock]) {
  const int64_t n = end - begin;
  // Replaces each element by function(zero, i), with a zero of a half type.
  const auto replace = [&](Element half, const auto& function) {
    with_element(half, [&](auto zero) {
      if constexpr (sizeof(zero) == 2) {
        for (int64_t i = 0; i < n; ++i) {
          x[i] = function(zero, i);
        }
      }
    });
  };
  const auto look_up = [&](const Program::Operand& table) {
    replace(table.element, [&](auto zero, int64_t i) {
      using scalar_t = decltype(zero);
      return static_cast<float>(static_cast<const scalar_t*>(table.data)[bits_of<scalar_t>(x[i])]);
    });
  };
  const auto differentiate = [&] {
    load(program, program.operand[instruction.reference[0].operand], begin, end, given[0]);
    const auto* factors = static_cast<const float*>(program.operand[instruction.reference[1].operand].data);
    replace(instruction.rounded_to, [&](auto zero, int64_t i) {
      const float* factor = factors + 2 * bits_of<decltype(zero)>(x[i]);
      return scaled(given[0][i], factor[0], factor[1]);
    });
  };
  const auto find_addend = [&] {
    load(program, program.operand[instruction.reference[0].operand], begin, end, given[0]);
    replace(instruction.rounded_to, [&](auto zero, int64_t i) { return addend<decltype(zero)>(x[i], given[0][i]); });
  };
  with_opcode(instruction.opcode, [&](auto opcode) {
    if constexpr (opcode.value == Opcode::stash) {
      std::copy(x, x + n, stashed);
    } else if constexpr (opcode.value == Opcode::look_up) {
      look_up(program.operand[instruction.reference[0].operand]);
    } else if constexpr (opcode.value == Opcode::gradient) {
      differentiate();
    } else if constexpr (opcode.value == Opcode::addend) {
      find_addend();
    } else {
      for (int k = 0; k < references_of(opcode.value); ++k) {
        const Reference& reference = instruction.reference[k];
        if (reference.operand >= 0) {
          load(program, program.operand[reference.operand], begin, end, given[k]);
        } else if (reference.operand == Reference::kStash) {
          std::copy(stashed, stashed + n, given[k]);
        } else {
          std::fill(given[k], given[k] + n, reference.number);
        }
      }
      for (int64_t i = 0; i < n; ++i) {
        x[i] = apply<opcode.value>(x[i], given[0][i], given[1][i], given[2][i], given[3][i]);
      }
    }
  });
  if (instruction.rounded_to != Element::float32) {
    with_element(instruction.rounded_to, [&](auto zero) {
      for (int64_t i = 0; i < n; ++i) {
        x[i] = rounded<decltype(zero)>(x[i]);
      }
    });
  }
}

}  // namespace

void run(const Program& program, int64_t begin, int64_t end) {
  float x[kBlock], stashed[kBlock], given[Instruction::kMaxReferences][kBlock] = {};
  for (; begin < end; begin += kBlock) {
    const int64_t last = std::min(end, begin + kBlock);
    for (int i = 0; i < program.instructions; ++i) {
      run_instruction(program, program.instruction[i], begin, last, x, stashed, given);
    }
    with_element(program.element, [&](auto zero) {
      std::copy(x, x + (last - begin), static_cast<decltype(zero)*>(program.output) + begin);
    });
  }
}

}  // namespace fastact::cpu
