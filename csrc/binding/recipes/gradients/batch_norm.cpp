#include "nodes.h"

#include <ATen/ops/batch_norm_elemt.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/ops/where.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "../../../mask.h"
#include "../../../recipes/batch_norm.h"
#include "../../bits/autograd.h"
#include "../../devices.h"
#include "../../dispatch.h"
#include "../../dtypes.h"
#include "../../node.h"
#include "../computing.h"
#include "../element.h"
#include "../formulas.h"
#include "../masks.h"
#include "../python.h"
#include "../verification.h"
#include "answers.h"
#include "norms.h"

namespace fastact::recipes {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::autograd::generated::NativeBatchNormBackward0;
using torch::autograd::generated::ReluBackward0;

constexpr int64_t kVector = BatchNormGradient::kVector;

// How far apart in memory the channels of a position are: 1, or the size of a plane, where planes are the innermost dimension.
// 0 in other layouts. The tensor isn't empty.
int64_t plane_of(const at::Tensor& tensor) {
  const int64_t dim = tensor.dim();
  if ((dim == 4 && tensor.is_contiguous(at::MemoryFormat::ChannelsLast)) ||
      (dim == 5 && tensor.is_contiguous(at::MemoryFormat::ChannelsLast3d))) {
    return 1;
  }
  const int64_t plane = dim > 1 && tensor.is_contiguous() ? tensor.numel() / (tensor.size(0) * tensor.size(1)) : 0;
  return plane > 1 && tensor.stride(1) == 1 ? 0 : plane;  // the op takes a single channel's stride for channels-last
}

// What a norm's gradients are made of, beside the incoming one. That is of an activation's output if there is a bias, of a ReLU
// behind the norm, or a mask of where another passes it.
struct BatchNormSaved {
  at::Tensor input, weight, mean, invstd, bias, mask;

  int64_t channels() const { return input.size(1); }
  int64_t plane() const { return plane_of(input); }
  int64_t samples() const { return input.numel() / (channels() * plane()); }

  bool is_served(const at::Tensor& grad) const;  // one that may be
  bool fits(const at::Tensor& grad) const;
  variable_list by_kernel(const at::Tensor& grad) const;
  variable_list by_ops(const at::Tensor& grad, Needed needed = {true, true, true}) const;

