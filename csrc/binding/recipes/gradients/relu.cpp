#include <torch/csrc/autograd/generated/Functions.h>

#include "../../bits/launch.h"
#include "../computing.h"
#include "../partial.h"
#include "answers.h"
#include "gradients.h"

namespace fastact::recipes {
namespace {

using torch::autograd::variable_list;
using torch::autograd::generated::ReluBackward0;

class SignsPreHook : public PreHook {
 public:
  explicit SignsPreHook(ReluBackward0& node) : node_(node) {}

  variable_list operator()(const variable_list& grads) override {
    const at::Tensor& grad = grads[0];
    if (!may_answer(node_, grad)) {
      return grads;
    }
    const at::Tensor signs = with_value(node_, node_.result_, [&](const py::object& value) {
      const Reading reading;
      return value ? signs_of(value_of(value), grad) : at::Tensor();
    });
    if (!signs.defined()) {
      return grads;
    }
    at::Tensor result = kHasCuda && grad.is_cuda() ? packed_backward<Cuda>(grad, signs, 1, 0, {}, {})
                                                   : packed_backward<Cpu>(grad, signs, 1, 0, {}, {});
    return answer({std::move(result)}, grads.size());
  }

 private:
  ReluBackward0& node_;
};

}  // namespace

void add_signs_hook(torch::autograd::Node& relu) {
  add_hooks<SignsPreHook>(static_cast<ReluBackward0&>(relu));
}

}  // namespace fastact::recipes
