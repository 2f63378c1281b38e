#include "nodes.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/native_dropout_backward.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/tanh_backward.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "../../dtypes.h"
#include "../../strides.h"
#include "../computing.h"
#include "../derivation.h"
#include "../formulas.h"
#include "../fusion.h"
#include "../masks.h"
#include "../python.h"
#include "../verification.h"
#include "answers.h"
#include "casts.h"
#include "norms.h"

namespace fastact::recipes {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::autograd::generated::AddBackward0;
using torch::autograd::generated::MeanBackward1;
using torch::autograd::generated::MulBackward0;
using torch::autograd::generated::NativeDropoutBackward0;
using torch::autograd::generated::PowBackward0;
using torch::autograd::generated::RsqrtBackward0;
using torch::autograd::generated::SiluBackward0;
using torch::autograd::generated::TanhBackward0;

// What a node multiplies its gradient by: a saved tensor, a saved mask and a number, or the derivative of a power or a
// function.
struct Factor {
  enum class Kind { product, mask, power, function } kind;
  double number = 0;   // dropout's scale, or the exponent
  Opcode opcode = {};  // of the function's gradient

  at::Tensor times(const at::Tensor& grad, const at::Tensor& saved) const {
    return kind == Kind::product             ? grad * saved
           : kind == Kind::mask              ? at::native_dropout_backward(grad, saved, number)
           : kind == Kind::power             ? grad * (number * saved.pow(number - 1))
           : opcode == Opcode::tanh_gradient ? at::tanh_backward(grad, saved)
                                             : at::silu_backward(grad.to(saved.scalar_type()), saved);
  }
};

// How a node's gradients follow from what it has saved, in their order. None for what programs don't compute, or no faster: on
// the CPU, PyTorch's vectors of half types.
struct Derivatives {
  c10::SmallVector<const SavedVariable*, 2> saved;
  c10::SmallVector<Factor, 2> factors;
};

Derivatives derivatives_of(Node& node) {
  const at::ScalarType dtype = dtype_of_output(node);
  const at::Device device = node.input_metadata(0).device();
  const bool is_on_gpu = has_output_on_gpu(node), is_float = dtype == at::kFloat;
  if (!(is_on_gpu && is_float_or_half(dtype)) && !(device.is_cpu() && is_float)) {
    return {};
  }
  if (const auto* product = as<MulBackward0>(&node)) {
    return {{&product->other_, &product->self_}, {{Factor::Kind::product}, {Factor::Kind::product}}};
  }
  if (const auto* dropout = as<NativeDropoutBackward0>(&node); dropout && is_on_gpu) {
    const double p = dropout->p, scale = !dropout->train.value_or(false) ? 1 : p == 1 ? 0 : 1 / (1 - p);
    return {{&dropout->result1_}, {{Factor::Kind::mask, scale}}};
  }
  if (const auto* power = as<PowBackward0>(&node); power && is_float && !power->exponent.isComplex()) {
    const double exponent = power->exponent.toDouble();
    return is_known_exponent(static_cast<float>(exponent)) ? Derivatives{{&power->self_}, {{Factor::Kind::power, exponent}}}
                                                           : Derivatives();
  }
  if (const auto* tanh = as<TanhBackward0>(&node); tanh && is_float && is_on_gpu) {
    return {{&tanh->result_}, {{Factor::Kind::function, 0, Opcode::tanh_gradient}}};
  }
  if (const auto* silu = as<SiluBackward0>(&node); silu && is_float && is_on_gpu) {
    return {{&silu->self_}, {{Factor::Kind::function, 0, Opcode::silu_gradient}}};
  }
  return {};
}

// The gradient as a recipe's tensor; none where no program computes it, or that isn't worth it. `as_saved`: a function's, in
// the layout of what was saved.
std::optional<at::Tensor> by_program(
    const Factor& factor, const at::Tensor& grad, const py::object& saved, at::ScalarType dtype, bool as_saved,
    bool is_trial = false) {
  Value& value = value_of(saved);
  if (factor.kind == Factor::Kind::function) {
    return dtype == at::kFloat ? compute_gradient(value, grad, factor.opcode, {}, is_trial, as_saved) : std::nullopt;
  }
  const auto strides_of_saved = value.strides_of();
  if (!strides_of_saved) {
    return std::nullopt;
  }
  at::DimVector strides(*strides_of_saved);
  if (factor.kind == Factor::Kind::power) {  // an op of its own, which lays out dimensions of size 1 anew
    strides = elementwise_strides(grad.sizes(), strides, strides);
  }
  const bool is_dropout = factor.kind == Factor::Kind::mask;  // whose op has strides of its own
  if (is_dropout && grad.strides() != at::IntArrayRef(c10::contiguous_strides(grad.sizes()))) {
    return std::nullopt;
  }
  strides = is_dropout ? at::DimVector(grad.strides()) : elementwise_strides(grad.sizes(), grad.strides(), strides);
  if (!agree(grad.sizes(), strides, *strides_of_saved)) {
    return std::nullopt;  // elements in two orders: what was saved, once written, is read faster
  }
  const auto recipe = [&](const py::object& formula, Objects operands, Objects arguments, at::ScalarType dtype) {
    py::object object = make_value();
    Value& made = value_of(object);
    made.formula = formula;
    made.operands = std::move(operands);
    made.arguments = std::move(arguments);
    made.set_layout(dtype, grad.device(), grad.sizes(), strides);
    return object;
  };
  const at::ScalarType of_saved = value.dtype_of(), of_product = c10::promoteTypes(grad.scalar_type(), of_saved);
  py::object multiplier = saved;
  if (factor.kind == Factor::Kind::power) {
    if (factor.number != 2) {
      multiplier = recipe(formulas().power, {multiplier}, {py::float_(factor.number - 1)}, of_saved);
    }
    multiplier = recipe(formulas().multiply, {multiplier, py::float_(factor.number)}, {}, of_saved);
  }
  const Objects scales = {py::float_(factor.number), py::float_(factor.number)};  // a GPU's, and the CPU's
  py::object gradient = is_dropout ? recipe(formulas().dropout, {keep(grad), saved}, scales, of_product)
                                   : recipe(formulas().multiply, {multiplier, keep(grad)}, {}, of_product);
  if (dtype != of_product) {
    gradient = recipe(formulas().cast, {gradient}, {dtype_object(dtype)}, dtype);
  }
  return compute_fused(value_of(gradient), /*force=*/is_trial || is_dropout, /*needs_form=*/!is_trial);
}

// What decides whether a program gives the ops' bits, beside the numbers: the factor, but for dropout's scale, the dtypes of
// the incoming gradient, of what was saved and of the result, and the device.
using FactorConfiguration =
    std::tuple<Factor::Kind, double, Opcode, at::ScalarType, at::ScalarType, at::ScalarType, c10::DeviceIndex>;

// Of which a factor of that kind is tried.
py::object some_saved(const Factor& factor, at::TensorOptions options) {
  if (factor.kind != Factor::Kind::mask) {
    return keep(all_numbers(options, Order::second));
  }
  const at::Tensor mask = all_numbers(options.dtype(at::kFloat), Order::second) > 0;
  return recipe_of(ConfigurationOf::mask, NAME("bits"), formulas().unpack_mask, keep(pack_mask(mask)), {}, mask);
}

// Whether it does, as found when such a gradient was first wanted.
bool fits(const Factor& factor, const at::Tensor& grad, at::ScalarType of_saved, at::ScalarType dtype) {
  static auto& verdicts = *new Verdicts<FactorConfiguration>();
  const at::Device device = grad.device();                                      // the CPU's index is -1
  const double number = factor.kind == Factor::Kind::mask ? 0 : factor.number;  // of which there may be one for each step
  const FactorConfiguration configuration = {factor.kind, number, factor.opcode, grad.scalar_type(),
                                             of_saved,    dtype,  device.index()};
  return verdicts.find(configuration, device, [&] {
    const at::Tensor some_grad = all_numbers(grad.options(), Order::first);
    const py::object saved = some_saved(factor, grad.options().dtype(of_saved));
    const auto found = by_program(factor, some_grad, saved, dtype, /*as_saved=*/false, /*is_trial=*/true);
    const at::Tensor tensor = value_of(saved).tensor();
    const py::gil_scoped_release no_gil;  // the device may be waiting for a callback that needs it
    return found && is_identical(*found, factor.times(some_grad, tensor).to(dtype));
  });
}

// The gradient, in a half type if that is wanted.
at::Tensor gradient(const Factor& factor, const at::Tensor& grad, const py::object& saved, at::ScalarType half, bool as_saved) {
  Value& value = value_of(saved);
  const at::ScalarType of_grad = grad.scalar_type(), of_saved = value.dtype_of();
  const bool is_served = is_float_or_half(of_saved) || factor.kind == Factor::Kind::mask;
  if (value.sizes_of() == grad.sizes() && grad.dim() > 0 && is_float_or_half(of_grad) && is_served) {
    const at::ScalarType dtype = is_half(half) ? half : c10::promoteTypes(of_grad, of_saved);
    auto found = fits(factor, grad, of_saved, dtype) ? by_program(factor, grad, saved, dtype, as_saved) : std::nullopt;
    if (found) {
      return *std::move(found);
    }
  }
  const at::Tensor tensor = value.tensor();
  const py::gil_scoped_release no_gil;
  const at::Tensor result = factor.times(grad, tensor);
  return is_half(half) ? result.to(half) : result;
}

class ElementwisePreHook : public PreHook {
 public:
  explicit ElementwisePreHook(Node& node) : node_(node), derivatives_(derivatives_of(node)) {}

