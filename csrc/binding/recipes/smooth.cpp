#include "smooth.h"

#include <ATen/TensorOperators.h>
#include <c10/core/InferenceMode.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "../codes/autograd.h"
#include "../codes/tables.h"
#include "../devices.h"
#include "../dispatch.h"
#include "../dtypes.h"
#include "computing.h"
#include "fusion.h"
#include "gradients/norms.h"
#include "hook.h"
#include "value.h"
#include "verification.h"

namespace fastact::recipes {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

template <class Saved>
struct SmoothFields {
  Saved input;
  std::string activation;

  template <class Self, class Visit>
  static void each(Self& self, const Visit& visit) {
    visit(self.input);
    visit(self.activation);
  }
};

// Whether an activation's instruction for the gradient in float32 gives the bits of PyTorch's op on this device, of an incoming
// gradient of this dtype.
bool fits(const Smooth& activation, at::Device device, at::ScalarType of_grad) {
  static auto& verdicts = *new Verdicts<std::tuple<const Smooth*, c10::DeviceIndex, at::ScalarType>>();
  return verdicts.find({&activation, device.index(), of_grad}, device, [&] {
    const auto options = at::dtype(at::kFloat).device(device);
    const at::Tensor input = all_numbers(options, Order::first), grad = all_numbers(options.dtype(of_grad), Order::second);
    const py::object value = keep(input);
    const auto found = compute_gradient(value_of(value), grad, *activation.gradient_opcode, {}, /*force=*/true);
    const py::gil_scoped_release no_gil;  // the device may be waiting for a callback that needs it
    return found && is_identical(*found, activation.backward(grad.to(at::kFloat), input));
  });
}

struct SmoothBackward : NodeOf<SmoothBackward, SmoothFields>, WithOrigin {
  SmoothBackward(const Smooth& activation, Origin origin, const at::Tensor& self, SavedVariable input)
      : NodeOf(self, {std::move(input), activation.name}), WithOrigin(std::move(origin)), activation_(activation) {}

  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) {
      return {at::Tensor()};
    }
    if (at::GradMode::is_enabled()) {
      return {differentiable_backward(activation_, grads[0], unpack())};
    }
    if (auto gradient = through_recipe(grads[0])) {
      return {*std::move(gradient)};
    }
    grads[0] = grads[0].to(dtype_of_output(*this));
    return {activation_.backward(grads[0], unpack())};
  }

  std::string name() const override { return kSmoothNodeName; }
  bool has_instruction() const { return activation_.gradient_opcode.has_value(); }

  static variable_list apply_functional(const variable_list& grads, const std::vector<c10::IValue>& saved) {
    const auto fields = from_arguments<SmoothFields<at::Tensor>>(saved);
    return {grads[0].defined() ? find_smooth(fields.activation)->backward(grads[0], fields.input) : at::Tensor()};
  }

 private:
  at::Tensor unpack() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return fields_.input.unpack();
  }

  // None where PyTorch's op must compute the gradient. The incoming one may be what a cast has left.
  std::optional<at::Tensor> through_recipe(const at::Tensor& grad) {
    const at::ScalarType dtype = dtype_of_output(*this);
    if (!kHasCuda || !grad.is_cuda() || !is_plain(grad) ||
        (dtype == at::kFloat ? !activation_.gradient_opcode : !is_half(dtype)) || grad.is_inference() ||
        c10::InferenceMode::is_enabled()) {  // whose tensors have no version
      return std::nullopt;
    }
    const bool as_input = dtype == at::kFloat && post_hooks().empty() && may_be_in_any_layout(*this, grad);
    const Tables* tables = is_half(dtype) ? tables_for(activation_, grad) : nullptr;
    const std::lock_guard<std::mutex> lock(mutex_);
    const py::gil_scoped_acquire gil;
    const Reading reading;
    const py::object input = value_behind(fields_.input);
    if (!input || !value_of(input).is_recipe()) {
      return std::nullopt;
    }
    if (is_half(dtype)) {
      return tables ? compute_gradient(value_of(input), grad, Opcode::gradient, tables->derivative) : std::nullopt;
    }
    if (!fits(activation_, grad.device(), grad.scalar_type())) {
      return std::nullopt;
    }
    const Opcode opcode = *activation_.gradient_opcode;
    return compute_gradient(value_of(input), grad, opcode, {}, /*force=*/false, as_input);
  }

  const Smooth& activation_;
};

}  // namespace

void record_input(const Smooth& activation, Origin origin, const at::Tensor& self, at::Tensor& output) {
  torch::autograd::set_history(
      output, adopt(new SmoothBackward(activation, std::move(origin), self, SavedVariable(self, /*is_output=*/false))));
}

NodePointer node_before_write(const Smooth& activation, Origin origin, const at::Tensor& self) {
  return adopt(new SmoothBackward(activation, std::move(origin), self, save_before_write(self)));
}

void record_write(at::Tensor& self, NodePointer node) {
  torch::autograd::increment_version(self);
  torch::autograd::rebase_history(self, std::move(node));
}

const std::type_info& smooth_node_type() {
  return typeid(SmoothBackward);
}

bool is_smooth_with_instruction(const torch::autograd::Node& node) {
  return typeid(node) == smooth_node_type() && static_cast<const SmoothBackward&>(node).has_instruction() &&
         has_output_on_gpu(node);
}

}  // namespace fastact::recipes
