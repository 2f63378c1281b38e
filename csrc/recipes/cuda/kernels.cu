// Starts the kernel for a program: that of a form, or the interpreter.
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

Error run(const Program& given, Stream stream, bool* has_form) {
  Program program = given;
  split(&program);
  bool has_float16 = program.element == Element::float16;
  for (int k = 0; k < program.operands; ++k) {
    has_float16 |= program.operand[k].element == Element::float16;
  }
  for (int k = 0; k < program.instructions; ++k) {
    has_float16 |= program.instruction[k].rounded_to == Element::float16;
  }
  const bool is_started = start_form(program, has_float16, stream);
  if (has_form) {
    *has_form = is_started;
  } else if (!is_started) {
    has_float16 ? start_interpreter<c10::Half>(program, stream) : start_interpreter<c10::BFloat16>(program, stream);
  }
  return cudaGetLastError();
}

}  // namespace fastact::cuda
