#include "fusion.h"

#include <ATen/ExpandUtils.h>
#include <ATen/WrapDimUtils.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "../../recipes/program.h"
#include "../devices.h"
#include "../dispatch.h"
#include "../dtypes.h"
#include "../strides.h"
#include "computing.h"
#include "formulas.h"
#include "python.h"

namespace fastact::recipes {
namespace {

// Whether the CPU takes subnormals for zero, which tables and conversions know nothing of.
bool flushes_subnormals() {
  volatile float subnormal = 1e-40f;
  return subnormal * 1.0f == 0.0f;
}

constexpr int64_t kElementsOfVector = 8;  // that a kernel reads at once, in a half type

// What a program reads, in the order of its operands.
struct Leaf {
  Value* value;  // or none: the table of a function, which is made when all else is known
  const Value* reader;
  Place place;
  bool is_bits;
  at::DimVector order;  // the program's dimension for each of the reader's, if they are in another order
  at::Tensor tensor;
};

// The output's dimensions and, for each of them, the strides of all that a program reads.
struct Geometry {
  at::DimVector sizes;
  c10::SmallVector<at::DimVector, 8> strides;  // the first is the output's

  // A dimension as two, the inner of which has so many elements.
  void split(size_t dim, int64_t inner) {
    sizes.insert(sizes.begin() + dim + 1, inner);
    sizes[dim] /= inner;
    for (auto& each : strides) {
      each.insert(each.begin() + dim + 1, each[dim]);
      each[dim] *= inner;
    }
  }

  // In a program: from the innermost dimension outwards, with as few as possible. False if it has no room for them.
  bool write(Program* program) const {
    program->dims = 0;
    for (const int64_t dim : inner_to_outer(sizes, strides[0])) {
      const int inner = program->dims - 1;
      bool continues = inner >= 0;
      for (int k = 0; continues && k < program->operands; ++k) {
        continues = strides[k + 1][dim] == program->operand[k].stride[inner] * program->size[inner];
      }
      if (continues) {
        program->size[inner] *= sizes[dim];
        continue;
      }
      if (program->dims == Program::kMaxDims) {
        return false;
      }
      program->size[program->dims] = sizes[dim];
      for (int k = 0; k < program->operands; ++k) {
        program->operand[k].stride[program->dims] = strides[k + 1][dim];
      }
      ++program->dims;
    }
    if (program->dims == 0) {  // a single element
      program->dims = 1;
      program->size[0] = 1;
      for (int k = 0; k < program->operands; ++k) {
        program->operand[k].stride[0] = 0;
      }
    }
    return true;
  }
};

class Builder {
 public:
  explicit Builder(Value& root) : root_(&root), sizes_(root.sizes) {}

  bool append_root() {
    Value* found = behind_view(*root_, *root_);
    return found && (found == root_ || found->readers < 2) && append(*found);
  }

  // Appends what computes a recipe's element.
  bool append(Value& recipe) {
    if (!recipe.fuses || !is_float_or_half(recipe.dtype) || recipe.operands.empty() || !is_value(recipe.operands[0]) ||
        !adopt_half(recipe.dtype)) {
      return false;
    }
    ++formulas_;
    Value& first = value_of(recipe.operands[0]);
    const bool is_of_one_number = recipe.operands.size() == 1 && facts_of(recipe.formula).is_tabulated;
    if (is_half(recipe.dtype) && first.dtype_of() == recipe.dtype && is_of_one_number) {
      return append_operand(recipe, first) && append_table(recipe) && finish(recipe, 1);
    }
    const Facts& facts = facts_of(recipe.formula);
    if (!facts.program || (recipe.device->is_cpu() && facts.varies_with(recipe.arguments))) {
      return false;
    }
    const auto& instructions = *facts.program;
    const bool is_binary =
        instructions.size() == 1 && (instructions[0].opcode == Opcode::add || instructions[0].opcode == Opcode::multiply);
    if (is_binary && recipe.operands.size() == 2 && is_value(recipe.operands[1])) {
      return append_binary(recipe, instructions[0], first, value_of(recipe.operands[1]));
    }
    if (!append_operand(recipe, first)) {
      return false;
    }
    for (const FormulaInstruction& instruction : instructions) {
      if (!append_instruction(recipe, instruction)) {
        return false;
      }
    }
    return finish(recipe, instructions.size());
  }

