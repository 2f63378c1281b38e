#include "lowering.h"

#include <ATen/WrapDimUtils.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "../dtypes.h"
#include "computing.h"
#include "element.h"

namespace fastact::recipes {
namespace {

bool is_view(const Value& value) {
  return facts_of(value.formula).is_view || value.formula.is(formulas().as_strided);
}

// Whether a value's tensor is kept, is or will be remembered, or is a view of such.
bool is_there(const Value& value) {
  return !value.is_recipe() || value.remembers() || value.readers > 1 ||
         (is_view(value) && is_value(value.operands[0]) && is_there(value_of(value.operands[0])));
}

bool is_there(const Lowered::Leaf& leaf) {
  return !leaf.value || leaf.is_bits || is_there(*leaf.value);
}

// The input of which a concatenation has the halves of the last dimension, the second one negated and before the first, as
// rotary embeddings take it; or null.
Value* rotated_input(const Value& recipe) {
  const auto& halves = recipe.operands;
  if (halves.size() != 2 || !is_value(halves[0]) || !is_value(halves[1])) {
    return nullptr;
  }
  const Value &negated = value_of(halves[0]), &first = value_of(halves[1]);
  if (!negated.formula.is(formulas().negative) || !is_value(negated.operands[0])) {
    return nullptr;
  }
  const Value& second = value_of(negated.operands[0]);
  if (half_shown(first) != 0 || half_shown(second) != 1 || !first.operands[0].is(second.operands[0])) {
    return nullptr;
  }
  Value& input = value_of(first.operands[0]);
  return input.sizes_of() == at::IntArrayRef(recipe.sizes) ? &input : nullptr;
}

// Lowers one recipe.
class Lowering {
 public:
  explicit Lowering(Value& root, bool may_pass_over_shared = false)
      : lowered_{&root, false, false, root.sizes, {}, {}}, may_pass_over_shared_(may_pass_over_shared) {}

  bool append_root() {
    Value* found = behind_view(*lowered_.root, *lowered_.root);
    return found && (found == lowered_.root || found->readers < 2) && append(*found);
  }

  // Appends what computes a recipe's element, rounded as the op did when it stored its result.
  bool append(Value& recipe) {
    if (!recipe.fuses || !is_float_or_half(recipe.dtype) || recipe.operands.empty() || !is_value(recipe.operands[0]) ||
        !adopt_half(recipe.dtype)) {
      return false;
    }
    const Facts& facts = facts_of(recipe.formula);
    ops_ += 1 + intermediates_of(facts);
    if (!append_formula(recipe, facts)) {
      return false;
    }
    const bool is_cast = facts.program && facts.program->empty();  // which rounds the instruction before
    const bool is_exact = recipe.formula.is(formulas().cat);       // halves, of which one is negated
    Element& rounded_to = lowered_.instructions.back().rounded_to;
    if (!is_exact && (!is_cast || rounded_to == Element::float32)) {
      rounded_to = element_of(recipe.dtype);
    }
    return true;
  }

  // Appends what computes the root from an input and another tensor, as a gradient: by an instruction, and by factors if it is
  // of those.
  bool append_result(Value& input, Value& other, Opcode opcode, Value* factors, bool force) {
    Instruction instruction = {opcode, element_of(lowered_.root->dtype), {}};
    return adopt_half(lowered_.root->dtype) && append_operand(*lowered_.root, input) &&
           (ops_ > 0 || force) &&  // otherwise nothing is fused, and PyTorch's op is as fast
           add_leaf(*lowered_.root, other, Place::broadcast, &instruction.reference[0]) &&
           (!factors || add_leaf(*lowered_.root, *factors, Place::table, &instruction.reference[1])) && add(instruction);
  }

  // Whether one pass of this is better than PyTorch's ops. Its casts to float32 aren't in vectors on a GPU, and take 1.5 times
  // the time; nor are its sums of float32 and a half type.
  bool is_worth_it() const {
    const Value& root = *lowered_.root;
    const bool widens = root.dtype == at::kFloat && half_ != at::ScalarType::Undefined && !root.device->is_cpu();
    const bool is_sum = lowered_.instructions.back().opcode == Opcode::add && dense_ == 2;
    return ops_ > 1 || has_norm_ || (widens && (is_sum || root.formula.is(formulas().cast)));
  }

