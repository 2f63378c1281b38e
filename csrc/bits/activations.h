// The family: what each activation computes, written once for every dtype, device and path.
//
// A piecewise-linear activation f has two slopes, and a condition that chooses between them:
//
//     y = f(x),    dy/dx = f.inside(x) ? f.slopes().inside : f.slopes().outside
//
// The kernels evaluate a struct on float or double. The composite path evaluates the same struct's condition on an at::Tensor,
// and its value too where PyTorch's op won't do, which is why the members are templates and write conditions with `|`, `&`,
// `negation` and `where` only. Nothing here knows of ATen.
//
// On each device the formulas are those of PyTorch's own op there, to the last bit; where PyTorch's two ops differ, `device`
// decides. The binding makes a struct and the kernels evaluate it, compiled once for all releases of PyTorch: what differs
// between releases is for a constructor to decide.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "../host_device.h"
#include "../torch_version.h"

namespace fastact {

// PyTorch computes half types in float, the others in themselves.
template <class scalar_t>
using opmath_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

enum class Device { cpu, cuda };

// What PyTorch's own op saves for its backward pass: its input (in place a clone of that) or its output.
enum class Saves { input, output_in_place, output };

struct Slopes {
  double inside, outside;
};

// `|` and `&` of two bool are an int.
template <class Condition>
FASTACT_HOST_DEVICE auto negation(const Condition& condition) {
  if constexpr (std::is_integral_v<Condition>) {
    return !condition;
  } else {
    return ~condition;
  }
}

// For a tensor argument-dependent lookup finds at::where.
template <class T>
FASTACT_HOST_DEVICE T where(bool condition, T inside, T outside) {
  return condition ? inside : outside;
}

// NaN passes. PyTorch's CUDA op is made of fmax and fmin, which take +0 for the greater zero; its CPU op compares, and so
// returns the -0 that meets a bound of +0.
template <class T, class = std::enable_if_t<std::is_floating_point_v<T>>>
FASTACT_HOST_DEVICE T clamp(T x, T low, T high) {
#if defined(__CUDA_ARCH__)
#if __CUDA_ARCH__ >= 800  // forward with mask of 2^28 bfloat16 elements on an H200: 264 us against 269 us
  if constexpr (std::is_same_v<T, float>) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(low));
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(high));
    return x;
  }
#endif
  // Chosen at the end: with a branch around it every element would load its bounds anew.
  const T clamped = fmin(fmax(x, low), high);
  return x != x ? x : clamped;
#else
  const T raised = x < low ? low : x;
  return high < raised ? high : raised;
#endif
}

template <class T, class = std::enable_if_t<std::is_floating_point_v<T>>>
FASTACT_HOST_DEVICE T abs(T x) {
  return std::fabs(x);
}

// A parameter as PyTorch takes it where it computes in the dtype itself.
template <class scalar_t>
opmath_t<scalar_t> in_dtype(double parameter) {
  return static_cast<opmath_t<scalar_t>>(static_cast<scalar_t>(parameter));
}

// What most members share: any parameters are valid; the slope is 1 inside and 0 outside.
struct Activation {
  // Does `inside` compare the input itself with the parameters, and not something computed from it?
  static constexpr bool compares_input = true;
  static constexpr const char* requirement = "";
  template <class... Parameters>
  static bool accepts(Parameters...) {
    return true;
  }

  // Of PyTorch's own op. Its backward reads what it saved and the gradient, and where their layouts differ the one that it
  // reads first has more say in the result's.
  static constexpr Saves saves = Saves::input;
  static constexpr bool reads_gradient_first = true;
  // Does it allocate its output by empty_like? That differs from TensorIterator in the strides of dimensions of size 1.
  static constexpr bool uses_empty_like = false;
  // Can torch 2.11's DTensor shard it?
  static constexpr bool shards = true;

  Slopes slopes() const { return {1, 0}; }

  // Is inside(y) inside(x)? A compiled graph mostly saves y for the next layer, and need not save a condition then.
  bool output_tells() const { return false; }
};

