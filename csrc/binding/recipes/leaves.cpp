#include "leaves.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>

#include "python.h"

namespace fastact::recipes {
namespace {

Sharding known_sharding = {false, false};

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
