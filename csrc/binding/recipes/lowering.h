// Lowers a recipe of recipes to the instructions of a program (csrc/recipes/program.h). Nothing is computed yet.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <optional>

#include "../../recipes/program.h"
#include "formulas.h"
#include "value.h"

namespace fastact::recipes {

constexpr int64_t kElementsOfVector = 8;  // that a kernel reads at once, in a half type

struct Lowered {
  // What the instructions read, in the order of the program's operands.
  struct Leaf {
    // Or none: the table of a function, which is made when all else is known, or for Place::halves -1 and 1.
    Value* value;
    const Value* reader;
    Place place;
    bool is_bits;
    at::DimVector order;        // the program's dimension for each of the reader's, if they are in another order
    bool swaps_halves = false;  // of the program's last dimension
  };

  bool is_reshaped() const { return sizes != root->sizes; }

  Value* root;
  bool passes_over_shared = false;                // see lower()
  bool is_one_op = false;                         // which only a form may compute faster than PyTorch
  at::DimVector sizes;                            // that the program counts in: the root's, or of what that is a view of
  c10::SmallVector<Instruction, 8> instructions;  // copied at each attempt, so without allocations
  c10::SmallVector<Leaf, 8> leaves;
};

// Which half of its operand's last dimension a value shows: 0, 1 or, if neither, -1. Programs read halves where they are.
int half_shown(const Value& value);

// None if there is no such program or, unless `force`, none that is better than PyTorch's ops.
//
// `may_pass_over_shared`: it may compute, for itself alone, one value on the way that has other readers and reads two tensors.
// In a chain of residual sums every second one is then not remembered until its other readers' turn, for one read more.
std::optional<Lowered> lower(Value& recipe, bool force, bool may_pass_over_shared);

// What computes `result` from `input` and `other` by one instruction, which for Opcode::gradient also reads the table
// `factors`. None unless the program computes the input itself, or `force`.
std::optional<Lowered> lower_instruction(Value& result, Value& input, Value& other, Opcode opcode, Value* factors, bool force);

}  // namespace fastact::recipes
