// Hooks on a node of PyTorch's that compute what the node would, to the bit, in less time. The node stays as it is: the
// pre-hook has the results and gives it no gradient, so that it does nothing; the post-hook puts them in place of none.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <mutex>
#include <optional>
#include <typeinfo>
#include <utility>
#include <vector>

#include "../hook.h"
#include "../value.h"

namespace fastact::recipes {

namespace py = pybind11;

// Whether anybody in this thread sees what ops are given: a dispatch mode, forward AD, or a transform of torch.func.
bool are_ops_seen();

// Whether a hook may compute a node's results, of which nobody but the node would notice. Not while there are tangents.
bool may_answer(const torch::autograd::Node& node, const at::Tensor& grad);

// Whether a node has hooks of its own, this library's included.
bool has_hooks(const torch::autograd::Node& node);

// Whether it has others than this library's, which are a pre-hook and so many post-hooks.
bool is_watched(const torch::autograd::Node& node, size_t post_hooks = 1);

// Whether anybody, this library's hooks included, sees what the node is given or gives.
bool is_hooked(torch::autograd::Node& node);

// Whether the gradient is all that holds its memory, which is PyTorch's, so that nobody else reads or writes it. What Python
// has seen of the pass has a wrapper, which holds it, too.
bool is_alone(const at::Tensor& grad);

// Whether a pass does nothing with a node's result but give it to the next node, in the same stream. `has_saved`: whether the
// node has saved, in the scope, what the next one made. `i`: which of its results.
bool passes_unnoticed(torch::autograd::Node& node, bool has_saved = false, size_t i = 0);

at::ScalarType dtype_of_output(const torch::autograd::Node& node);

// Whether the node's output is on a GPU, and this build has kernels for it.
bool has_output_on_gpu(const torch::autograd::Node& node);

// What a pre-hook has computed for a pass. `for_next`: so many of them, the first, go to the next nodes as they are, though
// these may expect another dtype.
struct Answer {
  int task;
  torch::autograd::variable_list results;
  size_t for_next;
};

class PreHook : public torch::autograd::FunctionPreHook {
 public:
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}  // compiled autograd has the node run

  // Whether it takes the gradient in the half type in which a cast behind the node has it (casts.h).
  virtual bool takes_half() const { return false; }

  bool has_answer();
  std::optional<Answer> take_answer();

 protected:
  // Returns what the node is given, where these are its results.
  torch::autograd::variable_list answer(torch::autograd::variable_list results, size_t grads, size_t for_next = 0);
  // What the node itself is given, where it is to compute them.
  torch::autograd::variable_list decline(const torch::autograd::Node& node, torch::autograd::variable_list grads) const;

 private:
  // By the pass, since others may run between the two hooks: in other threads, or of what dies with the gradient.
  std::mutex mutex_;
  std::vector<Answer> answers_;
};

class PostHook : public torch::autograd::FunctionPostHook {
 public:
  PostHook(const torch::autograd::Node& node, PreHook& hook) : node_(node), hook_(hook) {}

  torch::autograd::variable_list operator()(
      const torch::autograd::variable_list& results, const torch::autograd::variable_list&) override;
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  const torch::autograd::Node& node_;
  PreHook& hook_;  // of the same node
};

template <class Hook, class AnyNode>
void add_hooks(AnyNode& node) {
  if (!has_hooks(node)) {
    auto hook = std::make_unique<Hook>(node);
    node.add_post_hook(std::make_unique<PostHook>(node, *hook));
    node.add_pre_hook(std::move(hook));
  }
}

// The node behind another, if it is of a class.
template <class AnyNode>
AnyNode* as(torch::autograd::Node* node) {
  return node && typeid(*node) == typeid(AnyNode) ? static_cast<AnyNode*>(node) : nullptr;
}

// The hook that add_hooks has added, or null.
template <class Hook>
Hook* hook_of(const torch::autograd::Node& node) {
  return node.pre_hooks().empty() ? nullptr : dynamic_cast<Hook*>(node.pre_hooks()[0].get());
}

// What a node locks while it runs.
std::mutex& mutex_of(torch::autograd::Node& node);

// Calls function(values) with the values behind what a node has saved, or null, under the GIL: which is taken after the node's
// own mutex, as where the node runs.
template <class Function>
auto with_values(
    torch::autograd::Node& node, c10::ArrayRef<const torch::autograd::SavedVariable*> saved, const Function& function) {
  std::unique_lock<std::mutex> lock(mutex_of(node));
  const py::gil_scoped_acquire gil;
  Objects values;
  for (const auto* each : saved) {
    values.push_back(value_behind(*each));
  }
  lock.unlock();
  return function(values);
}

template <class Function>
auto with_value(torch::autograd::Node& node, const torch::autograd::SavedVariable& saved, const Function& function) {
  return with_values(node, {&saved}, [&](const Objects& values) { return function(values[0]); });
}

}  // namespace fastact::recipes
