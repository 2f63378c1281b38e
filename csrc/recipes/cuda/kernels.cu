// The GPU's kernel. A thread computes a few vectors: of the same columns, where what is the same in all rows (a channel's
// statistics in channels-last) is read once; otherwise of one row, or of any.
//
// It is compiled as an interpreter, which runs any program, and for forms: the instructions of common programs, known in
// advance. On an H100 forms take 0.99 to 1.3 times the time in which a copy moves the same bytes, where rows end within vectors
// 1.4 to 1.8 times; the interpreter takes 2 to 3 times, there 6 to 7.
#include "forms.h"
#include "launch.cuh"

namespace fastact::cuda {
namespace {

bool is_across_rows(const Program& program, int n) {
  return fits_across_rows(program, n, [&](const Program::Operand& operand) { return is_dense(program, operand); });
}

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

template <class T>
void start_interpreter(const Program& program, Stream stream) {
  const bool is_wide = program.element == Element::float32;
  if (!is_wide && is_in_vectors(program, 8)) {
    start<T, 8, Interpreted>(program, stream);
  } else if (is_in_vectors(program, 4)) {
    start<T, 4, Interpreted>(program, stream);
  } else if (!is_wide && is_across_rows(program, 8)) {
    start<T, 8, InterpretedAcrossRows>(program, stream);
  } else if (is_across_rows(program, 4)) {
    start<T, 4, InterpretedAcrossRows>(program, stream);
  } else {
    start<T, 1, Interpreted>(program, stream);
  }
}

bool start_form(const Program& program, bool has_float16, Stream stream) {
  switch (program.element) {
    case Element::float16:
      return start_float16_form(program, stream);
    case Element::bfloat16:
      return start_bfloat16_form(program, stream);
    default:
      return !has_float16 && start_float32_form(program, stream);
  }
}

}  // namespace

Error run(const Program& given, Stream stream) {
  Program program = given;
  split(&program);
  bool has_float16 = program.element == Element::float16;
  for (int k = 0; k < program.operands; ++k) {
    has_float16 |= program.operand[k].element == Element::float16;
  }
  for (int k = 0; k < program.instructions; ++k) {
    has_float16 |= program.instruction[k].rounded_to == Element::float16;
  }
  if (!start_form(program, has_float16, stream)) {
    has_float16 ? start_interpreter<c10::Half>(program, stream) : start_interpreter<c10::BFloat16>(program, stream);
  }
  return cudaGetLastError();
}

}  // namespace fastact::cuda
