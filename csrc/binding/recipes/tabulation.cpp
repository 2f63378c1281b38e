#include "tabulation.h"

#include <ATen/ops/arange.h>

#include <algorithm>
#include <unordered_map>

#include "../devices.h"

namespace fastact::recipes {
namespace {

// Below this the table would take as long as what it saves.
constexpr int64_t kFewestElements = 8 * kNumbersOfHalf;

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
  return instruction.opcode != Opcode::gradient && std::all_of(instruction.reference, last, [&](const Reference& reference) {
           return reference.operand < 0 || are_same(program, first_operand(program), reference.operand);
         });
}

// All numbers of a half type by their bits, which are the same for either.
const void* numbers_on(at::Device device) {
  static auto& known = *new std::unordered_map<at::Device, at::Tensor>();
  const auto found = known.find(device);
  if (found != known.end()) {
    return found->second.const_data_ptr();
  }
  if (is_capturing(device)) {
    return nullptr;  // a graph's memory is its own
  }
  const at::Tensor numbers = at::arange(kNumbersOfHalf, at::kInt).to(at::kShort).to(device);  // waits for the device
  return known.emplace(device, numbers).first->second.const_data_ptr();
}

}  // namespace

int tabulated_instructions(const Program& program) {
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
  return result > 2 ? result : 0;  // a load and one more are no longer than a load and a look-up
}

std::optional<Program> program_of_table(const Program& program, int instructions, at::Device device) {
  const void* const numbers = numbers_on(device);
  if (!numbers) {
    return std::nullopt;
  }
  Program result = program;
  result.dims = 1;
  result.size[0] = kNumbersOfHalf;
  result.instructions = instructions;
  result.element = program.operand[first_operand(program)].element;
  for (int k = 0; k < program.operands; ++k) {
    const bool is_first = are_same(program, first_operand(program), k);
    result.operand[k].data = is_first ? numbers : program.operand[k].data;
    result.operand[k].stride[0] = is_first ? 1 : 0;
  }
  return result;
}

Program with_table(const Program& program, int instructions, const void* table) {
  Program result = program;
  result.operand[result.operands] = {table, program.operand[first_operand(program)].element, {}};
  Instruction& look_up = result.instruction[1];
  look_up = {Opcode::look_up, result.operand[result.operands].element, {}};
  look_up.reference[0].operand = static_cast<int8_t>(result.operands++);
  const Instruction* const rest = program.instruction + instructions;
  std::copy(rest, program.instruction + program.instructions, result.instruction + 2);
  result.instructions = 2 + program.instructions - instructions;
  return result;
}

}  // namespace fastact::recipes