  // Whether a form would be better: on a GPU PyTorch's arithmetic isn't in vectors where an operand is of another dtype, or
  // doesn't lie as the others do.
  bool may_be_worth_it() const {
    return !lowered_.root->device->is_cpu() && is_arithmetic(lowered_.instructions.back().opcode);
  }

  Lowered take() { return std::move(lowered_); }

 private:
  static constexpr int kMaxAttempts = 4 * Program::kMaxInstructions;  // more than any program has use for
  static constexpr size_t kFewInstructions = 8;                       // as of 1 + tanh(...) in GELU
  static constexpr int kMaxReaders = 3;  // of a residual sum: the next one, a layer, and the activation in it

  bool append_formula(Value& recipe, const Facts& facts) {
    Value& first = value_of(recipe.operands[0]);
    if (is_half(recipe.dtype) && first.dtype_of() == recipe.dtype && recipe.operands.size() == 1 && facts.is_tabulated) {
      return append_operand(recipe, first) && append_table(recipe);
    }
    if (recipe.formula.is(formulas().cat)) {
      return append_rotated(recipe);
    }
    if (!facts.program || (recipe.device->is_cpu() && facts.varies_with(recipe.arguments))) {
      return false;
    }
    const auto& instructions = *facts.program;
    const std::optional<Opcode> arithmetic = instructions.size() == 1 && is_arithmetic(instructions[0].opcode)
                                                 ? std::optional(instructions[0].opcode)
                                                 : std::nullopt;
    if (arithmetic && recipe.dtype != at::kFloat && !are_all_of(recipe.dtype, recipe.operands)) {
      return false;  // some are rounded before the op
    }
    if (arithmetic && recipe.operands.size() == 2) {
      if (is_value(recipe.operands[1])) {
        return append_binary(recipe, instructions[0], first, value_of(recipe.operands[1]));
      }
      if (arithmetic == Opcode::divide || (arithmetic != Opcode::multiply && !adds_number_exactly(recipe, instructions[0]))) {
        return false;  // a GPU multiplies by a number's reciprocal
      }
    }
    return append_operand(recipe, first) &&
           std::all_of(instructions.begin(), instructions.end(), [&](const FormulaInstruction& instruction) {
             return append_instruction(recipe, instruction);
           });
  }

  bool append_rotated(const Value& recipe) {
    Value* const input = rotated_input(recipe);
    if (!input || swaps_halves_ || !order_.empty() || recipe.sizes != lowered_.sizes ||
        recipe.sizes.back() % (2 * kElementsOfVector) != 0) {
      return false;
    }
    swaps_halves_ = has_halves_ = true;
    const bool is_appended = append_operand(recipe, *input);
    swaps_halves_ = false;
    Instruction negate = {Opcode::multiply, Element::float32, {}};
    negate.reference[0].operand = static_cast<int8_t>(lowered_.leaves.size());
    lowered_.leaves.push_back({nullptr, &recipe, Place::halves, false, {}});
    return is_appended && lowered_.leaves.size() <= Program::kMaxOperands && add(negate);
  }

  // Whether a sum with a number rounds once: not of a half type on the CPU, whose op rounds the number first, nor its product.
  // One number would verify what is wrong for others.
  static bool adds_number_exactly(const Value& recipe, const FormulaInstruction& sum) {
    Reference alpha;
    const bool rounds_number = is_half(recipe.dtype) && recipe.device->is_cpu();
    return !rounds_number && set_number(recipe, sum.references[1], &alpha) && alpha.number == 1;
  }

  // How many results of a formula's ops aren't its own.
  static int intermediates_of(const Facts& facts) {
    const auto is_rounded = [](const FormulaInstruction& instruction) { return instruction.is_rounded; };
    return facts.program ? static_cast<int>(std::count_if(facts.program->begin(), facts.program->end(), is_rounded)) : 0;
  }

  static bool are_all_of(at::ScalarType dtype, const Objects& operands) {
    return std::all_of(operands.begin(), operands.end(), [&](const py::object& operand) {
      return !is_value(operand) || value_of(operand).dtype_of() == dtype;
    });
  }

