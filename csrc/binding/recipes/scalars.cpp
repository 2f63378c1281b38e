#include "scalars.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string_view>

namespace fastact::recipes {
namespace {

// A sum's number, by the node that its op makes next in this thread.
struct Sum {
  uint64_t sequence_nr = 0;
  std::optional<at::Scalar> number;
};

// The last sums of a thread. A recipe follows soon on its op.
struct Sums {
  static constexpr size_t kNodes = 1024;

  Sum& of(uint64_t sequence_nr) { return of_nodes[sequence_nr % kNodes]; }

  std::array<Sum, kNodes> of_nodes;
};

struct Observed {
  std::unique_ptr<Sums> sums;
  std::optional<at::CallbackHandle> callback;
  int scopes = 0;
};
thread_local Observed observed;

// Whether a recipe of this process has lacked a number. Most nets have no such sums, and observing costs each op 0.1 to 0.5 us.
std::atomic<bool> is_wanted{false};

bool is_sum(std::string_view name) {
  for (const std::string_view each : {"aten::add", "aten::add_", "aten::sub", "aten::sub_", "aten::rsub"}) {
    if (name == each) {
      return true;
    }
  }
  return false;
}

// A number in an expression is an argument or, for most ops, a tensor that is marked.
std::optional<at::Scalar> number_in(const c10::IValue& argument) {
  if (argument.isDouble() || argument.isInt()) {
    return argument.toScalar();
  }
  if (!argument.isTensor() || !argument.toTensor().unsafeGetTensorImpl()->is_wrapped_number()) {
    return std::nullopt;
  }
  const at::Tensor& tensor = argument.toTensor();
  if (!tensor.is_cpu() || !tensor.has_storage() || !tensor.storage().data()) {  // as forward mode's zeros
    return std::nullopt;
  }
  switch (tensor.scalar_type()) {  // item() would call an op
    case at::kDouble:
      return *tensor.const_data_ptr<double>();
    case at::kLong:
      return *tensor.const_data_ptr<int64_t>();
    default:
      return std::nullopt;
  }
}

bool requires_grad(const c10::IValue& argument) {
  return argument.isTensor() && argument.toTensor().requires_grad();
}

// Of a tensor that requires a gradient autograd's kernel makes a node before it calls anything else, so the last sum that began
// with a number has it.
std::unique_ptr<at::ObserverContext> note_sum(const at::RecordFunction& function) {
  // Threads of a backward pass within the scope call this as well.
  if (observed.sums && is_sum(function.name()) && at::GradMode::is_enabled() && function.inputs().size() > 1) {
    const uint64_t sequence_nr = at::sequence_number::peek();
    const bool makes_node = requires_grad(function.inputs()[0]);
    observed.sums->of(sequence_nr) = {sequence_nr, makes_node ? number_in(function.inputs()[1]) : std::nullopt};
  }
  return nullptr;
}

void observe() {
  // Nothing of an earlier scope, since nodes that weren't observed may have those numbers.
  observed.sums = std::make_unique<Sums>();
  const auto callback = at::RecordFunctionCallback(&note_sum).needsInputs(true).scopes({at::RecordScope::FUNCTION});
  observed.callback = at::addThreadLocalCallback(callback);
}

}  // namespace

void begin_observing(bool at_once) {
  if (++observed.scopes == 1 && (at_once || is_wanted)) {
    observe();
  }
}

void end_observing() {
  if (--observed.scopes == 0 && observed.callback) {
    at::removeCallback(*observed.callback);
    observed.callback.reset();
  }
}

bool observes_ops() {
  return observed.callback.has_value();
}

py::object scalar_of(const torch::autograd::Node& node) {
  if (!observed.callback) {
    is_wanted = true;
    if (observed.scopes > 0 && torch::autograd::get_current_graph_task_id() < 0) {  // at whose end it would be forgotten
      observe();
    }
    return {};
  }
  const Sum& sum = observed.sums->of(node.sequence_nr());
  const bool is_known =
      sum.number && sum.sequence_nr == node.sequence_nr() && node.thread_id() == at::RecordFunction::currentThreadId();
  return is_known ? py::cast(*sum.number) : py::object();
}

}  // namespace fastact::recipes
