#include "leaves.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <utility>

#include "python.h"

namespace fastact::recipes {
namespace {

Sharding known_sharding = {false, false};

uint64_t backward_calls = 0;  // under the GIL

// By the sequence numbers of autograd's nodes, which each thread counts for itself.
struct Forward {
  uint64_t begins = 0;      // since the last backward pass
  uint64_t last_saved = 0;  // the next number, then
  uint64_t backward_calls = 0;
};

thread_local Forward forward;

bool is_parameter(const at::Tensor& tensor) {
  const py::object object = wrapped(tensor);
  return Py_TYPE(object.ptr()) != reinterpret_cast<PyTypeObject*>(THPVariableClass);
}

}  // namespace

void set_sharding(Sharding given) {
  known_sharding = given;
}

Sharding sharding() {
  return known_sharding;
}

void note_backward() {
  ++backward_calls;
}

void note_forward() {
  if (std::exchange(forward.backward_calls, backward_calls) != backward_calls) {
    forward.begins = forward.last_saved;
  }
  forward.last_saved = at::sequence_number::peek();
}

bool is_of_earlier_pass(const torch::autograd::Node& node, uint64_t begins) {
  return node.sequence_nr() < std::max(begins, forward.begins) || node.thread_id() != at::RecordFunction::currentThreadId();
}

bool is_leaf(const torch::autograd::Edge& edge) {
  const torch::autograd::Node* const node = edge.function.get();
  return node && typeid(*node) == typeid(torch::autograd::AccumulateGrad);
}

bool is_freed(const at::Tensor& parameter) {
  return known_sharding.is_there || (known_sharding.may_be_flat && py::hasattr(wrapped(parameter), "_is_flat_param"));
}

bool is_freed_parameter(const at::Tensor& leaf) {
  return (known_sharding.is_there || known_sharding.may_be_flat) && is_parameter(leaf) && is_freed(leaf);
}

py::object copy_of(const at::Tensor& parameter) {
  if (!known_sharding.is_there) {
    return {};
  }
  const auto sizes = parameter.sizes();
  const bool is_small = std::count_if(sizes.begin(), sizes.end(), [](int64_t size) { return size > 1; }) < 2;
  const at::NoGradGuard no_grad;
  return is_small && parameter.storage().nbytes() > 0 ? keep(parameter.clone(), py::none(), py::none()) : py::object();
}

}  // namespace fastact::recipes
