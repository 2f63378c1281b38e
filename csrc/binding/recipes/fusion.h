// Recipes of recipes as one program, which a kernel runs without writing what is between.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <optional>

#include "value.h"

namespace fastact::recipes {

// What of formulas the kernels can compute, as recipes/programs.py says it.
void set_programs(const py::dict& programs, py::object tabulated, py::object table);

// The names of the kernels' instructions.
py::tuple opcodes();

// The tensor of a recipe, if a program computes it in one pass and that is worth it. `is_alone`: even of a single formula.
std::optional<at::Tensor> compute_fused(Value& recipe, bool is_alone = false);

// The gradient of a function's input, which isn't written if it is a recipe whose program can be continued. In a half type
// `factors` are two for each of its numbers, in float32 `opcode` is the name of the instruction that computes it. `is_alone`:
// even of an input that is kept.
std::optional<at::Tensor> compute_gradient(Value& input, const at::Tensor& grad, const at::Tensor& factors);
std::optional<at::Tensor> compute_gradient(Value& input, const at::Tensor& grad, const char* opcode, bool is_alone = false);

}  // namespace fastact::recipes
