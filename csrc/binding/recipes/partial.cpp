#include "partial.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include "../../mask.h"
#include "../bits/launch.h"
#include "../dispatch.h"
#include "../dtypes.h"
#include "../family.h"
#include "derivation.h"
#include "formulas.h"
#include "gradients/answers.h"
#include "gradients/gradients.h"
#include "hook.h"

namespace fastact::recipes {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using namespace torch::autograd::generated;

// What a node of one of these classes has saved of its op's input, or null.
template <class... Nodes>
const SavedVariable* input_of(Node* node) {
  const SavedVariable* result = nullptr;
  const auto look_at = [&](const auto* found) { result = found ? &found->self_ : result; };
  (look_at(as<Nodes>(node)), ...);
  return result;
}

// Those that read it for its shape alone: losses and gather, and pooling.
const SavedVariable* input_of_loss(Node* node) {
  return input_of<NllLossBackward0, NllLoss2DBackward0, GatherBackward0>(node);
}

const SavedVariable* input_of_pooling(Node* node) {
  return input_of<
      MaxPool2DWithIndicesBackward0, MaxPool3DWithIndicesBackward0, AdaptiveMaxPool2DBackward0, AdaptiveMaxPool3DBackward0,
      AvgPool2DBackward0, AvgPool3DBackward0, AdaptiveAvgPool2DBackward0, AdaptiveAvgPool3DBackward0>(node);
}

// Whether a node has saved this value there.
bool is_saved_as(const SavedVariable* saved, py::handle value) {
  return saved && value_behind(*saved).is(value);
}

// The mask that this package's ReLU makes of a ReLU's output, which it writes anew.
at::Tensor mask_of(py::handle hook, const at::Tensor& result) {
  if (is_dry_run(hook)) {
    return result.new_empty({mask_bytes(result.numel())}, at::kByte);
  }
  return std::get<1>(
      kHasCuda && result.is_cuda() ? packed_inplace_with_mask<ReluOp, Cuda>(result)
                                   : packed_inplace_with_mask<ReluOp, Cpu>(result));
}

// Where the gradient of a ReLU passes.
py::object ones_of_relu(py::handle hook, const at::Tensor& result) {
  const py::object bits = keep(mask_of(hook, result));
  const py::object unpacked = recipe_of(ConfigurationOf::mask, NAME("bits"), formulas().unpack_mask, bits, {}, result);
  value_of(unpacked).dtype = at::kBool;
  return recipe_of(
      ConfigurationOf::partial, NAME("signs"), formulas().cast, unpacked, {dtype_object(result.scalar_type())}, result);
}

py::object zeros_of_shape(const at::Tensor& tensor) {
  const py::object zero = keep(tensor.new_zeros({}));
  return recipe_of(
      ConfigurationOf::partial, NAME("shape"), formulas().expand, zero, {py::tuple(py::cast(tensor.sizes().vec()))}, tensor);
}

}  // namespace

at::Tensor shape_for_running_node(py::handle object) {
  const auto node = torch::autograd::get_current_node();
  const bool is_of_loss = is_saved_as(input_of_loss(node.get()), object);
  if (!is_of_loss && !is_saved_as(input_of_pooling(node.get()), object)) {
    return {};
  }
  Value& value = value_of(object);
  const auto strides = value.strides_of();
  const bool may_be_seen = are_ops_seen() || is_hooked(*node);
  if (!strides || may_be_seen || value.follows_from_outside() || !has_kernels(*value.device_of())) {
    return {};
  }
  at::Tensor result = at::empty({0}, at::dtype(value.dtype_of()).device(*value.device_of()));  // as FSDP frees a parameter's
  result.unsafeGetTensorImpl()->set_sizes_and_strides(value.sizes_of(), *strides);
  // The ops copy what isn't contiguous, pooling in either layout.
  const bool is_taken = result.is_contiguous(is_of_loss ? at::MemoryFormat::Contiguous : result.suggest_memory_format());
  return is_taken ? result : at::Tensor();
}

void let_input_go(py::handle hook, Node& node, const at::Tensor& output) {
  const SavedVariable* const saved = input_of_pooling(&node);
  const py::object object = saved ? value_behind(*saved) : py::object();
  if (!object || !is_held_alone(value_of(object), hook)) {
    return;
  }
  Value& value = value_of(object);
  if (!value.held.is_non_overlapping_and_dense() || !has_kernels(value.held.device()) || value.is_private || value.norm_call) {
    return;
  }
  const auto* const relu = as<ReluBackward0>(node.next_edge(0).function.get());
  const bool is_of_relu = relu && kernels_take(value.held.scalar_type()) && is_saved_as(&relu->result_, object);
  const int64_t kept = static_cast<int64_t>(output.nbytes()) + (is_of_relu ? mask_bytes(value.held.numel()) : 0);
  if (value.readers != 1 + is_of_relu || kept >= static_cast<int64_t>(value.held.nbytes())) {
    return;
  }
  const at::NoGradGuard no_grad;
  const at::Tensor input = value.tensor();  // which another stream may have made
  const py::object standing_in = is_of_relu ? ones_of_relu(hook, input) : zeros_of_shape(input);
  value.become(value_of(standing_in), input, value_of(standing_in).source);
  if (is_of_relu) {
    add_signs_hook(*node.next_edge(0).function);
  }
  value.is_partial = true;
}

at::Tensor signs_of(Value& value, const at::Tensor& grad) {
  if (!value.is_partial || grad.scalar_type() != value.dtype || grad.strides() != at::IntArrayRef(value.strides)) {
    return {};
  }
  value.check_unwritten();
  return value_of(value_of(value.operands[0]).operands[0]).tensor();
}

}  // namespace fastact::recipes
