// The kernels of common programs.
#pragma once

#include "../program.h"

namespace fastact::cuda {

// Starts the one for a program whose output is of that type; returns false if there is none.
bool start_float16_form(const Program& program, Stream stream);
bool start_bfloat16_form(const Program& program, Stream stream);
bool start_float32_form(const Program& program, Stream stream);  // which reads nothing in float16
bool start_float32_form_of_float16(const Program& program, Stream stream);

}  // namespace fastact::cuda
