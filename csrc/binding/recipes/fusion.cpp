#include "fusion.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/tensor.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <utility>

#include "../devices.h"
#include "../dispatch.h"
#include "../dtypes.h"
#include "../strides.h"
#include "constant.h"
#include "element.h"
#include "formulas.h"
#include "lowering.h"
#include "python.h"
#include "tabulation.h"
#include "tiling.h"

namespace fastact::recipes {
namespace {

// Whether the CPU takes subnormals for zero, which tables and conversions know nothing of.
bool flushes_subnormals() {
  volatile float subnormal = 1e-40f;
  return subnormal * 1.0f == 0.0f;
}

using Leaf = Lowered::Leaf;

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

// Both are false if the output isn't computed, e.g. since that needs a form and there is none.
bool launch(const Program& program, const at::Tensor& output, bool needs_form) {
  bool is_run = true;
  if (kHasCuda && output.is_cuda()) {
    Cuda::launch(output, [&](cuda::Stream stream) { return cuda::run(program, stream, needs_form, &is_run); });
  } else {
    Cpu::launch(output.numel(), 1, [&](int64_t begin, int64_t end) { cpu::run(program, begin, end); });
  }
  return is_run;
}

// Whether all that it reads lies as its output does, and is of its dtype.
bool reads_in_order(const Program& program) {
  return program.dims == 1 && std::all_of(program.operand, program.operand + program.operands, [&](const auto& operand) {
           return operand.stride[0] == 1 && operand.element == program.element;
         });
}

// By a table of its first instructions, where that is faster.
bool launch_with_table(const Program& program, const at::Tensor& output, bool needs_form) {
  const int instructions = tabulated_instructions(program, output.device());
  if (instructions > 0 && output.is_cuda() && launch(program, output, /*needs_form=*/true)) {
    return true;
  }
  auto of_table = instructions > 0 ? program_of_table(program, instructions, output.device()) : std::nullopt;
  if (!of_table) {
    return launch(program, output, needs_form);
  }
  const at::Tensor table = empty_strided(output, at::kShort, kNumbersOfHalf, 1);
  of_table->output = table.data_ptr();
  return launch(*of_table, table, /*needs_form=*/false) &&
         launch(with_table(program, instructions, table.const_data_ptr()), output, needs_form);
}

// An operand of a program that counts in other sizes than its reader's, as one of those sizes.
std::optional<at::Tensor> viewed(const at::Tensor& tensor, at::IntArrayRef from, at::IntArrayRef sizes) {
  return tensor.sizes() == from && tensor.is_contiguous() ? std::optional(tensor.view(sizes)) : std::nullopt;
}

// The same where its dimensions are in another order.
at::Tensor permuted(const at::Tensor& tensor, const Leaf& leaf) {
  const size_t dims = leaf.order.size(), outer = dims - tensor.dim();  // dimensions that it lacks
  at::DimVector sizes(dims, 1), strides(dims, 0);
  for (size_t dim = outer; dim < dims; ++dim) {
    sizes[leaf.order[dim]] = tensor.size(dim - outer);
    strides[leaf.order[dim]] = tensor.stride(dim - outer);
  }
  return tensor.as_strided(sizes, strides);
}

// What the halves are multiplied by.
Constant& signs() {
  static auto& constant = *new Constant([] { return at::tensor({-1.0f, 1.0f}); });
  return constant;
}

// Runs a lowered recipe on the tensors of its leaves.
class Run {
 public:
  explicit Run(const Lowered& lowered)
      : lowered_(lowered), tensors_(lowered.leaves.size()), offsets_(lowered.leaves.size(), 0) {}

  // The output, or none where it is to be computed by PyTorch's ops.
  std::optional<at::Tensor> operator()(bool needs_form);

 private:
  // The steps: the leaves' tensors, if they fit together; the output's strides; those of all that is read.
  bool read_leaves();
  c10::SmallVector<int, 4> half_parameters() const;
  std::optional<at::DimVector> output_strides() const;
  std::optional<Geometry> lay_out(const at::DimVector& strides);
  bool swap_halves(Geometry& geometry);
  std::optional<at::Tensor> compute(bool needs_form);

