#include "nodes.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_group_norm_backward.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <tuple>
#include <utility>

#include "../../../recipes/group_norm.h"
#include "../../../torch_version.h"
#include "../../devices.h"
#include "../../dispatch.h"
#include "../../dtypes.h"
#include "../../node.h"
#include "../element.h"
#include "../verification.h"
#include "answers.h"
#include "casts.h"
#include "norms.h"

namespace fastact::recipes {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;
using torch::autograd::generated::NativeGroupNormBackward0;

// What a norm's gradients are made of, beside the incoming one, which may be in a half type, as the input, if the norm is in
// float32.
struct GroupNormSaved {
  at::ScalarType dtype;
  int64_t samples, channels, plane, groups;
  at::Tensor input, weight, mean, rstd;

  bool is_served(const at::Tensor& grad) const;
  bool fits(const at::Tensor& grad, Needed needed) const;
  variable_list by_kernel(const at::Tensor& grad, Needed needed) const;
  variable_list by_ops(const at::Tensor& grad, Needed needed) const;

 private:
  bool passes_trial(const at::Tensor& grad, Needed needed, int64_t some_samples, int64_t some_plane) const;
};

bool GroupNormSaved::is_served(const at::Tensor& grad) const {
  const auto is_one = [&](const at::Tensor& tensor) {
    return tensor.device() == grad.device() && tensor.scalar_type() == dtype && is_in_vectors(tensor);
  };
  return are_in_vectors(grad, input, dtype) && (!weight.defined() || is_one(weight)) && is_one(mean) && is_one(rstd) &&
         0 < grad.numel() && grad.numel() <= std::numeric_limits<int>::max() && plane % GroupNormGradient::kVector == 0 &&
         channels / groups <= GroupNormGradient::kMostChannels;
}

variable_list GroupNormSaved::by_kernel(const at::Tensor& grad, Needed needed) const {
  const auto options = input.options().dtype(dtype);
  at::Tensor grad_input = at::empty_like(input, LEGACY_CONTIGUOUS_MEMORY_FORMAT);
  at::Tensor grad_weight = needed[1] ? at::empty({channels}, options) : at::Tensor();
  at::Tensor grad_bias = needed[2] ? at::empty({channels}, options) : at::Tensor();
  GroupNormGradient norm = {};
  norm.samples = static_cast<int>(samples);
  norm.channels = static_cast<int>(channels);
  norm.groups = static_cast<int>(groups);
  norm.plane = static_cast<int>(plane);
  norm.grad_element = element_of(grad.scalar_type());
  norm.input_element = element_of(input.scalar_type());
  norm.weight_element = element_of(dtype);
  norm.grad = grad.const_data_ptr();
  norm.input = input.const_data_ptr();
  norm.mean = mean.const_data_ptr();
  norm.rstd = rstd.const_data_ptr();
  norm.weight = weight.defined() ? weight.const_data_ptr() : nullptr;
  norm.grad_input = grad_input.mutable_data_ptr();
  norm.grad_weight = needed[1] ? grad_weight.mutable_data_ptr() : nullptr;
  norm.grad_bias = needed[2] ? grad_bias.mutable_data_ptr() : nullptr;
  const at::Tensor scratch = at::empty({norm.scratch_floats()}, options.dtype(at::kFloat));
  norm.scratch = scratch.mutable_data_ptr<float>();
  Cuda::launch(input, [&](cuda::Stream stream) { return cuda::run(norm, stream); });
  return {grad_input, grad_weight, grad_bias};
}

variable_list GroupNormSaved::by_ops(const at::Tensor& grad, Needed needed) const {
  auto [grad_input, grad_weight, grad_bias] = at::native_group_norm_backward(
      grad.to(dtype), input.to(dtype), mean, rstd, weight, samples, channels, plane, groups, needed);
  return {grad_input.to(input.scalar_type()), grad_weight, grad_bias};
}

// Whether the kernel gives the ops' bits for other numbers: a model's first gradients don't tell, since they are often zero.
bool GroupNormSaved::passes_trial(const at::Tensor& grad, Needed needed, int64_t some_samples, int64_t some_plane) const {
  GroupNormSaved trial = *this;
  trial.samples = some_samples;
  trial.plane = some_plane;
  trial.input = some_like(input, {some_samples, channels, some_plane}, 1);
  trial.weight = some_like(weight, {channels}, 2);
  trial.mean = some_like(mean, {some_samples, groups}, 3);
  trial.rstd = some_like(rstd, {some_samples, groups}, 4);
  return repeats_ops(some_like(grad, {some_samples, channels, some_plane}, 5), trial, needed);
}

// What decides whether the kernel gives the ops' bits, beside the numbers.
using GroupNormConfiguration = std::tuple<
    int64_t, int64_t, int64_t, int64_t, at::ScalarType, at::ScalarType, at::ScalarType, bool, bool, bool, c10::DeviceIndex>;

// Whether it does, as found when such gradients were first wanted.
bool GroupNormSaved::fits(const at::Tensor& grad, Needed needed) const {
  static auto& verdicts = *new Verdicts<GroupNormConfiguration>();
  const GroupNormConfiguration configuration = {
      samples, channels,         plane,     groups,    grad.scalar_type(),   input.scalar_type(),
      dtype,   weight.defined(), needed[1], needed[2], grad.device().index()};
  return verdicts.find(configuration, grad.device(), [&] {
    constexpr int64_t few_samples = 2;
    return passes_trial(grad, needed, std::min(samples, few_samples), plane) &&
           passes_trial(grad, needed, samples, GroupNormGradient::kVector) && repeats_ops(grad, *this, needed);
  });
}

class GroupNormPreHook : public NormPreHook {
 public:
  explicit GroupNormPreHook(NativeGroupNormBackward0& node) : node_(node) {}

