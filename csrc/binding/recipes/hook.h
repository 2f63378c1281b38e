// The hooks: one sees every tensor that autograd is about to save, and gives autograd a value in its place; the other gives the
// tensor back.
//
// The first is greedy: a tensor whose op has a rule, and whose operands have values, is let go; any other is kept, and is an
// operand of what follows. The rules are Python's (activations_cuda/recipes/rules.py), and so is what verifies their formulas.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/saved_variable.h>

namespace fastact::recipes {

// Whether what this thread's autograd saves now goes to a scope's hook.
bool is_in_scope();

// In a scope, saves a dense tensor that is about to be written to: its recipe, or a copy.
torch::autograd::SavedVariable save_before_write(const at::Tensor& tensor);

// The value that a scope's hook has packed, or null.
pybind11::object value_behind(const torch::autograd::SavedVariable& saved);

// In bytes: the smallest tensor that is replaced, and the smallest copy of a parameter in another dtype.
void set_smallest(int64_t any, int64_t of_parameter);

// Called when a scope's hooks are set in this thread, and when they are taken away. `observes`: whether numbers in sums are
// noted from the first op on.
void enter_scope(bool observes);
void exit_scope();

// The pack hook of a Hook of Python's, and the unpack hook of all.
pybind11::object pack_hook(const pybind11::object& hook);
const pybind11::object& unpack_hook();

}  // namespace fastact::recipes
