// Recipes of recipes as one program, which a kernel runs without writing what is between.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "../../recipes/program.h"
#include "value.h"

namespace fastact::recipes {

// The tensor of a recipe, if a program computes it in one pass and that is worth it. `force`: even if it isn't.
// `needs_form`: not by a GPU's interpreter.
std::optional<at::Tensor> compute_fused(Value& recipe, bool force = false, bool needs_form = false);

// The gradient of a function's input by a program that continues the input's own, so that the input isn't written; none if
// there is no such program. In a half type it ends with Opcode::gradient, which multiplies by two factors from a table; in
// float32, where the incoming gradient may be in a half type, with the function's own instruction, on a GPU only: on the CPU
// vectors round otherwise than single elements. `force`: even of an input that is kept. `as_input`: in the input's layout,
// whatever the incoming gradient's.
std::optional<at::Tensor> compute_gradient(
    Value& input, const at::Tensor& grad, Opcode opcode, const at::Tensor& factors = {}, bool force = false,
    bool as_input = false);

// A number of a half type for each element of a float32 value which, added to it, gives that of the sum; where there are
// several, any. None if no program computes that.
std::optional<at::Tensor> compute_addend(Value& value, const at::Tensor& sum, at::ScalarType dtype);

// A copy in a dtype and in these strides; contiguous; or laid out as `to` does. Into another order of dimensions,
// repeated, or of a part of a tensor PyTorch's on a GPU takes twice a copy's time.
at::Tensor copy_of(const at::Tensor& tensor, at::ScalarType dtype, at::IntArrayRef strides);
at::Tensor contiguous(const at::Tensor& tensor);
at::Tensor cast_copy(const at::Tensor& tensor, at::ScalarType dtype);

}  // namespace fastact::recipes
