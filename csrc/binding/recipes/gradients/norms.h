// What the hooks of norms have in common.
#pragma once

#include <array>
#include <utility>

#include "../verification.h"
#include "answers.h"

namespace fastact::recipes {

using Needed = std::array<bool, 3>;  // of the gradients of the input, the weight and the bias

Needed needed_of(const torch::autograd::Node& node);

// Each norm's file has a struct `Saved` of what the norm has saved. Its gradients are by_kernel() where the kernel takes the
// incoming one (is_served()) and gives the ops' bits, as found when such were first wanted (fits()), and else by_ops().

// Whether the kernel gives the ops' bits. Waits for the device.
template <class Saved, class... Others>
bool repeats_ops(const at::Tensor& grad, const Saved& saved, Others... others) {
  return are_identical(saved.by_kernel(grad, others...), saved.by_ops(grad, others...));
}

// The hook of a layer or group norm, which takes its gradient in any layout, and in the half type of a cast behind it
// (casts.h).
class NormPreHook : public PreHook {
 public:
  bool takes_half() const override { return true; }

 protected:
  template <class Saved>
  torch::autograd::variable_list answer_with(const at::Tensor& grad, const Saved& saved, Needed needed, size_t grads) {
    auto results =
        saved.is_served(grad) && saved.fits(grad, needed) ? saved.by_kernel(grad, needed) : saved.by_ops(grad, needed);
    return answer(std::move(results), grads, /*for_next=*/saved.input.scalar_type() != saved.dtype ? 1 : 0);
  }
};

// Whether the next node is a norm that nobody watches, so that it may be given a gradient in any layout. The node has saved
// the norm's output.
bool may_be_in_any_layout(torch::autograd::Node& node, const at::Tensor& grad);

// Whether the kernels of a layer or group norm of this dtype take these: of float32, and one half type if the norm is in
// float32, in vectors from one end to the other.
bool are_in_vectors(const at::Tensor& grad, const at::Tensor& input, at::ScalarType dtype);

// For trials: numbers in place of a tensor's, if it is defined.
at::Tensor some_like(const at::Tensor& tensor, at::IntArrayRef sizes, int64_t seed);

}  // namespace fastact::recipes
