// A form: the instructions of a common program, and how its operands lie in memory, known when the kernel is compiled.
#pragma once

#include <algorithm>

#include "../program.h"

namespace fastact::cuda {
namespace {

// How what an instruction of a form reads lies in memory, beside the output.
enum class Layout : uint8_t {
  number,
  stash,
  dense,          // as the output, and in its dtype
  dense_any,      // as the output, in any dtype
  bits,           // as the output, a bit for each element
  column,         // the same in all rows, in float32
  half_column,    // the same in all rows, in the half type
  row,            // the same in all of a row, in float32
  half_row,       // the same in all of a row, in the half type
  same_row,       // where the reference before it is, in float32
  same_half_row,  // where the reference before it is, in the half type
  apart,          // in vectors, in the output's dtype, but its rows may be apart
  apart_any,      // the same, in any dtype
  gate,           // in the output's dtype, the same in all of a sample's rows, or for Spread::row and anywhere in all of a row
  any,
  twin,   // of Spread::pairs: what an instruction in front of the stash reads, of the other half
  sign,   // of Spread::pairs: a number for each half, of which no product is rounded
  table,  // not of the output's elements
};

template <Opcode opcode_, Layout... layouts>
struct InstructionOf {
  static constexpr Opcode opcode = opcode_;

  FASTACT_HOST_DEVICE static constexpr Layout layout(int reference) {
    constexpr Layout all[] = {layouts..., Layout::number};
    return all[reference];
  }

  // How many of the first references are to operands.
  FASTACT_HOST_DEVICE static constexpr int operands(int references) {
    int result = 0;
    ((references-- > 0 && layouts != Layout::number && layouts != Layout::stash ? void(++result) : void()), ...);
    return result;
  }
};

// Where a thread's vectors lie.
enum class Spread : uint8_t {
  columns,   // the same columns of several rows, so that what is the same in all rows is read once
  sample,    // the same, of rows of one sample, which the program's second dimension counts
  pairs,     // the same columns of two rows, where the second dimension is of two
  row,       // in one row, whose length they must divide
  anywhere,  // a vector may cross the end of a row
};

// The instructions of a program of at most so many dimensions, and how many vectors a thread has.
template <int vectors_, int dims_, class... Instructions>
struct Form {
  static constexpr Spread spread = Spread::columns;
  static constexpr int vectors = vectors_, dims = dims_, instructions = sizeof...(Instructions);
  static constexpr bool reads_any = ((Instructions::layout(0) == Layout::any) || ...);
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 750 || __CUDA_ARCH__ == 860)
  static constexpr int blocks = 1;  // of a multiprocessor, at least: for more ptxas would spill registers here
#else
  static constexpr int blocks = reads_any ? 1 : 0;  // likewise, of forms that compute offsets; or for ptxas to say
#endif

  FASTACT_HOST_DEVICE static constexpr Opcode opcode(int k) {
    constexpr Opcode all[] = {Instructions::opcode...};
    return all[k];
  }

  // The instruction that reads a table, or the end if none does.
  FASTACT_HOST_DEVICE static constexpr int table() {
    int k = 0;
    while (k < instructions && opcode(k) != Opcode::look_up && opcode(k) != Opcode::gradient) {
      ++k;
    }
    return k;
  }

  // Whether instruction k rounds, where that is known when the kernel is compiled: of a half type's Spread::pairs. With
  // branches the compiler wouldn't see that both halves are computed from the same numbers.
  FASTACT_HOST_DEVICE static constexpr bool rounds(int k) { return is_arithmetic(opcode(k)) && layout(k, 0) != Layout::sign; }

  // How far in front of an instruction is the one whose twin it reads.
  FASTACT_HOST_DEVICE static constexpr int to_twin() {
    int k = 0;
    while (opcode(k) != Opcode::stash) {
      ++k;
    }
    return k + 1;
  }

  // Where a form's kernel finds what a reference of instruction k reads: known when it is compiled, so that the kernel loads no
  // index first.
  FASTACT_HOST_DEVICE static constexpr int operand(int k, int reference) {
    int result = 0;
    ((result += Instructions::operands(k > 0 ? Instruction::kMaxReferences : k == 0 ? reference : 0), --k), ...);
    return result;
  }

