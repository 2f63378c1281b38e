#include "nodes.h"

#include <ATen/WrapDimUtils.h>
#include <ATen/ceil_div.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <mutex>
#include <tuple>
#include <type_traits>

#include "../../dtypes.h"
#include "../../identical.h"
#include "../../node.h"
#include "../hook.h"
#include "../verification.h"
#include "answers.h"

namespace fastact::recipes {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;
using torch::autograd::generated::AddmmBackward0;
using torch::autograd::generated::ConvolutionBackward0;
using torch::autograd::generated::LogSoftmaxBackward0;
using torch::autograd::generated::MmBackward0;
using torch::autograd::generated::SoftmaxBackward0;
using torch::autograd::generated::ToCopyBackward0;
using torch::autograd::generated::TransposeBackward0;
using torch::autograd::generated::UnsafeViewBackward0;
using torch::autograd::generated::ViewBackward0;

// Whether it lies as the ops' results do, and there is any of it.
bool is_in_order(const at::Tensor& grad) {
  return grad.dim() > 0 && grad.numel() > 0 && grad.strides() == at::IntArrayRef(c10::contiguous_strides(grad.sizes()));
}

// Whether its memory is as large, or so many times, and begins with it.
bool fills_memory(const at::Tensor& grad, size_t times = 1) {
  return grad.storage_offset() == 0 && grad.storage().nbytes() == times * grad.nbytes();
}

// By PyTorch's op. These are of (outer, size) or (outer, size, inner), the dimension being that of the size.
void write_gradient(bool is_log, at::Tensor to, const at::Tensor& grad, const at::Tensor& result) {
  const at::ScalarType dtype = grad.scalar_type();
  if (is_log) {
    at::_log_softmax_backward_data_out(to, grad, result, 1, dtype);
  } else {
    at::_softmax_backward_data_out(to, grad, result, 1, dtype);
  }
}

// What decides whether the op gives the same bits where it overwrites the incoming gradient: the size of the dimension, and of
// what lies within it, or 0 for the last one.
using SoftmaxConfiguration = std::tuple<bool, at::ScalarType, int64_t, int64_t, c10::DeviceIndex>;

// Whether it does, as found when such a gradient was first wanted.
bool may_be_overwritten(bool is_log, const at::Tensor& grad) {
  static auto& verdicts = *new Verdicts<SoftmaxConfiguration>();
  const int64_t inner = grad.dim() == 3 ? grad.size(2) : 0;
  const SoftmaxConfiguration configuration = {is_log, grad.scalar_type(), grad.size(1), inner, grad.device().index()};
  return verdicts.find(configuration, grad.device(), [&] {
    constexpr int64_t rows = 16, places = 1 << 14;  // the op treats all alike
    at::DimVector sizes = {inner == 0 ? rows : 1, grad.size(1)};
    if (inner > 0) {
      sizes.push_back(std::min(inner, places));
    }
    const at::Tensor some_grad = some_numbers(sizes, grad.options(), 1), result = some_numbers(sizes, grad.options(), 2);
    const at::Tensor expected = at::empty_like(some_grad);
    write_gradient(is_log, expected, some_grad, result);
    write_gradient(is_log, some_grad, some_grad, result);
    return is_identical(some_grad, expected);
  });
}

// Whether the gradient that leads there ends at a node that makes another of it, and nobody sees it before: then it may have
// twice its memory.
bool ends_soon(const Edge& edge) {
  Node* node = edge.function.get();
  const auto is_view = [&] { return as<ViewBackward0>(node) || as<UnsafeViewBackward0>(node) || as<TransposeBackward0>(node); };
  while (!is_hooked(*node) && is_view()) {
    node = node->next_edge(0).function.get();
  }
  return !is_hooked(*node) && (as<MmBackward0>(node) || as<AddmmBackward0>(node) || as<ConvolutionBackward0>(node));
}

// Has the gradient in the incoming one's memory. In a language model's loss both are among the largest tensors of a step, at
// the time when everything is saved.
template <class AnyNode>
class SoftmaxPreHook : public PreHook {
 public:
  explicit SoftmaxPreHook(AnyNode& node) : node_(node) {}