  // Appends what computes the gradient, which the root is: by an instruction, and by factors if it is of those.
  bool append_gradient(Value& input, Value& grad, Opcode opcode, Value* factors, bool is_alone) {
    Instruction instruction = {opcode, element_of(root_->dtype), {}};
    return adopt_half(root_->dtype) && append_operand(*root_, input) &&
           (formulas_ > 0 || is_alone) &&  // otherwise nothing is fused, and PyTorch's op is as fast
           add_leaf(*root_, grad, Place::broadcast, &instruction.reference[0]) &&
           (!factors || add_leaf(*root_, *factors, Place::table, &instruction.reference[1])) && add(instruction);
  }

  // Whether one pass of this is better than PyTorch's ops. Its cast to float32 isn't in vectors on a GPU: 1.5 times the time.
  bool is_worth_it() const {
    const bool widens = root_->dtype == at::kFloat && half_ != at::ScalarType::Undefined && !root_->device->is_cpu();
    return formulas_ > 1 || has_norm_ || (widens && root_->formula.is(formulas().cast));
  }

  std::optional<at::Tensor> run(bool needs_form = false);

 private:
  static constexpr int kMaxAttempts = 4 * Program::kMaxInstructions;  // more than any program has use for

  // The steps of run(): the tensors of the leaves, if they fit together; the output's strides; those of all that is read.
  bool read_leaves();
  std::optional<at::DimVector> output_strides() const;
  std::optional<Geometry> lay_out(const at::DimVector& strides);

  bool is_reshaped() const { return sizes_ != root_->sizes; }

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

  // Appends it if it can be part of this program and is better so. With other readers it is computed once for all of them,
  // unless that would read no fewer tensors of the output's size than computing it here and all may be read again.
  bool try_inline(const Value& reader, Value& value) {
    if (!can_be_inlined(reader, value) || ++attempts_ > kMaxAttempts) {
      return false;
    }
    const Builder before = *this;
    Value* found = behind_view(reader, value);
    if (found && append(*found) && (found->readers < 2 || dense_ <= before.dense_ + 1)) {
      order_ = before.order_;
      return true;
    }
    restore(before);
    return false;
  }