  bool adopt_half(at::ScalarType dtype) {
    if (is_half(dtype)) {
      const bool is_other = half_ != at::ScalarType::Undefined && half_ != dtype;
      half_ = dtype;
      return !is_other;
    }
    return true;
  }

  // Computes an operand's element as part of this program, or loads it.
  bool append_operand(const Value& reader, Value& value) {
    if (try_inline(reader, value)) {
      return true;
    }
    Instruction instruction = {Opcode::load, Element::float32, {}};
    return add_leaf(reader, value, Place::broadcast, &instruction.reference[0]) && add(instruction);
  }

  // Appends it if it can be part of this program and is better so. If it has other readers, it is computed once for all of
  // them, unless computing it here costs no more than loading it, or it is passed over.
  bool try_inline(const Value& reader, Value& value) {
    if (!can_be_inlined(reader, value) || ++attempts_ > kMaxAttempts) {
      return false;
    }
    const Lowering before = *this;
    Value* found = behind_view(reader, value);
    const bool is_shared = found && found->readers > 1;
    may_pass_over_shared_ &= !is_shared;  // nor the value that this one follows from
    if (found && append(*found) && (!is_shared || is_as_cheap_to_read(before) || pass_over(*found, before))) {
      may_pass_over_shared_ = before.may_pass_over_shared_ && !lowered_.passes_over_shared;
      order_ = before.order_;
      return true;
    }
    restore(before);
    return false;
  }

  // Whether what was appended since reads at most one tensor of the output's size, and no op, as an embedding or a
  // concatenation, has to compute that once more. A GPU may read it several times, for a few instructions.
  bool is_as_cheap_to_read(const Lowering& before) const {
    const size_t instructions = lowered_.instructions.size() - before.lowered_.instructions.size();
    const bool may_read_again = !lowered_.root->device->is_cpu() && instructions <= kFewInstructions;
    const int read = dense_ - before.dense_ - (may_read_again ? again_ - before.again_ : 0);
    const auto is_at_hand = [](const Lowered::Leaf& leaf) {
      return is_there(leaf) || leaf.value->sizes_of() != at::IntArrayRef(leaf.reader->sizes) || is_view(*leaf.value);
    };
    const auto& leaves = lowered_.leaves;
    return read <= 1 && std::all_of(leaves.begin() + before.lowered_.leaves.size(), leaves.end(), is_at_hand);
  }

  // Whether what was appended since is computed here although it is shared: one such value, which leaves the stash free, has
  // few readers, and reads two tensors.
  bool pass_over(const Value& value, const Lowering& before) {
    const bool is_allowed = before.may_pass_over_shared_ && value.readers <= kMaxReaders && dense_ == before.dense_ + 2 &&
                            uses_stash_ == before.uses_stash_;
    lowered_.passes_over_shared |= is_allowed;
    return is_allowed;
  }

  // The recipe that a view of it shows, whose elements the program now counts as it does the view's, or the value itself. Null
  // for views of what is at hand.
  Value* behind_view(const Value& reader, Value& value) {
    const bool counts_in_output_sizes =
        order_.empty() && !has_halves_ && !lowered_.is_reshaped() && reader.sizes == lowered_.sizes;
    const bool is_reshape = value.formula.is(formulas().reshape) && counts_in_output_sizes;
    const bool is_transpose = value.formula.is(formulas().transpose), is_permute = value.formula.is(formulas().permute);
    if (!is_reshape && !is_transpose && !is_permute) {
      return &value;
    }
    Value* const found = is_value(value.operands[0]) ? &value_of(value.operands[0]) : nullptr;
    if (!found || !may_be_part(*found)) {
      return nullptr;
    }
    if (is_reshape) {
      lowered_.sizes = found->sizes;
      return found;
    }
    const size_t dims = value.sizes.size();
    if (order_.empty()) {
      order_.resize(dims);
      std::iota(order_.begin(), order_.end(), 0);
    }
    const auto wrap = [&](py::handle dim) { return at::maybe_wrap_dim(PyLong_AsLongLong(dim.ptr()), dims); };
    const Objects& given = value.arguments;
    if (is_transpose) {
      std::swap(order_[wrap(given[0])], order_[wrap(given[1])]);
    } else {
      const at::DimVector outer = order_;
      for (size_t dim = 0; dim < dims; ++dim) {
        order_[wrap(py::tuple(given[0])[dim])] = outer[dim];
      }
    }
    return found;
  }

