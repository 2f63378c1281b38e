#include "nodes.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <tuple>
#include <utility>

#include "../../../recipes/layer_norm.h"
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
using torch::autograd::generated::NativeLayerNormBackward0;

// What a norm's gradients are made of, beside the incoming one, which may be in a half type, as the input, if the norm is in
// float32.
struct LayerNormSaved {
  at::ScalarType dtype;
  at::DimVector shape;  // of a row
  at::Tensor input, weight, bias, mean, rstd;

  int64_t columns() const { return c10::multiply_integers(shape); }
  int64_t rows() const { return input.numel() / columns(); }

  bool is_served(const at::Tensor& grad) const;
  bool fits(const at::Tensor& grad, Needed needed) const;
  variable_list by_kernel(const at::Tensor& grad, Needed needed) const;
  variable_list by_ops(const at::Tensor& grad, Needed needed) const;

 private:
  bool passes_trial(const at::Tensor& grad, Needed needed, int64_t rows, int64_t columns) const;
};

bool LayerNormSaved::is_served(const at::Tensor& grad) const {
  const auto is_one = [&](const at::Tensor& tensor, at::ScalarType dtype) {
    return tensor.device() == grad.device() && tensor.scalar_type() == dtype && is_in_vectors(tensor);
  };
  return are_in_vectors(grad, input, dtype) && (!weight.defined() || is_one(weight, dtype)) && is_one(mean, at::kFloat) &&
         is_one(rstd, at::kFloat) && 0 < grad.numel() && grad.numel() <= std::numeric_limits<int>::max() &&
         columns() % LayerNormGradient::kMultiple == 0 && columns() <= LayerNormGradient::kMostColumns;
}

variable_list LayerNormSaved::by_kernel(const at::Tensor& grad, Needed needed) const {
  const bool has_sums = needed[1] || needed[2];
  at::Tensor grad_input = at::empty_like(input, LEGACY_CONTIGUOUS_MEMORY_FORMAT), grad_weight, grad_bias, sums;
  LayerNormGradient norm = {};
  norm.rows = static_cast<int>(rows());
  norm.columns = static_cast<int>(columns());
  norm.grad_element = element_of(grad.scalar_type());
  norm.input_element = element_of(input.scalar_type());
  norm.weight_element = element_of(dtype);
  norm.grad = grad.const_data_ptr();
  norm.input = input.const_data_ptr();
  norm.mean = mean.const_data_ptr<float>();
  norm.rstd = rstd.const_data_ptr<float>();
  norm.weight = weight.defined() ? weight.const_data_ptr() : nullptr;
  norm.grad_input = grad_input.mutable_data_ptr();
  LayerNormSums size = {};
  Cuda::launch(input, [&](cuda::Stream stream) {
    if (has_sums) {
      if (const cuda::Error error = cuda::sums_of(norm, &size)) {
        return error;
      }
      const auto options = input.options().dtype(dtype);
      at::DimVector sizes = {2, size.many};
      sizes.append(shape);
      sums = at::empty(sizes, size.are_results ? options : options.dtype(at::kFloat));
      norm.sums = sums.mutable_data_ptr();
      grad_bias = size.are_results ? at::Tensor() : at::empty(shape, options);
      grad_weight = size.are_results ? at::Tensor() : at::empty(shape, options);
      norm.grad_bias = size.are_results ? nullptr : grad_bias.mutable_data_ptr();
      norm.grad_weight = size.are_results ? nullptr : grad_weight.mutable_data_ptr();
    }
    return cuda::run(norm, stream);
  });
  if (size.are_results) {
    grad_bias = sums[0].sum(0);
    grad_weight = sums[1].sum(0);
  }
  return {grad_input, needed[1] ? grad_weight : at::Tensor(), needed[2] ? grad_bias : at::Tensor()};
}

variable_list LayerNormSaved::by_ops(const at::Tensor& grad, Needed needed) const {
  auto [grad_input, grad_weight, grad_bias] =
      at::native_layer_norm_backward(grad.to(dtype), input.to(dtype), shape, mean, rstd, weight, bias, needed);
  return {grad_input.to(input.scalar_type()), grad_weight, grad_bias};
}

// Whether the kernel gives the ops' bits for other numbers: a model's first gradients don't tell, since they are often zero.
bool LayerNormSaved::passes_trial(const at::Tensor& grad, Needed needed, int64_t rows, int64_t columns) const {
  const LayerNormSaved trial = {
      dtype,
      {columns},
      some_like(input, {rows, columns}, 1),
      some_like(weight, {columns}, 2),
      some_like(bias, {columns}, 3),
      some_like(mean, {rows, 1}, 4),
      some_like(rstd, {rows, 1}, 5)};
  return repeats_ops(some_like(grad, {rows, columns}, 6), trial, needed);
}

// What decides whether the kernel gives the ops' bits, beside the numbers.
using LayerNormConfiguration =
    std::tuple<int64_t, int64_t, at::ScalarType, at::ScalarType, at::ScalarType, bool, bool, bool, c10::DeviceIndex>;

// Whether it does, as found when such gradients were first wanted.
bool LayerNormSaved::fits(const at::Tensor& grad, Needed needed) const {
  static auto& verdicts = *new Verdicts<LayerNormConfiguration>();
  const LayerNormConfiguration configuration = {rows(),           columns(), grad.scalar_type(), input.scalar_type(),  dtype,
                                                weight.defined(), needed[1], needed[2],          grad.device().index()};
  return verdicts.find(configuration, grad.device(), [&] {
    constexpr int64_t few_rows = 64;
    const int64_t alike = rows() <= LayerNormGradient::kManyRows ? LayerNormGradient::kTile : columns();
    return passes_trial(grad, needed, std::min(rows(), few_rows), columns()) &&
           passes_trial(grad, needed, rows(), std::min(columns(), alike)) && repeats_ops(grad, *this, needed);
  });
}

class LayerNormPreHook : public NormPreHook {
 public:
  explicit LayerNormPreHook(NativeLayerNormBackward0& node) : node_(node) {}

  variable_list operator()(const variable_list& grads) override {
    const Needed needed = needed_of(node_);
    if (!may_answer(node_, grads[0]) || !needed[0]) {
      return decline(node_, grads);
    }
    const at::Tensor grad = grads[0].contiguous();  // and the input, as the op does
    const LayerNormSaved saved = saved_by(half_of_cast_before(node_));
    return answer_with(grad, saved, needed, grads.size());
  }

 private:
  // What the norm has saved, read as the node itself does, but the input in its half type if that is wanted.
  LayerNormSaved saved_by(at::ScalarType half) {
    const at::Tensor input = saved_in_half(node_, node_.input_, half);
    const std::lock_guard<std::mutex> lock(mutex_of(node_));
    const NodePointer pointer = pointer_to(&node_);
    return {
        dtype_of_output(node_),
        at::DimVector(C10_AS_INTARRAYREF_SLOW(node_.normalized_shape)),
        (input.defined() ? input : node_.input_.unpack()).contiguous(),
        node_.weight_.unpack(),
        node_.bias_.unpack(),
        node_.result1_.unpack(pointer),
        node_.result2_.unpack(pointer)};
  }

  NativeLayerNormBackward0& node_;
};

}  // namespace

void add_layer_norm_hooks(Node& node) {
  auto* const norm = as<NativeLayerNormBackward0>(&node);
  if (norm && has_output_on_gpu(node) && is_float_or_half(dtype_of_output(node))) {
    add_hooks<LayerNormPreHook>(*norm);
  }
}

}  // namespace fastact::recipes
