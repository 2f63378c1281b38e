#include "parameters.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>

#include "python.h"

namespace fastact::recipes {
namespace {

Sharding known = {false, false};

bool is_parameter(const at::Tensor& tensor) {
  const py::object object = wrapped(tensor);
  return Py_TYPE(object.ptr()) != reinterpret_cast<PyTypeObject*>(THPVariableClass);
}

}  // namespace

void set_sharding(Sharding given) {
  known = given;
}

Sharding sharding() {
  return known;
}

bool is_leaf(const torch::autograd::Edge& edge) {
  const torch::autograd::Node* const node = edge.function.get();
  return node && typeid(*node) == typeid(torch::autograd::AccumulateGrad);
}

bool is_freed(const at::Tensor& parameter) {
  return known.is_there || (known.may_be_flat && py::hasattr(wrapped(parameter), "_is_flat_param"));
}

bool is_freed_parameter(const at::Tensor& leaf) {
  return (known.is_there || known.may_be_flat) && is_parameter(leaf) && is_freed(leaf);
}

py::object copy_of(const at::Tensor& parameter) {
  if (!known.is_there) {
    return {};
  }
  const auto sizes = parameter.sizes();
  const bool is_small = std::count_if(sizes.begin(), sizes.end(), [](int64_t size) { return size > 1; }) < 2;
  const at::NoGradGuard no_grad;
  return is_small && parameter.storage().nbytes() > 0 ? keep(parameter.clone(), py::none(), py::none()) : py::object();
}

}  // namespace fastact::recipes
