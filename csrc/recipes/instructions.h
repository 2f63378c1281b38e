// What the instructions of a program compute, once for both devices.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>

#include "../bits/activations.h"
#include "program.h"

namespace fastact {

template <Opcode opcode>
using OpcodeConstant = std::integral_constant<Opcode, opcode>;

// Calls function(OpcodeConstant).
template <class Function>
FASTACT_HOST_DEVICE void with_opcode(Opcode opcode, const Function& function) {
  switch (opcode) {
#define INSTRUCTION(name, references) \
  case Opcode::name:                  \
    return function(OpcodeConstant<Opcode::name>());
    FASTACT_INSTRUCTIONS(INSTRUCTION)
#undef INSTRUCTION
  }
}

FASTACT_HOST_DEVICE inline float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// The normalizations have the references mean, 1/std, weight and bias. Each repeats some kernels of PyTorch's, with the
// products and sums that compilers contract there.
template <Opcode opcode>
FASTACT_HOST_DEVICE float apply(float x, float a, float b, float c, float d) {
  if constexpr (opcode == Opcode::load) {
    return a;
  } else if constexpr (opcode == Opcode::add) {
    return fma(a, b, x);
  } else if constexpr (opcode == Opcode::subtract) {
    return fma(-a, b, x);
  } else if constexpr (opcode == Opcode::multiply) {
    return x * a;
  } else if constexpr (opcode == Opcode::multiply_add) {
    return fma(x, a, b);
  } else if constexpr (opcode == Opcode::divide) {
    return x / a;
  } else if constexpr (opcode == Opcode::power) {
    return a == 2 ? x * x : x * x * x;
  } else if constexpr (opcode == Opcode::batch_norm) {  // ATen's batch norm
    return fma(c * (x - a), b, d);
  } else if constexpr (opcode == Opcode::scaled_norm) {  // cuDNN's batch norm
    return fma(x - a, c * b, d);
  } else if constexpr (opcode == Opcode::affine_norm) {  // ATen's on the CPU, of batches and of groups
    const float scale = c * b;
    return fma(x, scale, fma(-a, scale, d));
  } else if constexpr (opcode == Opcode::folded_norm) {  // ATen's group norm, and cuDNN's batch norm of small channels
    const float scale = c * b;
    return fma(x, scale, d - a * scale);
  } else if constexpr (opcode == Opcode::centered_norm) {  // ATen's layer norm, and a form of its group norm
    return fma((x - a) * b, c, d);
  } else if constexpr (opcode == Opcode::clamp) {
    return clamp(x, a, b);
  } else if constexpr (opcode == Opcode::tanh) {
    return std::tanh(x);
  } else if constexpr (opcode == Opcode::tanh_gradient) {  // x becomes the gradient, of which a is the incoming one
    return a * fma(-x, x, 1.0f);
  } else if constexpr (opcode == Opcode::silu) {
    return x / (1.0f + std::exp(-x));
  } else if constexpr (opcode == Opcode::silu_gradient) {  // the same
    const float s = 1.0f / (1.0f + std::exp(-x));
    return a * s * fma(x, 1.0f - s, 1.0f);
  } else {
    return x;
  }
}

// Calls function(zero) with a zero of an element's type; float32's for bits.
template <class Function>
FASTACT_HOST_DEVICE void with_element(Element element, const Function& function) {
  switch (element) {
    case Element::float16:
      return function(c10::Half());
    case Element::bfloat16:
      return function(c10::BFloat16());
    default:
      return function(float());
  }
}

// The instruction `gradient` makes of its element that of the gradient: the incoming one, times two factors that a table has
// for each number. -0 stands for PyTorch's selecting +0, whatever the gradient.
FASTACT_HOST_DEVICE inline float scaled(float grad, float first, float second) {
  return first == 0 && std::signbit(first) ? 0.0f : grad * first * second;
}

// An instruction's result as its op stored it.
template <class scalar_t>
FASTACT_HOST_DEVICE float rounded(float x) {
  return static_cast<float>(static_cast<scalar_t>(x));
}

// A number's bits, as an index into a table of all numbers of its type.
template <class scalar_t>
FASTACT_HOST_DEVICE uint16_t bits_of(float x) {
  return static_cast<scalar_t>(x).x;
}

// The instruction `addend` makes of its element a number of a half type which, added to it, gives this sum, if there is one.
//
// Rounding is monotonic, so all between one such number and the exact difference are such as well. Of those that the type has,
// the one next to the difference is the difference rounded to the type, or a neighbor of that, whose bits are one more or one
// less. (One less than those of a zero is NaN, and isn't needed: below a positive difference that is rounded to zero, zero is
// next.) Where the element is infinite its difference is NaN, but any finite number will do.
template <class scalar_t>
FASTACT_HOST_DEVICE float addend(float x, float sum) {
  const auto number = [](int bits) -> float { return scalar_t(static_cast<uint16_t>(bits), scalar_t::from_bits()); };
  const int bits = bits_of<scalar_t>(x == sum ? std::copysign(0.0f, sum) : sum - x);
  const float nearest = number(bits), farther = number(bits + 1), closer = number(bits - 1);  // to zero
  const bool is_nearest = x + nearest == sum || sum != sum;
  return is_nearest ? nearest : x + farther == sum ? farther : closer;
}

}  // namespace fastact