// Where the process has the CPU flush subnormals (torch.set_flush_denormal), so do PyTorch's relu and hardtanh. A comparison
// alone may pass them, depending on the compiler; a product flushes, with a 1 that the compiler can't see. A tensor's ops are
// PyTorch's own.
template <class T, Device device>
struct Flushing {
  T one = 1;

  T flushed(T x) const { return x * one; }
  template <class Tensor>
  Tensor flushed(const Tensor& x) const {
    return x;
  }
};
template <class T>
struct Flushing<T, Device::cuda> {
  template <class X>
  FASTACT_HOST_DEVICE X flushed(const X& x) const {
    return x;
  }
};

template <class scalar_t, Device device>
struct Relu : Activation, Flushing<opmath_t<scalar_t>, device> {
  using T = opmath_t<scalar_t>;

  static constexpr Saves saves = Saves::output;
  static constexpr bool reads_gradient_first = false;

  bool output_tells() const { return true; }

  // NaN is inside.
  template <class X>
  FASTACT_HOST_DEVICE auto inside(const X& x) const {
    return negation(x <= T(0));
  }
  template <class X>
  FASTACT_HOST_DEVICE X operator()(const X& x) const {
    return clamp(this->flushed(x), T(0), std::numeric_limits<T>::infinity());
  }
};

template <class scalar_t, Device device>
struct LeakyRelu : Activation {
  using T = opmath_t<scalar_t>;
  T negative_slope;

  explicit LeakyRelu(double negative_slope) : negative_slope(static_cast<T>(negative_slope)) {}

  static constexpr Saves saves = Saves::output_in_place;
  static constexpr bool reads_gradient_first = false;

  Slopes slopes() const { return {1, negative_slope}; }

  bool output_tells() const { return negative_slope >= 0; }

  // NaN is outside.
  template <class X>
  FASTACT_HOST_DEVICE auto inside(const X& x) const {
    return x > T(0);
  }
  template <class X>
  FASTACT_HOST_DEVICE X operator()(const X& x) const {
    return where(inside(x), x, x * negative_slope);
  }
};

template <class scalar_t, Device device>
struct Hardtanh : Activation, Flushing<opmath_t<scalar_t>, device> {
  using T = opmath_t<scalar_t>;
  T min_val, max_val;

  Hardtanh(double min_val, double max_val) : min_val(static_cast<T>(min_val)), max_val(static_cast<T>(max_val)) {}

  static constexpr bool uses_empty_like = true;
  static constexpr const char* requirement = "min_val <= max_val";
  static bool accepts(double min_val, double max_val) { return !(min_val > max_val); }

  // NaN is inside.
  template <class X>
  FASTACT_HOST_DEVICE auto inside(const X& x) const {
    return negation((x <= min_val) | (x >= max_val));
  }
  template <class X>
  FASTACT_HOST_DEVICE X operator()(const X& x) const {
    return clamp(this->flushed(x), bound(min_val), bound(max_val));
  }

 private:
  // PyTorch's CPU op clamps in the dtype: a bound may round to 0.
  FASTACT_HOST_DEVICE static T bound(T value) {
    if constexpr (device == Device::cuda) {
      return value;
    } else {
      return in_dtype<scalar_t>(value);
    }
  }
};

template <class scalar_t, Device device>
struct Relu6 : Hardtanh<scalar_t, device> {
  Relu6() : Hardtanh<scalar_t, device>(0, 6) {}

  static bool accepts() { return true; }
};

template <class scalar_t, Device device>
struct Hardsigmoid : Activation {
  using T = opmath_t<scalar_t>;

  // One sixth rounded to float, in float64 too: PyTorch's kernels write 1.0f / 6.0f.
  Slopes slopes() const { return {1.0f / 6.0f, 0}; }

