// The smooth activations: PyTorch's own ops, and what more there is to know of each.
#pragma once

#include <ATen/ATen.h>

#include <limits>
#include <vector>

namespace fastact {

struct Smooth {
  int index;         // in kSmooth
  const char* name;  // as in the error messages and in code_backward

  at::Tensor (*forward)(const at::Tensor& input);
  at::Tensor& (*forward_inplace)(at::Tensor& input);
  at::Tensor (*backward)(const at::Tensor& grad, const at::Tensor& input);
  // What PyTorch's CUDA kernel multiplies a gradient by, in float32: one factor, or two, one after the other.
  std::vector<at::Tensor> (*factors)(const at::Tensor& input);

  struct OfDtype {
    // Of the code: what the inputs that share an output need. In float16 hundreds of inputs of silu, mish and gelu have the
    // output -0 and gradients that differ.
    int bits;
    // From how many elements on a table is faster than PyTorch's formula, forward without a gradient, on an H200. Of a smaller
    // tensor the entries that are met aren't in a cache yet; in float16 they are eight times as many.
    int64_t tabulates_from;
  } bfloat16, half;

  const OfDtype& of(at::ScalarType dtype) const { return dtype == at::kHalf ? half : bfloat16; }
};

using at::Tensor;

namespace smooth {

// Of an activation whose backward is a plain product.
template <Tensor (*backward)(const Tensor&, const Tensor&)>
std::vector<Tensor> one_factor(const Tensor& input) {
  return {backward(at::ones_like(input), input)};
}

// (grad * s) * (1 + x * (1 - s)), which the compiler contracts: float64 has room for the product, so there is one rounding.
inline std::vector<Tensor> factors_of_silu(const Tensor& input) {
  const Tensor s = at::sigmoid(input);
  const Tensor x = input.to(at::kDouble);
  return {s, (x * (1 - s).to(at::kDouble) + 1).to(at::kFloat)};
}

inline Tensor gelu(const Tensor& input) {
  return at::gelu(input);
}
inline Tensor& gelu_inplace(Tensor& input) {
  return at::gelu_(input);
}
inline Tensor gelu_backward(const Tensor& grad, const Tensor& input) {
  return at::gelu_backward(grad, input);
}

inline Tensor gelu_tanh(const Tensor& input) {
  return at::gelu(input, "tanh");
}
inline Tensor& gelu_tanh_inplace(Tensor& input) {
  return at::gelu_(input, "tanh");
}
inline Tensor gelu_tanh_backward(const Tensor& grad, const Tensor& input) {
  return at::gelu_backward(grad, input, "tanh");
}

}  // namespace smooth

enum SmoothIndex { kGelu, kGeluTanh, kSilu, kHardswish, kMish, kSmoothCount };

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

inline constexpr Smooth kSmooth[kSmoothCount] = {
    {kGelu,
     "gelu",
     smooth::gelu,
     smooth::gelu_inplace,
     smooth::gelu_backward,
     smooth::one_factor<smooth::gelu_backward>,
     {8, 1 << 22},
     {10, kNever}},
    {kGeluTanh,
     "gelu_tanh",
     smooth::gelu_tanh,
     smooth::gelu_tanh_inplace,
     smooth::gelu_tanh_backward,
     smooth::one_factor<smooth::gelu_tanh_backward>,
     {5, 1 << 25},
     {8, kNever}},
    {kSilu, "silu", at::silu, at::silu_, at::silu_backward, smooth::factors_of_silu, {5, 1 << 26}, {10, kNever}},
    {kHardswish,
     "hardswish",
     at::hardswish,
     at::hardswish_,
     at::hardswish_backward,
     smooth::one_factor<at::hardswish_backward>,
     {5, kNever},
     {8, kNever}},
    {kMish, "mish", at::mish, at::mish_, at::mish_backward, smooth::one_factor<at::mish_backward>, {5, 0}, {10, 1 << 22}},
};

// What a line of family.def says of a smooth member, as a type: its op has a name, parameters as the schema writes them,
// PyTorch's own op, the name of the last parameter if that is by keyword only, and an activation, which the parameters choose,
// or null where it is for PyTorch's op to say what is wrong with them.
template <SmoothIndex index>
struct SmoothOp {
  template <template <class...> class Use>
  using WithParameters = Use<SmoothOp>;
  static constexpr const char* name = kSmooth[index].name;
  static constexpr const char* overload = "";
  static constexpr const char* parameters = "";
  static constexpr const char* keyword = nullptr;
  static const Smooth* activation() { return &kSmooth[index]; }
  static Tensor pytorch(const Tensor& self) { return kSmooth[index].forward(self); }
  static Tensor& pytorch_inplace(Tensor& self) { return kSmooth[index].forward_inplace(self); }
};

using SiluOp = SmoothOp<kSilu>;
using HardswishOp = SmoothOp<kHardswish>;
using MishOp = SmoothOp<kMish>;

struct GeluOp {
  template <template <class...> class Use>
  using WithParameters = Use<GeluOp, c10::string_view>;
  static constexpr const char* name = "gelu";
  static constexpr const char* overload = "";
  static constexpr const char* parameters = ", *, str approximate='none'";
  static constexpr const char* keyword = "approximate";
  static const Smooth* activation(c10::string_view approximate) {
    return approximate == "none" ? &kSmooth[kGelu] : approximate == "tanh" ? &kSmooth[kGeluTanh] : nullptr;
  }
  static Tensor pytorch(const Tensor& self, c10::string_view approximate) { return at::gelu(self, approximate); }
  static Tensor& pytorch_inplace(Tensor& self, c10::string_view approximate) { return at::gelu_(self, approximate); }
};

}  // namespace fastact
