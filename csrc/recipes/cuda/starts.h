// The kernels that run programs. Each function is compiled in a file of its own, so that several compilers can work at once.
#pragma once

#include "../program.h"

namespace fastact::cuda {

// Starts the kernel of a form, for a program whose output is of that type; returns false if the program has none.
bool start_float16_form(const Program& program, Stream stream);
bool start_bfloat16_form(const Program& program, Stream stream);
bool start_float32_form(const Program& program, Stream stream);  // which reads nothing in float16
bool start_float32_form_of_float16(const Program& program, Stream stream);

// Starts the kernel that runs any program.
void start_interpreter(const Program& program, bool has_float16, Stream stream);

}  // namespace fastact::cuda