  bool takes_half() const override { return derivatives_.factors[0].opcode == Opcode::silu_gradient; }

  variable_list operator()(const variable_list& grads) override {
    const at::Tensor& grad = grads[0];
    if (!may_answer(node_, grad)) {
      return decline(node_, grads);
    }
    const bool as_saved = takes_half() && may_be_in_any_layout(node_, grad);
    return with_values(node_, derivatives_.saved, [&](const Objects& saved) {
      if (!may_be_faster(saved)) {
        return decline(node_, grads);
      }
      const Reading reading;
      for (const py::object& each : saved) {  // as the node reads them all
        if (each) {
          value_of(each).check_unwritten();
        }
      }
      // Of what the power alone has saved. Tanh saves its output, and of a product another gradient is needed in float32.
      const at::ScalarType half = as<PowBackward0>(&node_) ? half_of_cast_before(node_) : at::ScalarType::Undefined;
      variable_list results(saved.size());
      for (size_t i = 0; i < saved.size(); ++i) {
        if (is_needed(i)) {
          results[i] =
              gradient(derivatives_.factors[i], grad, saved[i], is_half(half) ? half : dtype_wanted(i, grad), as_saved);
        }
      }
      return answer(std::move(results), grads.size(), /*for_next=*/is_half(half) ? 1 : 0);
    });
  }