  // The recipe that a view of it shows, whose elements the program now counts as it does the view's, or the value itself. Null
  // for views of what is at hand.
  Value* behind_view(const Value& reader, Value& value) {
    const bool counts_in_output_sizes = order_.empty() && !is_reshaped() && reader.sizes == sizes_;
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
      sizes_ = found->sizes;
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
  void restore(const Builder& before) {
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

  // x + alpha * y or x * y, where either may be part of the program, or both.
  bool append_binary(Value& recipe, const FormulaInstruction& formula, Value& x, Value& y) {
    for (const Value* each : {&x, &y}) {
      if (each->dtype_of() != recipe.dtype && recipe.dtype != at::kFloat) {
        return false;  // rounded before the op
      }
    }
    Instruction instruction = {formula.opcode, Element::float32, {}};
    if (formula.references.size() > 1 && !set_number(recipe, formula.references[1], &instruction.reference[1])) {
      return false;
    }
    const bool is_commutative = formula.references.size() == 1 || instruction.reference[1].number == 1;
    const bool is_smaller = x.sizes_of() != at::IntArrayRef(recipe.sizes);
    if (is_commutative && !uses_stash_ && (try_inline(recipe, y) || (is_smaller && append_operand(recipe, y)))) {
      const Builder with_y = *this;
      if (!uses_stash_ && can_be_inlined(recipe, x)) {
        add({Opcode::stash, Element::float32, {}});
        uses_stash_ = true;
        if (try_inline(recipe, x)) {
          instruction.reference[0].operand = Reference::kStash;
          return add(instruction) && finish(recipe, 1);
        }
        restore(with_y);
      }
      return add_leaf(recipe, x, Place::broadcast, &instruction.reference[0]) && add(instruction) && finish(recipe, 1);
    }
    return append_operand(recipe, x) && add_leaf(recipe, y, Place::broadcast, &instruction.reference[0]) && add(instruction) &&
           finish(recipe, 1);
  }

  bool append_table(Value& recipe) {
    leaves_.push_back({nullptr, &recipe, Place::table, false, {}, {}});
    Instruction instruction = {Opcode::look_up, Element::float32, {}};
    instruction.reference[0].operand = static_cast<int8_t>(leaves_.size() - 1);
    return leaves_.size() <= Program::kMaxOperands && add(instruction);
  }

  bool append_instruction(Value& recipe, const FormulaInstruction& formula) {
    Instruction instruction = {formula.opcode, formula.is_rounded ? element_of(recipe.dtype) : Element::float32, {}};
    has_norm_ |= is_norm(formula.opcode);
    for (size_t k = 0; k < formula.references.size(); ++k) {
      const FormulaReference& reference = formula.references[k];
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
    if (leaves_.size() == Program::kMaxOperands || (!order_.empty() && (is_bits || place != Place::broadcast)) ||
        (!is_bits && (!is_float_or_half(value.dtype_of()) || !adopt_half(value.dtype_of())))) {
      return false;
    }
    reference->operand = static_cast<int8_t>(leaves_.size());
    leaves_.push_back({&value, &reader, place, is_bits, order_, {}});
    dense_ += !is_bits && place == Place::broadcast && value.sizes_of() == at::IntArrayRef(reader.sizes);
    return true;
  }

  bool add(const Instruction& instruction) {
    instructions_.push_back(instruction);
    return instructions_.size() <= Program::kMaxInstructions;
  }

  // Rounds as the op did when it stored its result. A cast has no instruction of its own: it rounds the one before.
  bool finish(const Value& recipe, size_t own_instructions) {
    Element& rounded_to = instructions_.back().rounded_to;
    if (own_instructions > 0 || rounded_to == Element::float32) {
      rounded_to = element_of(recipe.dtype);
    }
    return true;
  }

  Value* root_;
  at::DimVector sizes_;                            // that the program counts in: the output's, or of what it is a view of
  at::DimVector order_;                            // of what is appended, as a leaf's
  c10::SmallVector<Instruction, 8> instructions_;  // copied at each attempt, so without allocations
  c10::SmallVector<Leaf, 8> leaves_;
  at::ScalarType half_ = at::ScalarType::Undefined;
  int formulas_ = 0, dense_ = 0, attempts_ = 0;
  bool has_norm_ = false, uses_stash_ = false;
  at::Tensor like_, dense_leaf_;  // the first leaf, and the first of the program's sizes that is dense
};

// The strides of an operand along the output's dimensions, if it fits them; in groups these have been split.
std::optional<at::DimVector> strides_along(
    at::IntArrayRef output, at::IntArrayRef sizes, at::IntArrayRef strides, Place place) {
  if (place == Place::channels) {
    at::DimVector result(output.size(), 0);
    if (sizes.size() != 1 || output.size() < 2 || sizes[0] != output[1]) {
      return std::nullopt;
    }
    result[1] = strides[0];
    return result;
  }
  if (!at::is_expandable_to(sizes, output)) {
    return std::nullopt;
  }
  return at::inferExpandGeometry_dimvector(sizes, strides, output).strides;
}

// False if it isn't run, e.g. since it needs a form and there is none.
bool launch(const Program& program, const at::Tensor& output, bool needs_form) {
  bool is_run = true;
  if (kHasCuda && output.is_cuda()) {
    Cuda::launch(output, [&](cuda::Stream stream) { return cuda::run(program, stream, needs_form, &is_run); });
  } else {
    Cpu::launch(output.numel(), 1, [&](int64_t begin, int64_t end) { cpu::run(program, begin, end); });
  }
  return is_run;
}

// An operand of a program that counts in other sizes than its reader's, as one of those sizes.
std::optional<at::Tensor> viewed(const at::Tensor& tensor, at::IntArrayRef from, at::IntArrayRef sizes) {
  return tensor.sizes() == from && tensor.is_contiguous() ? std::optional(tensor.view(sizes)) : std::nullopt;
}

// The same where its dimensions are in another order.
std::optional<at::Tensor> permuted(const at::Tensor& tensor, const Leaf& leaf, at::IntArrayRef sizes) {
  const at::DimVector& from = leaf.reader->sizes;
  at::DimVector dims(leaf.order.size());
  for (size_t dim = 0; dim < dims.size(); ++dim) {
    if (sizes.size() != dims.size() || sizes[leaf.order[dim]] != from[dim]) {
      return std::nullopt;
    }
    dims[leaf.order[dim]] = static_cast<int64_t>(dim);
  }
  at::Tensor result = tensor;
  while (result.dim() < static_cast<int64_t>(dims.size())) {
    result = result.unsqueeze(0);
  }
  return result.permute(dims);
}

bool Builder::read_leaves() {
  for (Leaf& leaf : leaves_) {
    if (!leaf.value) {
      continue;
    }
    leaf.tensor = (leaf.is_bits ? value_of(leaf.value->operands[0]) : *leaf.value).tensor();
    like_ = like_.defined() ? like_ : leaf.tensor;
    if (leaf.tensor.device() != like_.device() || !is_plain(leaf.tensor)) {
      return false;
    }
    if (leaf.place == Place::table) {
      continue;
    }
    if (!leaf.order.empty() || leaf.reader->sizes != sizes_) {
      const auto view = leaf.is_bits         ? std::nullopt
                        : leaf.order.empty() ? viewed(leaf.tensor, leaf.reader->sizes, sizes_)
                                             : permuted(leaf.tensor, leaf, sizes_);
      if (!view) {
        return false;
      }
      leaf.tensor = *view;
    }
    if (!dense_leaf_.defined() && !leaf.is_bits && leaf.tensor.sizes() == at::IntArrayRef(sizes_) &&
        leaf.tensor.is_non_overlapping_and_dense()) {
      dense_leaf_ = leaf.tensor;
    }
  }
  for (Leaf& leaf : leaves_) {
    if (leaf.value) {
      continue;
    }
    const Value& recipe = *leaf.reader;
    const py::object table =
        callbacks().table(recipe.formula, tuple_of(recipe.arguments), dtype_object(recipe.dtype), wrapped(like_));
    if (table.is_none()) {
      return false;
    }
    leaf.tensor = THPVariable_Unpack(table.ptr());
  }
  return true;
}

std::optional<at::DimVector> Builder::output_strides() const {
  const at::DimVector in_order = c10::contiguous_strides(sizes_);
  if (is_reshaped()) {
    const bool is_in_order = !root_->has_strides || root_->strides == c10::contiguous_strides(root_->sizes);
    return is_in_order ? std::optional(in_order) : std::nullopt;
  }
  if (root_->has_strides) {
    return is_dense(sizes_, root_->strides) ? std::optional(root_->strides) : std::nullopt;
  }
  if (root_->strides_of_output) {
    const at::DimVector& strides = *root_->strides_of_output;
    return is_dense(sizes_, strides) ? std::optional(strides) : std::nullopt;
  }
  return dense_leaf_.defined() ? at::DimVector(dense_leaf_.strides()) : in_order;
}

// Whether the elements of a whole row of the output lie beside each other in an operand too.
bool has_rows_of(at::IntArrayRef operand, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const at::DimVector dims = inner_to_outer(sizes, strides);
  return !dims.empty() && operand[dims[0]] == 1 && sizes[dims[0]] % kElementsOfVector == 0;
}

std::optional<Geometry> Builder::lay_out(const at::DimVector& strides) {
  const at::IntArrayRef sizes = sizes_;
  Geometry geometry = {sizes_, {strides}};
  int64_t groups = 0;
  for (Leaf& leaf : leaves_) {
    std::optional<at::DimVector> along;
    if (leaf.place == Place::table) {
      along = at::DimVector(sizes.size(), 0);
    } else if (leaf.place == Place::groups) {
      groups = leaf.tensor.size(1);
      along = at::DimVector(sizes.size(), 0);
      (*along)[0] = leaf.tensor.stride(0);
    } else if (leaf.is_bits) {
      along = strides_along(sizes, leaf.value->sizes, leaf.value->strides, leaf.place);
    } else {
      if (leaf.tensor.sizes() == sizes && leaf.tensor.is_non_overlapping_and_dense() &&
          !agree(sizes, leaf.tensor.strides(), strides) && !has_rows_of(leaf.tensor.strides(), sizes, strides)) {
        // Elements in another order would be read one by one.
        leaf.tensor = empty_strided(leaf.tensor, leaf.tensor.scalar_type(), sizes, strides).copy_(leaf.tensor);
      }
      along = strides_along(sizes, leaf.tensor.sizes(), leaf.tensor.strides(), leaf.place);
    }
    if (!along) {
      return std::nullopt;
    }
    geometry.strides.push_back(*along);
  }
  if (groups > 0) {
    geometry.split(1, sizes[1] / groups);
    for (size_t k = 0; k < leaves_.size(); ++k) {
      if (leaves_[k].place == Place::groups) {
        geometry.strides[k + 1][1] = leaves_[k].tensor.stride(1);
      }
    }
  }
  return geometry;
}

std::optional<at::Tensor> Builder::run(bool needs_form) {
  if ((root_->device->is_cpu() && flushes_subnormals()) || c10::multiply_integers(sizes_) == 0 || !read_leaves()) {
    return std::nullopt;
  }
  const auto strides = output_strides();
  const auto geometry = strides ? lay_out(*strides) : std::nullopt;
  if (!geometry) {
    return std::nullopt;
  }
  Program program = {};
  program.operands = static_cast<int>(leaves_.size());
  program.instructions = static_cast<int>(instructions_.size());
  std::copy(instructions_.begin(), instructions_.end(), program.instruction);
  for (size_t k = 0; k < leaves_.size(); ++k) {
    program.operand[k].data = leaves_[k].tensor.const_data_ptr();
    program.operand[k].element = leaves_[k].is_bits ? Element::bit : element_of(leaves_[k].tensor.scalar_type());
  }
  if (!geometry->write(&program)) {
    return std::nullopt;
  }
  // Not a view, which would be one that was made without grad mode.
  const at::Tensor output = empty_strided(
      like_, root_->dtype, root_->sizes, is_reshaped() ? c10::contiguous_strides(root_->sizes) : at::DimVector(*strides));
  program.output = output.data_ptr();
  program.element = element_of(root_->dtype);
  return launch(program, output, needs_form) ? std::optional(output) : std::nullopt;
}

}  // namespace

Element element_of(at::ScalarType dtype) {
  return dtype == at::kHalf ? Element::float16 : dtype == at::kBFloat16 ? Element::bfloat16 : Element::float32;
}

std::optional<at::Tensor> compute_fused(Value& recipe, bool is_alone, bool needs_form) {
  if (!has_kernels(*recipe.device)) {
    return std::nullopt;
  }
  Builder builder(recipe);
  return builder.append_root() && (is_alone || builder.is_worth_it()) ? builder.run(needs_form) : std::nullopt;
}

at::Tensor contiguous(const at::Tensor& tensor) {
  Value copy;
  copy.formula = formulas().same;
  copy.operands = {keep(tensor)};
  copy.set_layout(tensor.scalar_type(), tensor.device(), tensor.sizes(), c10::contiguous_strides(tensor.sizes()));
  const bool is_in_rows = tensor.is_cuda() && has_rows_of(tensor.strides(), copy.sizes, copy.strides);
  std::optional<at::Tensor> result = is_in_rows ? compute_fused(copy, /*is_alone=*/true) : std::nullopt;
  return result ? *std::move(result) : tensor.contiguous();
}

std::optional<at::Tensor> compute_gradient(
    Value& input, const at::Tensor& grad, Opcode opcode, const at::Tensor& factors, bool is_alone, bool as_input) {
  const auto strides = input.strides_of();
  const at::ScalarType dtype = input.dtype_of(), of_grad = grad.scalar_type();
  const bool is_served = opcode == Opcode::gradient ? is_half(dtype) && of_grad == dtype
                                                    : dtype == at::kFloat && is_float_or_half(of_grad) && !grad.is_cpu();
  if (!strides || grad.sizes() != input.sizes_of() || !is_served) {
    return std::nullopt;
  }
  input.check_unwritten();
  Value gradient;
  gradient.set_layout(
      dtype, grad.device(), grad.sizes(),
      as_input ? at::DimVector(*strides) : elementwise_strides(grad.sizes(), grad.strides(), *strides));
  if (!agree(grad.sizes(), gradient.strides, *strides)) {
    return std::nullopt;  // elements in two orders: the input, once written, is read faster
  }
  const py::object incoming = keep(grad);
  const py::object table = factors.defined() ? keep(factors) : py::none();
  Builder builder(gradient);
  const bool is_appended =
      builder.append_gradient(input, value_of(incoming), opcode, factors.defined() ? &value_of(table) : nullptr, is_alone);
  return is_appended ? builder.run() : std::nullopt;
}

}  // namespace fastact::recipes
