#include "answers.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <memory>
#include <string>
#include <type_traits>

#include "../../devices.h"
#include "../../dispatch.h"
#include "../../dtypes.h"
#include "../python.h"
#include "gradients.h"

namespace fastact::recipes {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// How many hold a node's wrapper while we do: we, and since PyTorch 2.13, whose nodes keep their wrappers alive, the node.
constexpr int kHoldersOfWrapper = std::is_same_v<NodePointer, std::shared_ptr<Node>> ? 1 : 2;

// Whether a node alone holds the next one: no tensor, no other node, no pass that begins or ends there, nor a wrapper in
// Python, which could add a hook during the pass. The node does by its edge, and by what it has saved.
bool is_only_reader(const Node& node, bool has_saved, size_t i) {
  const NodePointer& next = node.next_edge(i).function;
  const py::gil_scoped_acquire gil;
  const py::object python = wrapped(next);  // holds it as well; there may have been one already
  return next.use_count() == (has_saved ? 3 : 2) && python.ref_count() == kHoldersOfWrapper;
}

}  // namespace

bool are_ops_seen() {
  return c10::impl::dispatch_mode_enabled() || torch::autograd::ForwardADLevel::try_get_by_idx(0) ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

bool may_answer(const Node& node, const at::Tensor& grad) {
  return grad.defined() && is_plain(grad) && !is_watched(node) && !at::GradMode::is_enabled() &&
         !c10::InferenceMode::is_enabled() && !are_ops_seen();
}

bool has_hooks(const Node& node) {
  return !node.pre_hooks().empty() || !node.post_hooks().empty();
}

bool is_watched(const Node& node, size_t post_hooks) {
  return node.pre_hooks().size() > 1 || node.post_hooks().size() > post_hooks;
}

bool is_hooked(Node& node) {
  return !node.tensor_pre_hooks().empty() || has_hooks(node);
}

bool is_alone(const at::Tensor& grad) {
  const bool is_view = grad.is_view();
  return grad.use_count() == 1 && (!is_view || grad._base().use_count() == 1) &&
         grad.storage().use_count() == (is_view ? 2 : 1) && grad.storage().resizable();
}

bool passes_unnoticed(Node& node, bool has_saved, size_t i) {
  Node& next = *node.next_edge(i).function;
  const bool is_checked = torch::autograd::AnomalyMode::is_enabled();  // whether it is NaN
  return !is_checked && next.tensor_pre_hooks().empty() && node.task_should_compute_output(i) &&
         next.task_should_compute_output(0) && node.stream() == next.stream() && is_only_reader(node, has_saved, i);
}

at::ScalarType dtype_of_output(const Node& node) {
  return c10::typeMetaToScalarType(node.input_metadata(0).dtype());
}

bool has_output_on_gpu(const Node& node) {
  return kHasCuda && node.input_metadata(0).device().is_cuda();
}

bool is_answered() {
  const auto node = torch::autograd::get_current_node();
  auto* const hook = node ? hook_of<PreHook>(*node) : nullptr;
  return hook && hook->has_answer();
}

bool PreHook::has_answer() {
  const int task = torch::autograd::get_current_graph_task_id();
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(answers_.begin(), answers_.end(), [&](const Answer& each) { return each.task == task; });
}

std::optional<Answer> PreHook::take_answer() {
  const int task = torch::autograd::get_current_graph_task_id();
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(answers_.begin(), answers_.end(), [&](const Answer& each) { return each.task == task; });
  if (found == answers_.end()) {
    return std::nullopt;
  }
  std::optional<Answer> result = std::move(*found);
  answers_.erase(found);
  return result;
}

variable_list PreHook::answer(variable_list results, size_t grads, size_t for_next) {
  const int task = torch::autograd::get_current_graph_task_id();
  const std::lock_guard<std::mutex> lock(mutex_);
  answers_.push_back({task, std::move(results), for_next});
  return variable_list(grads);
}

variable_list PreHook::decline(const Node& node, variable_list grads) const {
  if (takes_half() && grads[0].defined()) {
    grads[0] = grads[0].to(dtype_of_output(node));
  }
  return grads;
}

variable_list PostHook::operator()(const variable_list& results, const variable_list&) {
  std::optional<Answer> answer = hook_.take_answer();
  if (!answer) {
    return results;
  }
  // As the engine has done with the node's: a parameter may want its gradient in another dtype.
  torch::autograd::edge_list edges = node_.next_edges();
  std::fill_n(edges.begin(), answer->for_next, torch::autograd::Edge());
  torch::autograd::validate_outputs(
      edges, answer->results, [&](const std::string& error) { return c10::str("recompute: ", node_.name(), ": ", error); });
  return std::move(answer->results);
}

std::mutex& mutex_of(Node& node) {
  struct Access : Node {
    static std::mutex Node::* mutex() { return &Access::mutex_; }
  };
  return node.*Access::mutex();
}

}  // namespace fastact::recipes
