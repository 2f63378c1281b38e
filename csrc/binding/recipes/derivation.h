// From an output of autograd's graph to its recipe, by the rules (activations_cuda/recipes/rules.py).
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "operands.h"

namespace fastact::recipes {

// The state of one derivation: `untried`, the recipes that must be verified, with the formulas that the rules gave them;
// `between`, recipes not yet handed out.
struct Derivation {
  Derivation() : outer(current) { current = this; }
  Derivation(const Derivation&) = delete;
  ~Derivation();

  std::vector<std::pair<py::object, py::object>> untried;
  std::map<Output, std::pair<py::object, NodePointer>> between;
  bool has_failed_attempts = false;
  bool may_succeed_later = false;  // something failed for a reason that may pass
  Derivation* outer;
  static thread_local Derivation* current;

  // Whether a recipe, or one that it follows from, is among the untried.
  bool is_untried(const py::object& recipe) const;

  // Forgets what attempts that failed have left: a comparison of this recipe says nothing of it.
  void keep_operands_of(const py::object& recipe);
};

// The recipe of an output of a node.
py::object derive(Step step);

// A recipe that replaces a tensor.
py::object replacement(py::handle hook, const NodePointer& node, uint32_t output_nr, const at::Tensor& tensor);

// A recipe that no node made: this tensor is formula(operand, *arguments), and `detail` is what else its configuration depends
// on.
py::object recipe_of(
    ConfigurationOf kind, py::handle source, const py::object& formula, const py::object& operand, Objects arguments,
    const at::Tensor& tensor, int64_t detail = 0);
py::object view_of(const py::object& value, const at::Tensor& view, const at::Tensor& base);

// Keeps integers that only this node has saved in a narrower dtype, which holds them all: the value becomes a cast back.
void downcast(py::handle hook, const NodePointer& node, const py::object& value, at::ScalarType dtype);

// Whether a value holds a tensor, and nothing else has its memory.
bool is_held_alone(const Value& value, py::handle hook);

// Whether the hook only counts, and takes every recipe for right, as on fake tensors.
bool is_dry_run(py::handle hook);

// The formula that fits, None if none does, and whether the kernel's has the same bits.
struct Choice {
  py::object formula;
  bool fuses;
};

// By a recipe's configuration.
std::unordered_map<int64_t, Choice>& chosen();

}  // namespace fastact::recipes