  FASTACT_HOST_DEVICE static constexpr Layout layout(int k, int reference) {
    Layout result = Layout::number;
    ((k-- == 0 ? void(result = Instructions::layout(reference)) : void()), ...);
    return result;
  }
};

template <int vectors, class... Instructions>
struct FormOfSample : Form<vectors, 3, Instructions...> {
  static constexpr Spread spread = Spread::sample;
};

template <class... Instructions>
struct FormOfPairs : Form<2, Program::kMaxDims, Instructions...> {
  static constexpr Spread spread = Spread::pairs;
};

template <int vectors, int dims, Spread spread_, class... Instructions>
struct FormOfRows : Form<vectors, dims, Instructions...> {
  static constexpr Spread spread = spread_;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int blocks = 1;  // for more ptxas would spill registers of one of them on sm_80
#endif
};

bool has_layout(const Program& program, const Instruction& instruction, int r, Layout layout, Spread spread) {
  const Reference& reference = instruction.reference[r];
  if (layout == Layout::number) {
    return reference.operand == Reference::kNumber;
  }
  if (layout == Layout::stash) {
    return reference.operand == Reference::kStash;
  }
  if (reference.operand < 0) {
    return false;
  }
  const auto& operand = program.operand[reference.operand];
  const bool is_float = operand.element == Element::float32, is_bit = operand.element == Element::bit;
  const bool is_half = !is_float && !is_bit;
  const int64_t *strides = operand.stride, *last = strides + program.dims;
  const auto is_column = [&] {
    return strides[0] == 1 && std::all_of(strides + 1, last, [](int64_t each) { return each == 0; });
  };
  switch (layout) {
    case Layout::dense:
      return operand.element == program.element && program.is_dense(operand);
    case Layout::dense_any:
      return !is_bit && program.is_dense(operand);
    case Layout::bits:
      return is_bit && program.is_dense(operand);
    case Layout::column:
      return is_float && is_column();
    case Layout::half_column:
      return is_half && is_column();
    case Layout::row:
    case Layout::sign:
      return is_float && strides[0] == 0;
    case Layout::half_row:
      return is_half && strides[0] == 0;
    case Layout::apart:
      return operand.element == program.element && strides[0] == 1;
    case Layout::apart_any:
      return !is_bit && strides[0] == 1;
    case Layout::gate:
      return operand.element == program.element &&
             (spread == Spread::sample ? strides[0] == 1 && strides[1] == 0 : strides[0] == 0);
    case Layout::same_row:
    case Layout::same_half_row:
      return (layout == Layout::same_row ? is_float : is_half) &&
             std::equal(strides, last, program.operand[instruction.reference[r - 1].operand].stride);
    default:
      return true;
  }
}

// Whether an instruction does with each half, which the second dimension counts, what the other does with the other half.
bool are_twins(const Program& program, const Instruction& instruction, const Instruction& twin) {
  const Reference &reference = instruction.reference[0], &other = twin.reference[0];
  if (instruction.rounded_to != twin.rounded_to || reference.operand < 0 || other.operand < 0) {
    return false;
  }
  const auto &one = program.operand[reference.operand], &two = program.operand[other.operand];
  const int64_t bytes = one.stride[1] * (one.element == Element::float32 ? 4 : 2);
  return one.element == two.element && one.element != Element::bit && one.stride[0] == two.stride[0] &&
         one.stride[1] == -two.stride[1] && std::equal(one.stride + 2, one.stride + program.dims, two.stride + 2) &&
         reinterpret_cast<uintptr_t>(one.data) + bytes == reinterpret_cast<uintptr_t>(two.data);
}

template <int n, class Form>
bool has_form(const Program& program) {
  if (program.instructions != Form::instructions || program.dims > Form::dims ||
      (Form::spread == Spread::sample && program.dims == 1) ||
      (Form::spread == Spread::pairs && (program.dims == 1 || program.size[1] != 2)) ||
      (Form::spread == Spread::row && program.size[0] % (Form::vectors * n) != 0)) {
    return false;
  }
  for (int k = 0; k < program.instructions; ++k) {
    const Instruction& instruction = program.instruction[k];
    if (instruction.opcode != Form::opcode(k) ||
        (Form::spread == Spread::pairs && n == 8 && (instruction.rounded_to != Element::float32) != Form::rounds(k))) {
      return false;
    }
    for (int r = 0; r < references_of(instruction.opcode); ++r) {
      const Layout layout = Form::layout(k, r);
      if (layout == Layout::twin ? !are_twins(program, instruction, program.instruction[k - Form::to_twin()])
                                 : !has_layout(program, instruction, r, layout, Form::spread)) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace
}  // namespace fastact::cuda