  // Undoes an attempt, but for having made it: of sums of sums each would be made twice by the one behind it.
  void restore(const Lowering& before) {
    const int attempts = attempts_;
    *this = before;
    attempts_ = attempts;
  }

  static bool may_be_part(const Value& value) {
    return value.is_recipe() && !value.remembers() && !value.must_be_computed_once();
  }

  static bool can_be_inlined(const Value& reader, const Value& value) {
    return may_be_part(value) && !is_cast_back(value) && value.sizes == reader.sizes;
  }

  // Arithmetic of x and y, where either may be part of the program; of sums and products both.
  bool append_binary(Value& recipe, const FormulaInstruction& formula, Value& x, Value& y) {
    Instruction instruction = {formula.opcode, Element::float32, {}};
    if (formula.references.size() > 1 && !set_number(recipe, formula.references[1], &instruction.reference[1])) {
      return false;
    }
    const bool is_commutative =
        formula.opcode == Opcode::multiply || (formula.opcode == Opcode::add && instruction.reference[1].number == 1);
    const bool is_smaller = x.sizes_of() != at::IntArrayRef(recipe.sizes);
    if (is_commutative && ((!uses_stash_ && try_inline(recipe, y)) || (is_smaller && append_operand(recipe, y)))) {
      const Lowering with_y = *this;
      if (!uses_stash_ && can_be_inlined(recipe, x)) {
        add({Opcode::stash, Element::float32, {}});
        uses_stash_ = true;
        if (try_inline(recipe, x)) {
          instruction.reference[0].operand = Reference::kStash;
          return add(instruction);
        }
        restore(with_y);
      }
      return add_leaf(recipe, x, Place::broadcast, &instruction.reference[0]) && add(instruction);
    }
    return append_operand(recipe, x) && add_leaf(recipe, y, Place::broadcast, &instruction.reference[0]) && add(instruction);
  }

  bool append_table(Value& recipe) {
    lowered_.leaves.push_back({nullptr, &recipe, Place::table, false, {}});
    Instruction instruction = {Opcode::look_up, Element::float32, {}};
    instruction.reference[0].operand = static_cast<int8_t>(lowered_.leaves.size() - 1);
    return lowered_.leaves.size() <= Program::kMaxOperands && add(instruction);
  }

  bool append_instruction(Value& recipe, const FormulaInstruction& formula) {
    Instruction instruction = {formula.opcode, formula.is_rounded ? element_of(recipe.dtype) : Element::float32, {}};
    has_norm_ |= is_norm(formula.opcode);
    for (size_t k = 0; k < formula.references.size(); ++k) {
      const FormulaReference& reference = formula.references[k];
      if (reference.operand >= static_cast<int>(recipe.operands.size())) {
        return false;
      }
      const bool is_operand = reference.operand >= 0 && is_value(recipe.operands[reference.operand]);
      const bool is_set =
          is_operand
              ? add_leaf(recipe, value_of(recipe.operands[reference.operand]), reference.place, &instruction.reference[k])
              : set_number(recipe, reference, &instruction.reference[k]);
      if (!is_set) {
        return false;
      }
    }
    return (instruction.opcode != Opcode::power || is_known_exponent(instruction.reference[0].number)) && add(instruction);
  }

  // A reference to a number: of the formula, an argument, or an operand that is one or None.
  static bool set_number(const Value& recipe, const FormulaReference& reference, Reference* to) {
    if (reference.argument >= static_cast<int>(recipe.arguments.size())) {
      return false;
    }
    PyObject* given = reference.operand >= 0    ? recipe.operands[reference.operand].ptr()
                      : reference.argument >= 0 ? recipe.arguments[reference.argument].ptr()
                                                : Py_None;
    *to = {Reference::kNumber, reference.number};
    if (given == Py_None) {
      return reference.argument < 0;
    }
    if (PyFloat_Check(given)) {
      to->number = static_cast<float>(PyFloat_AsDouble(given));
    } else if (PyLong_Check(given)) {
      int overflow = 0;
      to->number = static_cast<float>(PyLong_AsLongLongAndOverflow(given, &overflow));  // rounded once, unlike a double
      return overflow == 0;
    } else {
      return false;
    }
    return !std::isnan(to->number);  // as a bound it would be ignored
  }