 private:
  bool passes_trial() const;
};

// Whether the kernel may take a gradient, as far as that tells.
bool may_be_served(const at::Tensor& grad) {
  if (!is_half(grad.scalar_type()) || !grad.is_cuda() || grad.numel() == 0 || grad.numel() > BatchNormGradient::kMostElements) {
    return false;
  }
  const int64_t plane = plane_of(grad);
  return plane > 1 || (plane == 1 && grad.size(1) % kVector == 0);
}

bool BatchNormSaved::is_served(const at::Tensor& grad) const {
  const auto is_here = [&](const at::Tensor& tensor) { return is_plain(tensor) && tensor.device() == grad.device(); };
  const auto has_channels = [&](const at::Tensor& tensor, at::ScalarType dtype) {
    return tensor.scalar_type() == dtype && tensor.dim() == 1 && tensor.size(0) == grad.size(1) && tensor.is_contiguous() &&
           is_here(tensor);
  };
  return is_aligned(grad) && input.scalar_type() == grad.scalar_type() && input.sizes() == grad.sizes() &&
         plane_of(input) == plane_of(grad) && is_here(input) && is_aligned(input) && has_channels(mean, at::kFloat) &&
         is_aligned(mean) && has_channels(invstd, at::kFloat) && is_aligned(invstd) && weight.defined() &&
         (has_channels(weight, at::kFloat) || has_channels(weight, input.scalar_type())) &&
         (!bias.defined() || has_channels(bias, weight.scalar_type()));
}

variable_list BatchNormSaved::by_kernel(const at::Tensor& grad) const {
  const auto format = plane() == 1 ? at::MemoryFormat::Preserve : at::MemoryFormat::Contiguous;  // as the op
  variable_list result = {at::empty_like(input, format), at::empty_like(weight), at::empty_like(weight)};
  BatchNormGradient norm = {};
  norm.samples = static_cast<int>(samples());
  norm.channels = static_cast<int>(channels());
  norm.plane = static_cast<int>(plane());
  norm.element = element_of(input.scalar_type());
  norm.grad = grad.const_data_ptr();
  norm.input = input.const_data_ptr();
  norm.mean = mean.const_data_ptr<float>();
  norm.invstd = invstd.const_data_ptr<float>();
  norm.weight = weight.const_data_ptr();
  norm.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  norm.mask = mask.defined() ? mask.const_data_ptr<uint8_t>() : nullptr;
  norm.has_float_weight = weight.scalar_type() == at::kFloat;
  norm.grad_input = result[0].mutable_data_ptr();
  norm.grad_weight = result[1].mutable_data_ptr();
  norm.grad_bias = result[2].mutable_data_ptr();
  const at::Tensor scratch = at::empty({cuda::scratch_floats(norm)}, mean.options());
  norm.scratch = scratch.mutable_data_ptr<float>();
  Cuda::launch(input, [&](cuda::Stream stream) { return cuda::run(norm, stream); });
  return result;
}

variable_list BatchNormSaved::by_ops(const at::Tensor& grad, Needed needed) const {
  constexpr double no_eps = 0;  // with 1/std, and in training, it isn't read; nor are running statistics
  at::Tensor of_norm = grad;
  if (bias.defined()) {
    of_norm = at::threshold_backward(grad, at::batch_norm_elemt(input, weight, bias, mean, invstd, no_eps).relu_(), 0);
  } else if (mask.defined()) {
    of_norm = at::where(unpack_mask(mask, grad.sizes(), grad.strides()), grad, 0);
  }
  auto [grad_input, grad_weight, grad_bias] =
      at::native_batch_norm_backward(of_norm, input, weight, {}, {}, mean, invstd, /*train=*/true, no_eps, needed);
  return {grad_input, grad_weight, grad_bias};
}

// Whether the kernel gives the ops' bits for as many elements of other numbers: a model's first gradients don't tell, since
// they are often zero.
bool BatchNormSaved::passes_trial() const {
  constexpr int64_t tile = 32, enough = 1 << 18;  // channels that both treat alike; numbers that tell
  const int64_t of_channel = samples() * plane();
  const int64_t many = std::max(std::min(channels(), tile), plane() == 1 ? 0 : enough / of_channel);
  const int64_t sizes[] = {samples(), many, plane()};
  int64_t seed = 0;
  const auto some = [&](const at::Tensor& of, at::IntArrayRef sizes) { return some_numbers(sizes, of.options(), ++seed); };
  BatchNormSaved trial = {some(input, sizes), some(weight, {many}), some(mean, {many}), some(invstd, {many})};
  const at::Tensor grad = some(input, sizes);
  if (bias.defined()) {
    trial.bias = some(bias, {many});
  } else if (mask.defined()) {
    trial.mask = some(input, {mask_bytes(grad.numel())}).view(at::kByte);
  }
  return repeats_ops(grad, trial);
}

// What decides whether the kernel gives the ops' bits, beside the numbers.
using BatchNormConfiguration =
    std::tuple<int64_t, int64_t, int64_t, at::ScalarType, at::ScalarType, bool, bool, c10::DeviceIndex>;

// Whether it does, as found when such gradients were first wanted.
bool BatchNormSaved::fits(const at::Tensor& grad) const {
  static auto& verdicts = *new Verdicts<BatchNormConfiguration>();
  const BatchNormConfiguration configuration = {
      samples(),
      channels(),
      plane(),
      input.scalar_type(),
      weight.scalar_type(),
      bias.defined(),
      mask.defined(),
      input.device().index()};
  return verdicts.find(configuration, grad.device(), [&] { return passes_trial() && repeats_ops(grad, *this); });
}

// Whether what a node has saved may be read, and again by the node: the hooks around the scope may give a tensor back once.
bool may_be_read_twice(Node& node, const SavedVariable& saved) {
  return with_value(node, saved, [](const py::object& value) { return value && !value_of(value).follows_from_outside(); });
}

// What a norm has saved, read as the node itself does.
BatchNormSaved saved_by(NativeBatchNormBackward0& norm) {
  const std::lock_guard<std::mutex> lock(mutex_of(norm));
  const NodePointer pointer = pointer_to(&norm);
  norm.running_mean_.unpack();  // for the hooks outside, which wait to give them back
  norm.running_var_.unpack();
  return {norm.input_.unpack(), norm.weight_.unpack(), norm.result1_.unpack(pointer), norm.result2_.unpack(pointer), {}, {}};
}

// The recipe behind an object, if it is this instruction alone.
const Value* operation(const py::object& object, Opcode opcode) {
  if (!object || !is_value(object) || !value_of(object).is_recipe()) {
    return nullptr;
  }
  const Value& value = value_of(object);
  const auto& program = facts_of(value.formula).program;
  return program && program->size() == 1 && (*program)[0].opcode == opcode ? &value : nullptr;
}

// The bias of the norm before a ReLU, if the recipe of the ReLU's output is made of that norm by the kernel's formula; or none.
at::Tensor bias_before(ReluBackward0& relu) {
  return with_value(relu, relu.result_, [](const py::object& output) {
    const Value* const clamp = operation(output, Opcode::clamp);
    const Value* const norm = clamp ? operation(clamp->operands[0], Opcode::batch_norm) : nullptr;
    if (!norm || !is_value(norm->operands[2])) {
      return at::Tensor();
    }
    const Reading reading;
    value_of(output).check_unwritten();
    return value_of(norm->operands[2]).tensor();
  });
}

class BatchNormPreHook : public PreHook {
 public:
  explicit BatchNormPreHook(NativeBatchNormBackward0& node) : node_(node) {}

