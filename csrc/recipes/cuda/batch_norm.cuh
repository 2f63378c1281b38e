// What the kernels of batch norm's gradients share, whichever dimension is innermost.
#pragma once

#include <type_traits>

#include "../../mask.h"
#include "../../typed.h"
#include "../batch_norm.h"
#include "vectors.cuh"

namespace fastact::cuda {

// Where planes are innermost, in a file of their own.
int64_t scratch_floats_of_planes(const BatchNormGradient& norm);
void start_planes(const BatchNormGradient& norm, Stream stream);

namespace {

constexpr Element kHalf = Element::bfloat16;  // stands for either half type

template <int n>
__device__ void read_floats(const float* data, int first, float (&to)[n]) {
  move<n>(data + first, to);
}

template <class T, int n>
__device__ void read_as_float(const void* data, int first, float (&to)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    to[i] = static_cast<float>(static_cast<const T*>(data)[first + i]);
  }
}

// What is behind the norm makes of the gradient of its own output that of the norm's. `Nothing` leaves the gradient as
// it is.
struct Nothing {
  struct Bits {};

  template <class Weight>
  __device__ void read(const BatchNormGradient&, int, Type<Weight>) {}
  __device__ Bits bits(const BatchNormGradient&, int64_t) const { return {}; }
  template <int n>
  __device__ void apply(Bits, const float (&)[n], float (&)[n]) const {}
};

// A ReLU, from the norm's output, which is computed again. A vector's elements belong to kChannels channels: one each, or all
// to one.
template <class T, int kChannels>
class Relu : public Nothing {
 public:
  template <class Weight>
  __device__ void read(const BatchNormGradient& norm, int channel, Type<Weight>) {
    read_floats(norm.mean, channel, mean_);
    read_floats(norm.invstd, channel, invstd_);
    read_as_float<Weight>(norm.weight, channel, weight_);
    read_as_float<Weight>(norm.bias, channel, bias_);
  }

  template <int n>
  __device__ void apply(Bits, const float (&input)[n], float (&grad)[n]) const {
    constexpr float zero = std::is_same_v<T, c10::Half> ? 0x1p-25f : 0x1p-134f;  // the largest that is rounded to 0
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const int of = kChannels == 1 ? 0 : i;
      const float output = fastact::apply<Opcode::batch_norm>(input[i], mean_[of], invstd_[of], weight_[of], bias_[of]);
      grad[i] = output <= zero ? 0 : grad[i];
    }
  }

 private:
  float mean_[kChannels], invstd_[kChannels], weight_[kChannels], bias_[kChannels];
};

// Any activation that has a mask of where it passes the gradient.
struct Masked : Nothing {
  using Bits = unsigned int;

  __device__ Bits bits(const BatchNormGradient& norm, int64_t offset) const {
    return norm.mask[offset / kMaskBits] >> (offset % kMaskBits);
  }

  template <int n>
  __device__ void apply(Bits bits, const float (&)[n], float (&grad)[n]) const {
    static_assert(kMaskBits % n == 0);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      grad[i] = bits >> i & 1 ? grad[i] : 0;
    }
  }
};

// Calls function(Type) with what is behind the norm, for vectors of so many channels.
template <class T, int kChannels, class Function>
void with_behind(const BatchNormGradient& norm, const Function& function) {
  norm.bias ? function(Type<Relu<T, kChannels>>()) : norm.mask ? function(Type<Masked>()) : function(Type<Nothing>());
}

// A vector of the gradient and of the input.
template <class Behind, int n>
class Read {
 public:
  // The offset is a multiple of n.
  __device__ void start(const BatchNormGradient& norm, const Behind& behind, int64_t offset) {
    fetch(norm.grad, kHalf, false, offset, grad_);
    fetch(norm.input, kHalf, false, offset, input_);
    bits_ = behind.bits(norm, offset);
  }

  template <class T>
  __device__ void finish(const Behind& behind, float (&grad)[n], float (&input)[n]) const {
    convert<T>(grad_, kHalf, grad);
    convert<T>(input_, kHalf, input);
    behind.apply(bits_, input, grad);
  }

 private:
  uint32_t grad_[n], input_[n];
  typename Behind::Bits bits_;
};

}  // namespace
}  // namespace fastact::cuda