  // NaN is outside.
  template <class X>
  FASTACT_HOST_DEVICE auto inside(const X& x) const {
    return (x > T(-3)) & (x < T(3));
  }
  template <class X>
  FASTACT_HOST_DEVICE X operator()(const X& x) const {
    return sixth(clamp(x + T(3), T(0), T(6)));
  }

 private:
  // PyTorch's CUDA op multiplies by the rounded reciprocal, its CPU op divides.
  template <class X>
  FASTACT_HOST_DEVICE static X sixth(const X& x) {
    if constexpr (device == Device::cuda) {
      return x * T(1.0f / 6.0f);
    } else {
      return x / T(6);
    }
  }
};

// The form of ONNX's HardSigmoid and of Keras 2: max(0, min(1, alpha * x + beta)).
template <class scalar_t, Device device>
struct HardsigmoidAffine : Activation {
  using T = opmath_t<scalar_t>;
  T alpha, beta;

  HardsigmoidAffine(double alpha, double beta) : alpha(static_cast<T>(alpha)), beta(static_cast<T>(beta)) {}

  static constexpr bool compares_input = false;
  static constexpr const char* requirement = "a number other than 0 for alpha and a number for beta";
  static bool accepts(double alpha, double beta) { return (alpha < 0 || alpha > 0) && beta == beta; }

  Slopes slopes() const { return {alpha, 0}; }

  // NaN is outside.
  template <class X>
  FASTACT_HOST_DEVICE auto inside(const X& x) const {
    const X y = linear(x);
    return (y > T(0)) & (y < T(1));
  }
  template <class X>
  FASTACT_HOST_DEVICE X operator()(const X& x) const {
    return clamp(linear(x), T(0), T(1));
  }

 private:
  template <class X>
  FASTACT_HOST_DEVICE X linear(const X& x) const {
    return x * alpha + beta;
  }
};

template <class scalar_t, Device device>
struct Hardshrink : Activation {
  using T = opmath_t<scalar_t>;
  T lambd;

  explicit Hardshrink(double lambd) : lambd(in_dtype<scalar_t>(lambd)) {}

  static constexpr bool shards = false;

  // NaN is inside. One use of x: for what is used twice, compiled code may make a buffer.
  template <class X>
  FASTACT_HOST_DEVICE auto inside(const X& x) const {
    return negation(abs(x) <= lambd);
  }
  template <class X>
  FASTACT_HOST_DEVICE X operator()(const X& x) const {
    return where(inside(x), x, T(0));
  }
};

template <class scalar_t, Device device>
struct Softshrink : Hardshrink<scalar_t, device> {
  using T = opmath_t<scalar_t>;
  T shift;

  // What passes is decided in the dtype.
  explicit Softshrink(double lambd)
      : Hardshrink<scalar_t, device>(lambd),
        shift(device == Device::cuda || kCpuSoftshrinkShiftsInDtype ? this->lambd : static_cast<T>(lambd)) {}

  static constexpr bool shards = true;
  static constexpr const char* requirement = "a finite lambd >= 0";
  static bool accepts(double lambd) { return lambd >= 0 && lambd <= std::numeric_limits<double>::max(); }

  template <class X>
  FASTACT_HOST_DEVICE X operator()(const X& x) const {
    return x - clamp(x, -shift, shift);
  }
};

template <class scalar_t, Device device>
struct Threshold : Activation {
  using T = opmath_t<scalar_t>;
  T threshold, value;

  // PyTorch's CUDA op compares in the dtype, its CPU op in opmath.
  Threshold(double threshold, double value)
      : threshold(device == Device::cuda ? in_dtype<scalar_t>(threshold) : static_cast<T>(threshold)),
        value(in_dtype<scalar_t>(value)) {}

  static constexpr bool reads_gradient_first = false;
  static constexpr bool shards = false;

  // NaN is inside.
  template <class X>
  FASTACT_HOST_DEVICE auto inside(const X& x) const {
    return negation(x <= threshold);
  }
  template <class X>
  FASTACT_HOST_DEVICE X operator()(const X& x) const {
    return where(inside(x), x, value);
  }
};

}  // namespace fastact