  variable_list operator()(const variable_list& grads) override {
    const at::Tensor& grad = grads[0];
    if (auto given = take(grad)) {
      return answer(*std::move(given), grads.size());
    }
    const Needed needed = needed_of(node_);
    if (!may_answer(node_, grad) || !may_be_served(grad) || !needed[0]) {
      return grads;
    }
    const BatchNormSaved saved = saved_by(node_);
    return answer(saved.is_served(grad) && saved.fits(grad) ? saved.by_kernel(grad) : saved.by_ops(grad, needed), grads.size());
  }

  // The results of this pass, from the activation's hook: what reaches the norm is the gradient of its input already.
  void give(const variable_list& results) {
    const std::lock_guard<std::mutex> lock(mutex_);
    given_.push_back(
        {torch::autograd::get_current_graph_task_id(), c10::weak_intrusive_ptr<c10::TensorImpl>(results[0].getIntrusivePtr()),
         results[1], results[2]});
  }

 private:
  // Holds no gradient of an input, which a pass that fails would leave here.
  struct Given {
    int task;
    c10::weak_intrusive_ptr<c10::TensorImpl> grad_input;
    at::Tensor grad_weight, grad_bias;
  };

  std::optional<variable_list> take(const at::Tensor& grad) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int task = torch::autograd::get_current_graph_task_id();
    const auto found = std::find_if(given_.begin(), given_.end(), [&](const Given& each) { return each.task == task; });
    if (found == given_.end()) {
      return std::nullopt;
    }
    const Given given = *found;
    given_.erase(found);
    TORCH_CHECK(
        grad.defined() && given.grad_input._unsafe_get_target() == grad.unsafeGetTensorImpl(),
        "recompute: expected the gradient of a batch norm's output as the activation behind it gave it, got another");
    return variable_list{grad, given.grad_weight, given.grad_bias};
  }

  NativeBatchNormBackward0& node_;
  std::mutex mutex_;
  std::vector<Given> given_;
};

// Computes the results of an activation's node and of the norm before it at once. The activation's node then returns the
// gradient of the norm's input, which the norm's hook recognizes and returns as it is.
class ActivationPreHook : public PreHook {
 public:
  explicit ActivationPreHook(Node& node) : node_(node) {}

  variable_list operator()(const variable_list& grads) override {
    const at::Tensor& grad = grads[0];
    auto& norm = static_cast<NativeBatchNormBackward0&>(*node_.next_edge(0).function);
    auto* const hook = hook_of<BatchNormPreHook>(norm);
    if (!hook || !may_answer(node_, grad) || !may_answer(norm, grad) || !may_be_served(grad) || !passes_unnoticed(node_)) {
      return grads;
    }
    const std::optional<variable_list> results = of_both(norm, grad);
    if (!results) {
      return grads;
    }
    hook->give(*results);
    return answer({(*results)[0]}, grads.size());
  }

 private:
  // None where each node is to compute its own.
  std::optional<variable_list> of_both(NativeBatchNormBackward0& norm, const at::Tensor& grad) {
    auto* const masked = dynamic_cast<MaskedNode*>(&node_);
    const auto may_read = [&](const SavedVariable& saved) { return may_be_read_twice(norm, saved); };
    if (!may_read(norm.input_) || !may_read(norm.weight_) || !may_read(norm.result1_) || !may_read(norm.result2_) ||
        (masked && (!selects(*masked, grad) || !may_be_read_twice(node_, masked->mask())))) {
      return std::nullopt;
    }
    BatchNormSaved saved = saved_by(norm);
    if (masked) {
      const std::lock_guard<std::mutex> lock(mutex_of(node_));
      saved.mask = masked->mask().unpack();
    } else {
      saved.bias = bias_before(static_cast<ReluBackward0&>(node_));
    }
    const bool has_either = saved.bias.defined() || (masked && saved.mask.scalar_type() == at::kByte && is_plain(saved.mask));
    return has_either && saved.is_served(grad) && saved.fits(grad) ? std::optional(saved.by_kernel(grad)) : std::nullopt;
  }

  // Whether the mask, in the order of the gradient, only selects from it.
  static bool selects(const MaskedNode& node, const at::Tensor& grad) {
    const Slopes slopes = node.slopes();
    return slopes.inside == 1 && slopes.outside == 0 && node.mask_strides() == grad.sym_strides();
  }

  Node& node_;
};

bool has_half_output_on_gpu(const Node& node) {
  return has_output_on_gpu(node) && is_half(dtype_of_output(node));
}

}  // namespace

void add_batch_norm_hooks(Node& node) {
  auto* const norm = has_half_output_on_gpu(node) ? as<NativeBatchNormBackward0>(&node) : nullptr;
  if (norm && norm->training) {
    add_hooks<BatchNormPreHook>(*norm);
  }
}

void add_activation_hooks(Node& node) {
  if (has_half_output_on_gpu(node) && (as<ReluBackward0>(&node) || typeid(node) == node_type()) && node.num_outputs() == 1 &&
      as<NativeBatchNormBackward0>(node.next_edge(0).function.get())) {
    add_hooks<ActivationPreHook>(node);
  }
}

}  // namespace fastact::recipes