 private:
  bool is_needed(size_t i) const { return node_.task_should_compute_output(i); }

  // Whether some factor is a recipe, and the node need not read any that it doesn't use: the hooks outside wait to give it
  // back.
  bool may_be_faster(const Objects& saved) const {
    bool has_recipe = false;
    for (size_t i = 0; i < saved.size(); ++i) {
      if (is_needed(i) ? !saved[i] : saved[i] && value_of(saved[i]).follows_from_outside()) {
        return false;
      }
      has_recipe |= is_needed(i) && value_of(saved[i]).is_recipe();
    }
    return has_recipe;
  }

  // The half type in which the engine passes on a gradient of this shape; undefined if it adds up first what was broadcast.
  at::ScalarType dtype_wanted(size_t i, const at::Tensor& grad) const {
    const auto& edge = node_.next_edge(i);
    const auto& wanted = edge.function->input_metadata(edge.input_nr);
    const auto dtype = wanted.grad_dtype().value_or(at::ScalarType::Undefined);
    return is_half(dtype) && wanted.is_same_shape(grad) ? dtype : at::ScalarType::Undefined;
  }

  Node& node_;
  const Derivatives derivatives_;
};

}  // namespace

void add_elementwise_hooks(Node& node) {
  const auto is_recipe = [](const SavedVariable* saved) {
    const py::object value = value_behind(*saved);
    return value && value_of(value).is_recipe();
  };
  const auto saved = derivatives_of(node).saved;
  const bool saves_output_now = !saved.empty() && as<TanhBackward0>(&node);  // so that the node doesn't have it yet
  if (saves_output_now || std::any_of(saved.begin(), saved.end(), is_recipe)) {
    add_hooks<ElementwisePreHook>(node);
  }
}

void add_dropout_hooks(Node& node) {
  const auto add_if_dropout = [](Node* each) {
    if (as<NativeDropoutBackward0>(each)) {
      add_elementwise_hooks(*each);
    }
  };
  add_if_dropout(&node);
  for (const auto& edge : node.next_edges()) {
    add_if_dropout(edge.function.get());
  }
}

void add_square_hooks(Node& rsqrt) {
  if (!as<RsqrtBackward0>(&rsqrt)) {
    return;
  }
  Node* node = rsqrt.next_edge(0).function.get();
  while (node && (as<AddBackward0>(node) || as<MeanBackward1>(node))) {
    node = node->next_edge(0).function.get();
  }
  if (node) {
    add_elementwise_hooks(*node);
  }
}

}  // namespace fastact::recipes