  bool add_leaf(const Value& reader, Value& value, Place place, Reference* reference) {
    // A mask that is broadcast isn't read eight at a time.
    const bool is_bits = value.is_recipe() && value.formula.is(formulas().unpack_mask) && value.sizes == reader.sizes;
    const bool is_moved = !order_.empty() || swaps_halves_;
    if (lowered_.leaves.size() == Program::kMaxOperands || (is_moved && (is_bits || place != Place::broadcast)) ||
        (!is_bits && (!is_float_or_half(value.dtype_of()) || !adopt_half(value.dtype_of())))) {
      return false;
    }
    reference->operand = static_cast<int8_t>(lowered_.leaves.size());
    const auto& leaves = lowered_.leaves;
    const bool is_dense = !is_bits && place == Place::broadcast && value.sizes_of() == at::IntArrayRef(reader.sizes);
    dense_ += is_dense;
    again_ += is_dense && std::any_of(leaves.begin(), leaves.end(), [&](const auto& leaf) { return leaf.value == &value; });
    lowered_.leaves.push_back({&value, &reader, place, is_bits, order_, swaps_halves_});
    return true;
  }

  bool add(const Instruction& instruction) {
    lowered_.instructions.push_back(instruction);
    return lowered_.instructions.size() <= Program::kMaxInstructions;
  }

  Lowered lowered_;
  at::DimVector order_;  // of what is appended, as a leaf's
  at::ScalarType half_ = at::ScalarType::Undefined;
  int ops_ = 0;    // of PyTorch's that it computes
  int dense_ = 0;  // leaves of the output's size
  int again_ = 0;  // those whose tensor it has read before
  int attempts_ = 0;
  bool has_norm_ = false, uses_stash_ = false;
  bool swaps_halves_ = false, has_halves_ = false;  // whether what is appended is read so; whether any leaf is
  bool may_pass_over_shared_;
};

}  // namespace

int half_shown(const Value& value) {
  const bool is_slice = value.formula.is(formulas().slice);
  if (!is_slice && !value.formula.is(formulas().split)) {
    return -1;
  }
  const at::IntArrayRef whole = value_of(value.operands[0]).sizes_of();
  if (2 * value.sizes.back() != whole.back()) {  // it shows all of the last dimension
    return -1;
  }
  const auto given = [&](size_t i) { return PyLong_AsLongLong(value.arguments[i].ptr()); };
  if (!is_slice) {
    return static_cast<int>(given(0));
  }
  const int64_t start = value.arguments[1].is_none() ? 0 : given(1), half = value.sizes.back();
  return given(3) != 1 ? -1 : start == 0 ? 0 : start == half || start == -half ? 1 : -1;
}

std::optional<Lowered> lower(Value& recipe, bool force, bool may_pass_over_shared) {
  Lowering lowering(recipe, may_pass_over_shared);
  if (!lowering.append_root()) {
    return std::nullopt;
  }
  const bool is_worth_it = force || lowering.is_worth_it();
  if (!is_worth_it && !lowering.may_be_worth_it()) {
    return std::nullopt;
  }
  Lowered lowered = lowering.take();
  lowered.is_one_op = !is_worth_it;
  // What isn't there would be computed again for the other readers of what is passed over, and if there is no form; nor may
  // hooks outside be asked again.
  const auto& leaves = lowered.leaves;
  const bool are_there = std::all_of(leaves.begin(), leaves.end(), [](const Lowered::Leaf& leaf) {
    return is_there(leaf) && !(leaf.value && leaf.value->follows_from_outside());
  });
  if (lowered.passes_over_shared && !are_there) {
    return lower(recipe, force, /*may_pass_over_shared=*/false);
  }
  return lowered.is_one_op && !are_there ? std::nullopt : std::optional(std::move(lowered));
}

std::optional<Lowered> lower_instruction(Value& result, Value& input, Value& other, Opcode opcode, Value* factors, bool force) {
  Lowering lowering(result);
  const bool is_appended = lowering.append_result(input, other, opcode, factors, force);
  return is_appended ? std::optional(lowering.take()) : std::nullopt;
}

}  // namespace fastact::recipes
