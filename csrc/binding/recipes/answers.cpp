#include "answers.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/graph_task.h>

#include <string>

#include "../dispatch.h"
#include "python.h"

namespace fastact::recipes {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// The results that a pre-hook in this thread has computed for a node of a pass, until the post-hook returns them.
struct Answer {
  const Node* node = nullptr;
  int task = -1;
  variable_list results;
  bool is_for_next = false;

  bool is_for(const Node* other) const { return node == other && task == torch::autograd::get_current_graph_task_id(); }
};

thread_local Answer answered;

// Whether a node alone holds the next one: no tensor, no other node, nor a pass that begins or ends there. It does by its edge,
// and by what it has saved.
bool is_only_reader(const Node& node, bool has_saved) {
  const NodePointer& next = node.next_edge(0).function;
  const py::gil_scoped_acquire gil;
  const py::object python = wrapped(next);  // holds it as well; there may have been one already
  return next.use_count() == (has_saved ? 3 : 2);
}

}  // namespace

bool may_answer(const Node& node, const at::Tensor& grad) {
  const bool is_watched = node.pre_hooks().size() > 1 || node.post_hooks().size() > 1;
  return grad.defined() && is_plain(grad) && !is_watched && !at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled() &&
         !c10::impl::dispatch_mode_enabled() && !torch::autograd::ForwardADLevel::try_get_by_idx(0);
}

bool passes_unnoticed(Node& node, bool has_saved) {
  Node& next = *node.next_edge(0).function;
  const bool is_checked = torch::autograd::AnomalyMode::is_enabled();  // whether it is NaN
  return !is_checked && next.tensor_pre_hooks().empty() && node.task_should_compute_output(0) &&
         next.task_should_compute_output(0) && node.stream() == next.stream() && is_only_reader(node, has_saved);
}

bool is_answered() {
  return answered.node && answered.is_for(torch::autograd::get_current_node().get());
}

void PreHook::begin() {
  answered = {};
}

variable_list PreHook::answer(const Node& node, variable_list results, size_t grads, bool is_for_next) {
  answered = {&node, torch::autograd::get_current_graph_task_id(), std::move(results), is_for_next};
  return variable_list(grads);
}

variable_list PostHook::operator()(const variable_list& results, const variable_list&) {
  if (!answered.is_for(&node_)) {
    return results;
  }
  Answer answer = std::exchange(answered, {});
  // As the engine has done with the node's: a parameter may want its gradient in another dtype.
  torch::autograd::edge_list edges = node_.next_edges();
  if (answer.is_for_next) {
    edges[0] = {};
  }
  torch::autograd::validate_outputs(
      edges, answer.results, [&](const std::string& error) { return c10::str("recompute: ", node_.name(), ": ", error); });
  return std::move(answer.results);
}

std::mutex& mutex_of(Node& node) {
  struct Access : Node {
    static std::mutex Node::* mutex() { return &Access::mutex_; }
  };
  return node.*Access::mutex();
}

}  // namespace fastact::recipes
