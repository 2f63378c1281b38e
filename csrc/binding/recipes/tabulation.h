// A chain that reads one tensor of a half type alone, as x * sigmoid(1.702 * x) does, gives one of 65,536 numbers for each of
// 65,536: of many elements it is a look-up in a table.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "../../recipes/program.h"

namespace fastact::recipes {

constexpr int64_t kNumbersOfHalf = 1 << 16;

// How many of a program's first instructions a table stands for; 0 if it would be no faster. They read one tensor of a half
// type and give numbers of that type.
int tabulated_instructions(const Program& program, at::Device device);

// The program that computes their table, by the bits of each number, but for where that is written. None while a CUDA graph is
// captured, if it would be the device's first.
std::optional<Program> program_of_table(const Program& program, int instructions, at::Device device);

// The program with a look-up instead of them.
Program with_table(const Program& program, int instructions, const void* table);

}  // namespace fastact::recipes
