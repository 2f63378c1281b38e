// Starts the kernel for a program: that of a form, or the interpreter.
#include <algorithm>

#include "../../mask.h"
#include "starts.h"

namespace fastact::cuda {
namespace {

// A thread's indices have 32 bits. A block's threads may be past the last element.
constexpr int64_t kMaxElements = int64_t{1} << 30, kFewestElements = kMaxElements / 64;  // of a part

// Splits a single row into four, so that a thread has vectors of several.
void split(Program* program) {
  constexpr int rows = 4, vector = 8;
  if (program->dims > 1 || program->size[0] % (rows * vector) != 0) {
    return;
  }
  program->dims = 2;
  program->size[0] /= rows;
  program->size[1] = rows;
  for (int k = 0; k < program->operands; ++k) {
    program->operand[k].stride[1] = program->operand[k].stride[0] * program->size[0];
  }
}

bool start_form(const Program& program, bool has_float16, Stream stream) {
  switch (program.element) {
    case Element::float16:
      return start_float16_form(program, stream);
    case Element::bfloat16:
      return start_bfloat16_form(program, stream);
    default:
      return has_float16 ? start_float32_form_of_float16(program, stream) : start_float32_form(program, stream);
  }
}

bool has_few_elements(const Program& program) {
  return program.numel() <= kMaxElements &&
         std::all_of(program.operand, program.operand + program.operands, [&](const auto& operand) {
           int64_t last = 0;
           for (int dim = 0; dim < program.dims; ++dim) {
             last += (program.size[dim] - 1) * std::max<int64_t>(operand.stride[dim], 0);
           }
           return last <= INT32_MAX;
         });
}

template <class Data>
Data* advance(Data* data, Element element, int64_t elements) {
  const int64_t bits = elements * (element == Element::bit ? 1 : element == Element::float32 ? 32 : 16);
  return reinterpret_cast<Data*>(reinterpret_cast<uintptr_t>(data) + bits / 8);
}

// Runs one half of the outermost dimension after the other. Not where an operand's elements are still far apart in small parts,
// as those of a transposed one.
Error run_halves(const Program& program, Stream stream, bool needs_form, bool* is_run) {
  if (program.numel() < kFewestElements) {
    *is_run = false;
    return cudaSuccess;
  }
  int outer = program.dims - 1;
  while (program.size[outer] == 1) {
    --outer;
  }
  int64_t half = program.size[outer] / 2;
  half -= half < kMaskBits ? 0 : half % kMaskBits;  // vectors stay aligned
  Program first = program, second = program;
  first.dims = second.dims = outer + 1;
  first.size[outer] = half;
  second.size[outer] -= half;
  second.output = advance(program.output, program.element, program.numel() / program.size[outer] * half);
  for (int k = 0; k < program.operands; ++k) {
    auto& operand = second.operand[k];
    const int64_t elements = operand.stride[outer] * half;
    if (operand.element == Element::bit && elements % kMaskBits != 0) {
      *is_run = false;
      return cudaSuccess;
    }
    operand.data = advance(operand.data, operand.element, elements);
  }
  const Error error = run(first, stream, needs_form, is_run);
  return error != cudaSuccess || !*is_run ? error : run(second, stream, needs_form, is_run);
}

}  // namespace

Error run(const Program& given, Stream stream, bool needs_form, bool* is_run) {
  Program program = given;
  split(&program);
  if (!has_few_elements(program)) {
    return run_halves(program, stream, needs_form, is_run);
  }
  bool has_float16 = program.element == Element::float16;
  for (int k = 0; k < program.operands; ++k) {
    has_float16 |= program.operand[k].element == Element::float16;
  }
  for (int k = 0; k < program.instructions; ++k) {
    has_float16 |= program.instruction[k].rounded_to == Element::float16;
  }
  const bool has_form = start_form(program, has_float16, stream);
  *is_run = has_form || !needs_form;
  if (!has_form && *is_run) {
    start_interpreter(program, has_float16, stream);
  }
  return cudaGetLastError();
}

}  // namespace fastact::cuda
