// Lowers a recipe of recipes to the instructions of a program (csrc/recipes/program.h). Nothing is computed yet.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <optional>

#include "../../recipes/program.h"
#include "formulas.h"
#include "value.h"

namespace fastact::recipes {

// Of float32 or a half type.
Element element_of(at::ScalarType dtype);

struct Lowered {
  // What the instructions read, in the order of the program's operands.
  struct Leaf {
    Value* value;  // or none: the table of a function, which is made when all else is known
    const Value* reader;
    Place place;
    bool is_bits;
    at::DimVector order;  // the program's dimension for each of the reader's, if they are in another order
  };

  bool is_reshaped() const { return sizes != root->sizes; }

  Value* root;
  at::DimVector sizes;                            // that the program counts in: the root's, or of what that is a view of
  c10::SmallVector<Instruction, 8> instructions;  // copied at each attempt, so without allocations
  c10::SmallVector<Leaf, 8> leaves;
};

// None if there is no such program, or none that is better than PyTorch's ops, unless `is_alone`.
std::optional<Lowered> lowered(Value& recipe, bool is_alone);

// What computes `gradient`, of the layout and dtype of `input`: from it and `grad` by an instruction, and by factors if it is
// of those. Unless `is_alone`, None if the input isn't computed in it.
std::optional<Lowered> lowered_gradient(
    Value& gradient, Value& input, Value& grad, Opcode opcode, Value* factors, bool is_alone);

}  // namespace fastact::recipes
