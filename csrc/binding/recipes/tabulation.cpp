#include "tabulation.h"

#include <ATen/ops/arange.h>

#include <algorithm>

#include "constant.h"

namespace fastact::recipes {
namespace {

// Of fewer elements the table would take as long as what it saves.
constexpr int64_t kFewestElements = 8 * kNumbersOfHalf;

// A load and a look-up take the time of so many instructions: on an H200 the second of those that are interpreted costs more
// than a look-up; on a CPU a look-up is as slow as 2.5 of bfloat16's others.
int fewest_instructions(at::Device device) {
  return device.is_cpu() ? 5 : 3;
}

bool are_same(const Program& program, int one, int other) {
  const auto &a = program.operand[one], &b = program.operand[other];
  return a.data == b.data && a.element == b.element && std::equal(a.stride, a.stride + program.dims, b.stride);
}

// The tensor that a program reads first.
int first_operand(const Program& program) {
  return program.instruction[0].reference[0].operand;
}

// Whether an instruction follows from that tensor's elements and from numbers alone.
bool reads_first_alone(const Program& program, const Instruction& instruction) {
  if (instruction.opcode == Opcode::look_up) {
    return true;
  }
  const Reference* const last = instruction.reference + references_of(instruction.opcode);
  return std::all_of(instruction.reference, last, [&](const Reference& reference) {
    return reference.operand < 0 || are_same(program, first_operand(program), reference.operand);
  });
}

// All numbers of a half type by their bits, which are the same for either.
Constant& numbers() {
  static auto& constant = *new Constant([] { return at::arange(kNumbersOfHalf, at::kInt).to(at::kShort); });
  return constant;
}

}  // namespace

int tabulated_instructions(const Program& program, at::Device device) {
  const Element element = program.operand[first_operand(program)].element;
  const bool is_half = element == Element::float16 || element == Element::bfloat16;
  if (!is_half || program.numel() < kFewestElements || program.operands == Program::kMaxOperands) {
    return 0;
  }
  int result = 0;
  bool is_stashed = false;  // what a later instruction reads, which the table doesn't have
  for (int k = 0; k < program.instructions && reads_first_alone(program, program.instruction[k]); ++k) {
    const Instruction& instruction = program.instruction[k];
    const Reference* const last = instruction.reference + references_of(instruction.opcode);
    const bool reads_stash = std::any_of(
        instruction.reference, last, [](const Reference& reference) { return reference.operand == Reference::kStash; });
    is_stashed = instruction.opcode == Opcode::stash || (is_stashed && !reads_stash);
    if (!is_stashed && instruction.rounded_to == element) {
      result = k + 1;
    }
  }
  return result >= fewest_instructions(device) ? result : 0;
}

std::optional<Program> program_of_table(const Program& program, int instructions, at::Device device) {
  const at::Tensor all = numbers().on(device);
  if (!all.defined()) {
    return std::nullopt;
  }
  Program result = program;
  result.dims = 1;
  result.size[0] = kNumbersOfHalf;
  result.instructions = instructions;
  result.element = program.operand[first_operand(program)].element;
  for (int k = 0; k < program.operands; ++k) {
    const bool is_first = are_same(program, first_operand(program), k);
    result.operand[k].data = is_first ? all.const_data_ptr() : program.operand[k].data;
    result.operand[k].stride[0] = is_first ? 1 : 0;
  }
  return result;
}

Program with_table(const Program& program, int instructions, const void* table) {
  const int last = program.operands;
  Program result = program;
  result.operand[last] = {table, program.operand[first_operand(program)].element, {}};
  result.operands = last + 1;
  Instruction& look_up = result.instruction[1];
  look_up = {Opcode::look_up, result.operand[last].element, {}};
  look_up.reference[0].operand = static_cast<int8_t>(last);
  const Instruction* const rest = program.instruction + instructions;
  std::copy(rest, program.instruction + program.instructions, result.instruction + 2);
  result.instructions = 2 + program.instructions - instructions;
  return result;
}

}  // namespace fastact::recipes
