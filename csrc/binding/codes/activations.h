// The smooth activations: PyTorch's own ops, and what more there is to know of each. The kernels know of none.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/hardswish.h>
#include <ATen/ops/hardswish_backward.h>
#include <ATen/ops/mish.h>
#include <ATen/ops/mish_backward.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>

#include <array>
#include <atomic>
#include <limits>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "../../recipes/program.h"

namespace fastact {

using at::Tensor;

struct Tables;

// An activation's tables of one dtype on one device. They are made when they are first needed, and stay as long as the process.
struct TablesSlot {
  std::atomic<bool> is_filled{false};
  const Tables* tables = nullptr;  // null, once it is filled, where PyTorch's op must serve
};

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

struct Smooth {
  const char* name;  // as in the error messages and in code_backward

  Tensor (*forward)(const Tensor& input);
  Tensor& (*forward_inplace)(Tensor& input);
  Tensor (*backward)(const Tensor& grad, const Tensor& input);
  // What PyTorch's CUDA kernel multiplies a gradient by, in float32: one factor, or two, one after the other.
  std::vector<Tensor> (*factors)(const Tensor& input);

  struct OfDtype {
    // How wide the code is, one of the two in code_bits: what the inputs that share an output need. In float16 hundreds of
    // inputs of silu, mish and gelu have the output -0 and gradients that differ.
    int bits;
    // From how many elements on a table is faster than PyTorch's formula, forward without a gradient, on an H200. Of a smaller
    // tensor the entries that are met aren't in a cache yet; in float16 they are eight times as many.
    int64_t tabulates_from;
  } bfloat16, float16;

  // The instruction that is its gradient in float32 on a GPU, if there is one.
  std::optional<Opcode> gradient_opcode = std::nullopt;

  static constexpr int kDevices = 1 + 128;  // the CPU, and the GPUs
  mutable std::array<TablesSlot, 2 * kDevices> slots = {};

  const OfDtype& of(at::ScalarType dtype) const { return dtype == at::kHalf ? float16 : bfloat16; }

  TablesSlot& slot(at::ScalarType dtype, at::Device device) const {
    return slots[(dtype == at::kHalf ? kDevices : 0) + (device.is_cpu() ? 0 : 1 + device.index())];
  }
};

// The factors of an activation whose backward is a plain product.
template <Tensor (*backward)(const Tensor&, const Tensor&)>
std::vector<Tensor> one_factor(const Tensor& input) {
  return {backward(at::ones_like(input), input)};
}

// A member's struct has its activations, the parameters of its op, as types and as the schema writes them, the name of the last
// one if that is by keyword only, PyTorch's op, and `activation`, which the parameters choose: null where it is for PyTorch's
// op to say what is wrong with them. Most have one activation and no parameters.
template <class F>
struct WithoutParameters {
  using Parameters = std::tuple<>;
  static constexpr const char* parameters = "";
  static constexpr const char* keyword = nullptr;

  static const Smooth* activation() { return &F::activations[0]; }
  static Tensor pytorch(const Tensor& self) { return activation()->forward(self); }
  static Tensor& pytorch_inplace(Tensor& self) { return activation()->forward_inplace(self); }
};

struct Gelu {
  static Tensor none(const Tensor& input) { return at::gelu(input); }
  static Tensor& none_inplace(Tensor& input) { return at::gelu_(input); }
  static Tensor none_backward(const Tensor& grad, const Tensor& input) { return at::gelu_backward(grad, input); }

  static Tensor tanh(const Tensor& input) { return at::gelu(input, "tanh"); }
  static Tensor& tanh_inplace(Tensor& input) { return at::gelu_(input, "tanh"); }
  static Tensor tanh_backward(const Tensor& grad, const Tensor& input) { return at::gelu_backward(grad, input, "tanh"); }

  inline static const Smooth activations[] = {
      {"gelu", none, none_inplace, none_backward, one_factor<none_backward>, {8, 1 << 22}, {10, kNever}},
      {"gelu_tanh", tanh, tanh_inplace, tanh_backward, one_factor<tanh_backward>, {5, 1 << 25}, {8, kNever}},
  };

  using Parameters = std::tuple<std::string_view>;
  static constexpr const char* parameters = ", *, str approximate='none'";
  static constexpr const char* keyword = "approximate";

  static const Smooth* activation(std::string_view approximate) {
    return approximate == "none" ? &activations[0] : approximate == "tanh" ? &activations[1] : nullptr;
  }
  static Tensor pytorch(const Tensor& self, std::string_view approximate) { return at::gelu(self, approximate); }
  static Tensor& pytorch_inplace(Tensor& self, std::string_view approximate) { return at::gelu_(self, approximate); }
};

struct Silu : WithoutParameters<Silu> {
  // (grad * s) * (1 + x * (1 - s)), which the compiler contracts: float64 has room for the product, so there is one rounding.
  static std::vector<Tensor> factors(const Tensor& input) {
    const Tensor s = at::sigmoid(input);
    const Tensor x = input.to(at::kDouble);
    return {s, (x * (1 - s).to(at::kDouble) + 1).to(at::kFloat)};
  }

  inline static const Smooth activations[] = {
      {"silu", at::silu, at::silu_, at::silu_backward, factors, {5, 1 << 26}, {10, kNever}, Opcode::silu_gradient},
  };
};

struct Hardswish : WithoutParameters<Hardswish> {
  inline static const Smooth activations[] = {
      {"hardswish",
       at::hardswish,
       at::hardswish_,
       at::hardswish_backward,
       one_factor<at::hardswish_backward>,
       {5, kNever},
       {8, kNever}},
  };
};

struct Mish : WithoutParameters<Mish> {
  inline static const Smooth activations[] = {
      {"mish", at::mish, at::mish_, at::mish_backward, one_factor<at::mish_backward>, {5, 0}, {10, 1 << 22}},
  };
};

// The activation with this name, or null.
inline const Smooth* find_smooth(std::string_view name) {
#define SMOOTH(op, F)                         \
  for (const Smooth& each : F::activations) { \
    if (name == each.name) {                  \
      return &each;                           \
    }                                         \
  }
#include "../../family.def"
  return nullptr;
}

}  // namespace fastact