  variable_list operator()(const variable_list& grads) override {
    const Needed needed = needed_of(node_);
    const bool has_others = grads[1].defined() || grads[2].defined();  // of the statistics
    if (!may_answer(node_, grads[0]) || has_others || !needed[0] || !is_read_in_order(grads[0])) {
      return decline(node_, grads);
    }
    const at::Tensor grad = grads[0].contiguous();  // as the op does
    const GroupNormSaved saved = saved_by(half_of_cast_before(node_));
    return answer_with(grad, saved, needed, grads.size());
  }

 private:
  static int64_t int_of(const c10::SymInt& symbol) { return symbol.guard_int(__FILE__, __LINE__); }

  // Whether the op reads the gradient and the input in the order of their dimensions, as the kernel does.
  bool is_read_in_order(const at::Tensor& grad) {
    const auto has_order = [](const py::object& input) {
      const auto strides = input ? value_of(input).strides_of() : std::nullopt;
      return strides && *strides == at::IntArrayRef(c10::contiguous_strides(value_of(input).sizes_of()));
    };
    return kGroupNormIsGivenContiguous || (grad.is_contiguous() && with_value(node_, node_.input_, has_order));
  }

  // What the norm has saved, read as the node itself does, but the input in its half type if that is wanted.
  GroupNormSaved saved_by(at::ScalarType half) {
    const at::Tensor input = saved_in_half(node_, node_.input_, half);
    const std::lock_guard<std::mutex> lock(mutex_of(node_));
    const NodePointer pointer = pointer_to(&node_);
    return {
        dtype_of_output(node_),
        int_of(node_.N),
        int_of(node_.C),
        int_of(node_.HxW),
        node_.group,
        (input.defined() ? input : node_.input_.unpack()).contiguous(),
        node_.weight_.unpack(),
        node_.result1_.unpack(pointer),
        node_.result2_.unpack(pointer)};
  }

  NativeGroupNormBackward0& node_;
};

}  // namespace

void add_group_norm_hooks(Node& node) {
  auto* const norm = as<NativeGroupNormBackward0>(&node);
  if (norm && has_output_on_gpu(node) && is_float_or_half(dtype_of_output(node))) {
    add_hooks<GroupNormPreHook>(*norm);
    add_clone_hooks(node);
  }
}

}  // namespace fastact::recipes
