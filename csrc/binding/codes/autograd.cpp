#include "autograd.h"

#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../find.h"
#include "../node.h"
#include "launch.h"

namespace fastact {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Strides = std::vector<c10::SymInt>;

at::Tensor call_code_backward(
    const at::Tensor& grad, const at::Tensor& output, const at::Tensor& code, std::string_view activation,
    c10::SymIntArrayRef input_strides) {
  static const auto op =
      find<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, std::string_view, at::OptionalSymIntArrayRef)>(
          "code_backward");
  return grad.defined() ? op.call(grad, output, code, activation, input_strides) : grad;
}

template <class Saved>
struct CodeFields {
  Saved output, code;
  std::string activation;
  c10::SymDimVector input_strides;

  template <class Self, class Visit>
  static void each(Self& self, const Visit& visit) {
    visit(self.output);
    visit(self.code);
    visit(self.activation);
    visit(self.input_strides);
  }
};

struct CodeBackward : NodeOf<CodeBackward, CodeFields> {
  CodeBackward(const Smooth& activation, const at::Tensor& self, c10::SymIntArrayRef input_strides)
      : NodeOf(self, {{}, {}, activation.name, c10::SymDimVector(input_strides)}), activation_(activation) {}

  // The code has the memory order of these strides, the output's.
  void save(SavedVariable output, c10::SymIntArrayRef output_strides, const at::Tensor& code) {
    fields_.output = std::move(output);
    output_strides_.assign(output_strides.begin(), output_strides.end());
    fields_.code = SavedVariable(code, /*is_output=*/false);
  }

  variable_list apply(variable_list&& grads) override {
    auto [output, code] = unpack();
    if (output.sym_strides() != c10::SymIntArrayRef(output_strides_)) {  // a hook on what is saved has copied it
      output = at::empty_strided_symint(output.sym_sizes(), output_strides_, output.options()).copy_(output);
    }
    if (at::GradMode::is_enabled() && grads[0].defined()) {
      return {differentiable(grads[0], output, code)};
    }
    return {call_code_backward(grads[0], output, code, activation_.name, fields_.input_strides)};
  }

  std::string name() const override { return kCodeNodeName; }

  static variable_list apply_functional(const variable_list& grads, const std::vector<c10::IValue>& saved) {
    const auto fields = from_arguments<CodeFields<at::Tensor>>(saved);
    return {call_code_backward(grads[0], fields.output, fields.code, fields.activation, fields.input_strides)};
  }

 private:
  std::pair<at::Tensor, at::Tensor> unpack() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {fields_.output.unpack(pointer_to(this)), fields_.code.unpack()};
  }

  // The gradient as a function of the input that is found again, with the history of the one that was given.
  at::Tensor differentiable(const at::Tensor& grad, const at::Tensor& output, const at::Tensor& code) const {
    at::Tensor input = [&] {
      const at::NoGradGuard no_grad;
      const Tables* tables = tables_for(activation_, output);
      return decode(*tables, output.detach(), code, C10_AS_INTARRAYREF_SLOW(fields_.input_strides));
    }();
    torch::autograd::impl::set_gradient_edge(input, next_edge(0));
    return differentiable_backward(activation_, grad, input);
  }

  const Smooth& activation_;
  c10::SymDimVector output_strides_;
};

}  // namespace

at::Tensor differentiable_backward(const Smooth& activation, const at::Tensor& grad, const at::Tensor& input) {
  // By PyTorch's node, so that further gradients are added up in the same order. It is called past the engine, or hooks of the
  // input would see this gradient too.
  const at::Tensor output = activation.forward(input);
  const auto& node = output.grad_fn();
  TORCH_INTERNAL_ASSERT(node && node->next_edge(0) == torch::autograd::impl::gradient_edge(input));
  return (*node)({grad})[0];
}

const std::type_info& code_node_type() {
  return typeid(CodeBackward);
}

bool needs_gradient_alone(const at::Tensor& self) {
  return torch::autograd::compute_requires_grad(self) && !self._fw_grad(/*level=*/0).defined();
}

void record_code(const Smooth& activation, const at::Tensor& self, at::Tensor& output, const at::Tensor& code) {
  if (!torch::autograd::compute_requires_grad(self)) {
    return;
  }
  auto* node = new CodeBackward(activation, self, self.sym_strides());
  torch::autograd::set_history(output, adopt(node));
  node->save(SavedVariable(output, /*is_output=*/true), output.sym_strides(), code);
}

void record_code_inplace(const Smooth& activation, at::Tensor& self, const at::Tensor& ordered, const at::Tensor& code) {
  // The node first: with the new version a view would take its edges anew, and not again once its base has this node.
  auto* node = new CodeBackward(activation, self, ordered.sym_strides());
  NodePointer pointer = adopt(node);
  torch::autograd::increment_version(self);
  torch::autograd::rebase_history(self, pointer);
  node->save(
      ordered.is_same(self) ? SavedVariable(self, /*is_output=*/true, /*is_inplace_on_view=*/self.is_view())
                            : SavedVariable(ordered, /*is_output=*/false),
      ordered.sym_strides(), code);
}

}  // namespace fastact
