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

uint64_t unpacked = 0;  // how many tensors; under the GIL

// What a thread knows of the last backward pass.
struct LastBackward {
  uint64_t unpacked = 0;
  uint64_t ended = 0;  // by the sequence numbers of autograd's nodes, which each thread counts for itself
};

thread_local LastBackward last_backward;

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

void note_unpacking() {
  ++unpacked;
}

void note_saving() {
  if (std::exchange(last_backward.unpacked, unpacked) != unpacked) {
    last_backward.ended = at::sequence_number::peek();
  }
}

uint64_t begin_scope() {
  note_saving();
  return at::sequence_number::peek();
}

bool is_of_earlier_pass(uint64_t sequence, uint64_t thread, uint64_t begins) {
  return sequence < std::max(begins, last_backward.ended) || thread != at::RecordFunction::currentThreadId();
}

bool is_leaf(const torch::autograd::Edge& edge) {
  const torch::autograd::Node* const node = edge.function.get();
  return node && typeid(*node) == typeid(torch::autograd::AccumulateGrad);
}

bool is_alias(const at::Tensor& leaf) {
  return version_of(leaf) > 0 && !leaf.unsafeGetTensorImpl()->unique_version() && !is_parameter(leaf);
}

bool is_sharded(const at::Tensor& parameter) {
  return known_sharding.has_fsdp2 || (known_sharding.may_have_fsdp1 && py::hasattr(wrapped(parameter), "_is_flat_param"));
}

bool is_sharded_parameter(const at::Tensor& leaf) {
  return (known_sharding.has_fsdp2 || known_sharding.may_have_fsdp1) && is_parameter(leaf) && is_sharded(leaf);
}

py::object copy_if_small(const at::Tensor& parameter) {
  if (!known_sharding.has_fsdp2) {
    return {};
  }
  const auto sizes = parameter.sizes();
  const bool is_small = std::count_if(sizes.begin(), sizes.end(), [](int64_t size) { return size > 1; }) < 2;
  const at::NoGradGuard no_grad;
  return is_small && parameter.storage().nbytes() > 0 ? keep(parameter.clone()) : py::object();
}

}  // namespace fastact::recipes