  variable_list operator()(const variable_list& grads) override {
    constexpr bool is_log = std::is_same_v<AnyNode, LogSoftmaxBackward0>;
    const at::Tensor& grad = grads[0];
    if (!may_answer(node_, grad) || !node_.task_should_compute_output(0) || !is_alone(grad) || !is_in_order(grad) ||
        !is_float_or_half(grad.scalar_type()) || node_.self_scalar_type != grad.scalar_type() ||
        !(fills_memory(grad) || (fills_memory(grad, /*times=*/2) && ends_soon(node_.next_edge(0))))) {
      return grads;
    }
    const auto dim = static_cast<size_t>(at::maybe_wrap_dim(node_.dim, grad.dim()));
    at::DimVector sizes = {c10::multiply_integers(grad.sizes().slice(0, dim)), grad.size(dim)};
    if (dim + 1 < grad.sizes().size()) {  // the CPU's op treats the last dimension in another way
      sizes.push_back(c10::multiply_integers(grad.sizes().slice(dim + 1)));
    }
    const at::Tensor in_rows = grad.view(sizes);
    if (!may_be_overwritten(is_log, in_rows)) {
      return grads;
    }
    write_gradient(is_log, in_rows, in_rows, result().view(sizes));
    return answer({grad}, grads.size());
  }

 private:
  // Read as the node itself does.
  at::Tensor result() {
    const std::lock_guard<std::mutex> lock(mutex_of(node_));
    return node_.result_.unpack(pointer_to(&node_));
  }

  AnyNode& node_;
};

// A float32 gradient in a half type, in its first half: each part is written where all has been read, the first by way of
// another place.
at::Tensor cast_in_place(const at::Tensor& grad, at::ScalarType dtype) {
  at::Tensor result = at::empty({0}, grad.options().dtype(dtype)).set_(grad.storage(), 0, grad.sizes(), grad.strides());
  const at::Tensor to = result.view(-1), from = grad.view(-1);
  constexpr int64_t part = 16;
  const int64_t n = grad.numel(), first = at::ceil_div(n, part);
  to.narrow(0, 0, first).copy_(from.narrow(0, 0, first).to(dtype));
  for (int64_t begin = first, end = 0; begin < n; begin = end) {
    end = std::min(2 * begin, n);
    to.narrow(0, begin, end - begin).copy_(from.narrow(0, begin, end - begin));
  }
  return result;
}

// Does so with the gradient of a cast behind a softmax, which writes its own over it.
class SoftmaxCastPreHook : public PreHook {
 public:
  explicit SoftmaxCastPreHook(ToCopyBackward0& node) : node_(node) {}

  variable_list operator()(const variable_list& grads) override {
    const at::Tensor& grad = grads[0];
    const auto dtype = c10::typeMetaToScalarType(node_.self_options.dtype());
    Node& softmax = *node_.next_edge(0).function;
    const bool is_overwritten =
        may_answer(softmax, grad) && softmax.tensor_pre_hooks().empty() && ends_soon(softmax.next_edge(0));
    const bool is_cast = may_answer(node_, grad) && node_.task_should_compute_output(0) && grad.scalar_type() == at::kFloat &&
                         is_half(dtype) && grad.device() == node_.self_options.device();
    return is_overwritten && is_cast && is_alone(grad) && is_in_order(grad) && fills_memory(grad)
               ? answer({cast_in_place(grad, dtype)}, grads.size())
               : grads;
  }

 private:
  ToCopyBackward0& node_;
};

// Unless hooks other than the scope's have saved the result, as a checkpoint's, who may give it back only once.
template <class AnyNode>
bool added_hooks(AnyNode* softmax) {
  if (!softmax || (softmax->result_.retrieve_unpack_hook_data() && !value_behind(softmax->result_))) {
    return false;
  }
  add_hooks<SoftmaxPreHook<AnyNode>>(*softmax);
  return true;
}

}  // namespace

void add_softmax_hooks(Node& node, Node* behind) {
  const bool is_softmax = added_hooks(as<SoftmaxBackward0>(&node)) || added_hooks(as<LogSoftmaxBackward0>(&node));
  if (auto* const cast = is_softmax ? as<ToCopyBackward0>(behind) : nullptr) {
    add_hooks<SoftmaxCastPreHook>(*cast);
  }
}

}  // namespace fastact::recipes