  const Lowered& lowered_;
  c10::SmallVector<at::Tensor, 8> tensors_;  // of the leaves
  c10::SmallVector<int64_t, 8> offsets_;     // of what the output's first element is computed from
  at::Tensor like_, dense_leaf_;             // the first leaf, and the first of the program's sizes that is dense
};

bool Run::read_leaves() {
  const at::IntArrayRef sizes = lowered_.sizes;
  for (size_t k = 0; k < tensors_.size(); ++k) {
    const Leaf& leaf = lowered_.leaves[k];
    if (!leaf.value) {
      continue;
    }
    at::Tensor& tensor = tensors_[k];
    tensor = (leaf.is_bits ? value_of(leaf.value->operands[0]) : *leaf.value).tensor();
    like_ = like_.defined() ? like_ : tensor;
    if (tensor.device() != like_.device() || !is_plain(tensor)) {
      return false;
    }
    if (leaf.place == Place::table) {
      continue;
    }
    if (!leaf.order.empty()) {
      tensor = permuted(tensor, leaf);
    } else if (leaf.reader->sizes != lowered_.sizes) {
      const auto view = leaf.is_bits ? std::nullopt : viewed(tensor, leaf.reader->sizes, sizes);
      if (!view) {
        return false;
      }
      tensor = *view;
    }
    if (!dense_leaf_.defined() && !leaf.is_bits && tensor.sizes() == sizes && tensor.is_non_overlapping_and_dense()) {
      dense_leaf_ = tensor;
    }
  }
  for (size_t k = 0; k < tensors_.size(); ++k) {
    if (lowered_.leaves[k].value) {
      continue;
    }
    if (lowered_.leaves[k].place == Place::halves) {
      tensors_[k] = signs().on(like_.device());
      if (!tensors_[k].defined()) {
        return false;
      }
      continue;
    }
    const Value& recipe = *lowered_.leaves[k].reader;
    const py::object table =
        from_python().table(recipe.formula, tuple_of(recipe.arguments), dtype_object(recipe.dtype), wrapped(like_));
    if (table.is_none()) {
      return false;
    }
    tensors_[k] = THPVariable_Unpack(table.ptr());
  }
  return true;
}

// The norms' parameters and statistics that are in a half type. Under autocast there are none.
c10::SmallVector<int, 4> Run::half_parameters() const {
  c10::SmallVector<int, 4> result;
  for (const Instruction& instruction : lowered_.instructions) {
    for (int r = 0; is_norm(instruction.opcode) && r < references_of(instruction.opcode); ++r) {
      const int k = instruction.reference[r].operand;
      if (k >= 0 && is_half(tensors_[k].scalar_type())) {
        result.push_back(k);
      }
    }
  }
  return result;
}

std::optional<at::DimVector> Run::output_strides() const {
  const Value& root = *lowered_.root;
  const at::IntArrayRef sizes = lowered_.sizes;
  const at::DimVector in_order = c10::contiguous_strides(sizes);
  if (lowered_.is_reshaped()) {
    const bool is_in_order = !root.has_strides || root.strides == c10::contiguous_strides(root.sizes);
    return is_in_order ? std::optional(in_order) : std::nullopt;
  }
  if (root.has_strides) {
    return is_dense(sizes, root.strides) ? std::optional(root.strides) : std::nullopt;
  }
  if (root.strides_of_output) {
    const at::DimVector& strides = *root.strides_of_output;
    return is_dense(sizes, strides) ? std::optional(strides) : std::nullopt;
  }
  return dense_leaf_.defined() ? at::DimVector(dense_leaf_.strides()) : in_order;
}

// Whether the elements of a whole row of the output lie beside each other in an operand too.
bool has_rows_of(at::IntArrayRef operand, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const at::DimVector dims = inner_to_outer(sizes, strides);
  return !dims.empty() && operand[dims[0]] == 1 && sizes[dims[0]] % kElementsOfVector == 0;
}

std::optional<Geometry> Run::lay_out(const at::DimVector& strides) {
  const at::IntArrayRef sizes = lowered_.sizes;
  Geometry geometry = {lowered_.sizes, {strides}};
  int64_t groups = 0;
  for (size_t k = 0; k < tensors_.size(); ++k) {
    const Leaf& leaf = lowered_.leaves[k];
    at::Tensor& tensor = tensors_[k];
    std::optional<at::DimVector> along;
    if (leaf.place == Place::table || leaf.place == Place::halves) {
      along = at::DimVector(sizes.size(), 0);
    } else if (leaf.place == Place::groups) {
      if (groups > 0 && groups != tensor.size(1)) {
        return std::nullopt;  // two norms, whose groups differ
      }
      groups = tensor.size(1);
      along = at::DimVector(sizes.size(), 0);
      (*along)[0] = tensor.stride(0);
    } else if (leaf.is_bits) {
      along = strides_along(sizes, leaf.value->sizes, leaf.value->strides, leaf.place);
    } else {
      if (tensor.sizes() == sizes && tensor.is_non_overlapping_and_dense() && !agree(sizes, tensor.strides(), strides) &&
          !has_rows_of(tensor.strides(), sizes, strides)) {
        // Elements in another order would be read one by one.
        tensor = empty_strided(tensor, tensor.scalar_type(), sizes, strides).copy_(tensor);
      }
      along = strides_along(sizes, tensor.sizes(), tensor.strides(), leaf.place);
    }
    if (!along) {
      return std::nullopt;
    }
    geometry.strides.push_back(*along);
  }
  if (groups > 0) {
    geometry.split(1, sizes[1] / groups);
    for (size_t k = 0; k < tensors_.size(); ++k) {
      if (lowered_.leaves[k].place == Place::groups) {
        geometry.strides[k + 1][1] = tensors_[k].stride(1);
      }
    }
  }
  return swap_halves(geometry) ? std::optional(std::move(geometry)) : std::nullopt;
}

// Splits the last dimension into its halves if some leaf needs that. One whose halves are swapped starts at the second, and has
// a negative stride between them. False if the dimension is in parts already: a group norm's channels, in two dimensions.
bool Run::swap_halves(Geometry& geometry) {
  const auto& leaves = lowered_.leaves;
  if (std::none_of(leaves.begin(), leaves.end(), [](const Leaf& leaf) { return leaf.place == Place::halves; })) {
    return true;
  }
  const size_t last = geometry.sizes.size() - 1;
  if (geometry.sizes[last] != lowered_.sizes.back()) {
    return false;
  }
  geometry.split(last, geometry.sizes[last] / 2);
  for (size_t k = 0; k < leaves.size(); ++k) {
    int64_t& between = geometry.strides[k + 1][last];
    if (leaves[k].place == Place::halves) {
      between = 1;
    } else if (leaves[k].swaps_halves) {
      offsets_[k] = between;
      between = -between;
    }
  }
  return true;
}

std::optional<at::Tensor> Run::operator()(bool needs_form) {
  const bool is_on_cpu = lowered_.root->device->is_cpu();
  if ((is_on_cpu && flushes_subnormals()) || c10::multiply_integers(lowered_.sizes) == 0 || !read_leaves()) {
    return std::nullopt;
  }
  const auto half = is_on_cpu ? c10::SmallVector<int, 4>() : half_parameters();
  if (!half.empty()) {
    if (auto result = compute(/*needs_form=*/true)) {
      return result;
    }
    for (const int k : half) {  // most forms read them in float32
      tensors_[k] = tensors_[k].to(at::kFloat);
    }
  }
  return compute(needs_form);
}

std::optional<at::Tensor> Run::compute(bool needs_form) {
  const Value& root = *lowered_.root;
  const auto strides = output_strides();
  const auto geometry = strides ? lay_out(*strides) : std::nullopt;
  if (!geometry) {
    return std::nullopt;
  }
  Program program = {};
  program.operands = static_cast<int>(tensors_.size());
  program.instructions = static_cast<int>(lowered_.instructions.size());
  program.element = element_of(root.dtype);
  std::copy(lowered_.instructions.begin(), lowered_.instructions.end(), program.instruction);
  for (size_t k = 0; k < tensors_.size(); ++k) {
    const int64_t bytes = offsets_[k] * static_cast<int64_t>(tensors_[k].element_size());
    program.operand[k].data = static_cast<const char*>(tensors_[k].const_data_ptr()) + bytes;
    program.operand[k].element = lowered_.leaves[k].is_bits ? Element::bit : element_of(tensors_[k].scalar_type());
  }
  if (!geometry->write(&program)) {
    return std::nullopt;
  }
  if (lowered_.is_one_op && reads_in_order(program)) {
    return std::nullopt;
  }
  c10::SmallVector<at::Tensor, 4> columns;  // until the kernel is queued
  if (!root.device->is_cpu()) {
    columns = join_rows(&program, tensors_);
  }
  // Not a view, which would be one that was made without grad mode.
  const at::Tensor output = empty_strided(
      like_, root.dtype, root.sizes, lowered_.is_reshaped() ? c10::contiguous_strides(root.sizes) : at::DimVector(*strides));
  program.output = output.data_ptr();
  return launch_with_table(program, output, needs_form || lowered_.is_one_op) ? std::optional(output) : std::nullopt;
}

}  // namespace

std::optional<at::Tensor> compute_fused(Value& recipe, bool force, bool needs_form) {
  if (!has_kernels(*recipe.device)) {
    return std::nullopt;
  }
  auto lowered = lower(recipe, force, /*may_pass_over_shared=*/true);
  if (lowered && lowered->passes_over_shared) {
    if (auto result = Run(*lowered)(/*needs_form=*/true)) {
      return result;
    }
    lowered = lower(recipe, force, /*may_pass_over_shared=*/false);
  }
  const bool is_left = lowered && lowered->is_one_op && needs_form;  // to PyTorch's node, whose gradient it is
  return lowered && !is_left ? Run(*lowered)(needs_form) : std::nullopt;
}

namespace {

// A copy by this package's kernel, if it reads whole rows.
std::optional<at::Tensor> copy_rows(const at::Tensor& tensor, at::ScalarType dtype, at::IntArrayRef strides) {
  if (!tensor.is_cuda() || !has_rows_of(tensor.strides(), tensor.sizes(), strides)) {
    return std::nullopt;
  }
  const py::gil_scoped_acquire gil;
  Value copy;
  copy.formula = formulas().same;
  copy.operands = {keep(tensor)};
  copy.set_layout(dtype, tensor.device(), tensor.sizes(), strides);
  return compute_fused(copy, /*force=*/true, /*needs_form=*/true);
}

}  // namespace

at::Tensor copy_of(const at::Tensor& tensor, at::ScalarType dtype, at::IntArrayRef strides) {
  const auto result = copy_rows(tensor, dtype, strides);
  return result ? *result : at::empty_strided(tensor.sizes(), strides, tensor.options().dtype(dtype)).copy_(tensor);
}

at::Tensor contiguous(const at::Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : copy_of(tensor, tensor.scalar_type(), c10::contiguous_strides(tensor.sizes()));
}

at::Tensor cast_copy(const at::Tensor& tensor, at::ScalarType dtype) {
  const auto strides = tensor.is_non_overlapping_and_dense() ? tensor.strides().vec()
                                                             : at::infer_dense_strides(tensor.sizes(), tensor.strides());
  return copy_of(tensor, dtype, strides);
}

std::optional<at::Tensor> compute_gradient(
    Value& input, const at::Tensor& grad, Opcode opcode, const at::Tensor& factors, bool force, bool as_input) {
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
  const auto lowered =
      lower_instruction(gradient, input, value_of(incoming), opcode, factors.defined() ? &value_of(table) : nullptr, force);
  return lowered ? Run(*lowered)(/*needs_form=*/false) : std::nullopt;
}

std::optional<at::Tensor> compute_addend(Value& value, const at::Tensor& sum, at::ScalarType dtype) {
  if (!has_kernels(sum.device()) || (sum.is_cpu() && flushes_subnormals())) {
    return std::nullopt;
  }
  Value addend;
  addend.set_layout(dtype, sum.device(), sum.sizes(), sum.strides());
  const py::object of_sum = keep(sum);
  const auto compute = [&](Value& from, bool needs_form) {
    const auto lowered = lower_instruction(addend, from, value_of(of_sum), Opcode::addend, nullptr, /*force=*/true);
    return lowered ? Run(*lowered)(needs_form) : std::nullopt;
  };
  auto result = compute(value, /*needs_form=*/true);
  return result ? std::move(result) : compute(value_of(keep(value.tensor())), /*needs_form=*/false);
}

}  // namespace fastact::recipes
