// Group norm's gradients: the sums over each plane, from them what each group's elements are scaled and shifted by, and the
// weights' gradients, and a pass over the elements.
//
// One H200, 64 x 128 x 64 x 64 in 32 groups: in float32 173 us, ATen's 247; the gradients and the input in bfloat16: 98 us,
// ATen's with the casts 497. A copy of the same bytes takes 167 and 88.
#include "../group_norm.h"

#include "../../typed.h"
#include "rows.cuh"

namespace fastact::cuda {
namespace {

static_assert(kElements == GroupNormGradient::kVector);

constexpr int kThreads = 128;     // of a block
constexpr int kVectors = 4;       // that a thread reads at once
constexpr int kManyLanes = 512;   // ATen's threads for a plane of at least as many elements; for smaller ones a warp
constexpr int kFewSamples = 128;  // that a thread of ATen's adds up, for the weights' gradients

// What the kernels leave for each other.
struct Scratch {
  float *of_grad, *of_product;  // sums over each plane: of the gradient, and of its product with the input
  float *slope, *shift;         // of each group of a sample

  explicit __host__ __device__ Scratch(const GroupNormGradient& norm)
      : of_grad(norm.scratch),
        of_product(of_grad + norm.planes()),
        slope(of_product + norm.planes()),
        shift(slope + norm.all_groups()) {}
};

// An element of the statistics or the weights.
template <class T>
__device__ float element(const GroupNormGradient& norm, const void* data, int64_t i) {
  return load<T>(data, norm.weight_element, i);
}

template <class T>
__device__ float weight(const GroupNormGradient& norm, int64_t channel) {
  return norm.weight ? element<T>(norm, norm.weight, channel) : 1.0f;
}

// The plane that kLanes threads have, and which of its vectors this one does: every kLanes-th, kVectors at once.
template <int kLanes>
class Plane {
 public:
  const int64_t index;

  explicit __device__ Plane(const GroupNormGradient& norm)
      : index(int64_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / kLanes),
        planes_(norm.planes()),
        vectors_(norm.plane / kElements) {}

  __device__ bool exists() const { return index < planes_; }

  // Calls function(grad, input, vector), with floats, for each vector.
  template <class T, class Function>
  __device__ void for_each(const GroupNormGradient& norm, const Function& function) const {
    const int64_t first = min(index, planes_ - 1) * vectors_;
    for (int lane = threadIdx.x % kLanes; lane < vectors_; lane += kVectors * kLanes) {
      Vector grad[kVectors], input[kVectors];
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if (lane + u * kLanes < vectors_) {
          read(norm.grad, norm.grad_element, first + lane + u * kLanes, grad[u]);
          read(norm.input, norm.input_element, first + lane + u * kLanes, input[u]);
        }
      }
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if (lane + u * kLanes < vectors_) {
          convert<T>(norm.grad_element, grad[u]);
          convert<T>(norm.input_element, input[u]);
          function(grad[u], input[u], first + lane + u * kLanes);
        }
      }
    }
  }

 private:
  const int64_t planes_;
  const int vectors_;
};

// In ATen's block each thread has every so many elements; then the threads of a warp are added up, halving their number, then
// the warps, with zeros up to a warp's number of them. Here a thread has the elements of four of ATen's.
template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads) sum_kernel(const GroupNormGradient norm) {
  const Plane<kLanes> plane(norm);
  float sum[2 * kElements] = {};
  plane.template for_each<T>(norm, [&](const Vector& grad, const Vector& input, int64_t) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      sum[2 * i] += grad[i];
      sum[2 * i + 1] = __fmaf_rn(grad[i], input[i], sum[2 * i + 1]);
    }
  });
  add_up<8>(sum, 4);
  add_up<4>(sum, 2);
  add_up<2>(sum, 1);
  add_up<1>(sum, 4);
  add_up<1>(sum, 2);
  const Scratch scratch(norm);
  float* const to = threadIdx.x % 2 == 0 ? scratch.of_grad : scratch.of_product;
  if constexpr (kLanes == kManyLanes / kElements) {
    constexpr int warps = kManyLanes / kWarp;
    __shared__ float of_warps[2][warps];
    if (threadIdx.x % 8 < 2) {
      of_warps[threadIdx.x % 2][threadIdx.x / 8] = sum[0];
    }
    __syncthreads();
    if (threadIdx.x < 2 * warps) {
      sum[0] = of_warps[threadIdx.x % 2][threadIdx.x / 2] + 0.0f;
      add_up<1>(sum, 16);
      add_up<1>(sum, 8);
      add_up<1>(sum, 4);
      add_up<1>(sum, 2);
      if (threadIdx.x < 2) {
        to[plane.index] = sum[0];
      }
    }
  } else if (plane.exists() && threadIdx.x % 8 < 2) {
    to[plane.index] = sum[0];
  }
}

// A warp for each group.
template <class T>
__global__ void __launch_bounds__(kThreads) scale_kernel(const GroupNormGradient norm) {
  const int64_t index = int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (index >= norm.all_groups()) {
    return;
  }
  const Scratch scratch(norm);
  const int channels = norm.channels / norm.groups, first = static_cast<int>(index % norm.groups) * channels;
  float of_grad = 0, of_product = 0;
  for (int i = threadIdx.x % kWarp; i < channels; i += kWarp) {
    const int64_t plane = index * channels + i;
    const float scale = weight<T>(norm, first + i);
    of_grad = __fmaf_rn(scratch.of_grad[plane], scale, of_grad);
    of_product = __fmaf_rn(scratch.of_product[plane], scale, of_product);
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    add_up<1>(&of_grad, distance);
    add_up<1>(&of_product, distance);
  }
  if (threadIdx.x % kWarp == 0) {
    const float mean = element<T>(norm, norm.mean, index), rstd = element<T>(norm, norm.rstd, index);
    const float per_element = 1.0f / static_cast<float>(int64_t{channels} * norm.plane);
    const float slope = __fmaf_rn(of_grad, mean, -of_product) * rstd * rstd * rstd * per_element;
    scratch.slope[index] = slope;
    scratch.shift[index] = __fmaf_rn(-slope, mean, -(of_grad * rstd * per_element));
  }
}

template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads) input_kernel(const GroupNormGradient norm) {
  const Plane<kLanes> plane(norm);
  if (!plane.exists()) {
    return;
  }
  const Scratch scratch(norm);
  const int64_t group = plane.index / (norm.channels / norm.groups);
  const float scale = element<T>(norm, norm.rstd, group) * weight<T>(norm, plane.index % norm.channels);
  const float slope = scratch.slope[group], shift = scratch.shift[group];
  plane.template for_each<T>(norm, [&](const Vector& grad, const Vector& input, int64_t vector) {
    Vector result;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      result[i] = __fmaf_rn(scale, grad[i], slope * input[i]) + shift;
    }
    store<T>(result, norm.input_element, vector * kElements, norm.grad_input);
  });
}

// A sum over the samples is one thread's of ATen's if they are few; otherwise each thread of a warp has every 32nd, and the
// threads are added up, halving their number.
template <class T, int kLanes>
__global__ void __launch_bounds__(kWarp* kLanes) weight_kernel(const GroupNormGradient norm) {
  constexpr int together = kLanes == 1 ? 16 : 4;  // samples that a thread reads at once
  const Scratch scratch(norm);
  const int channel = blockIdx.x * kWarp + threadIdx.x, lane = threadIdx.y;
  const int channels = norm.channels / norm.groups;
  float of_bias = 0, of_weight = 0;
  for (int sample = lane; channel < norm.channels && sample < norm.samples; sample += together * kLanes) {
    float grad[together], product[together], mean[together], rstd[together];
#pragma unroll
    for (int u = 0; u < together; ++u) {
      const int64_t read = min(sample + u * kLanes, norm.samples - 1), group = read * norm.groups + channel / channels;
      grad[u] = scratch.of_grad[read * norm.channels + channel];
      product[u] = scratch.of_product[read * norm.channels + channel];
      mean[u] = element<T>(norm, norm.mean, group);
      rstd[u] = element<T>(norm, norm.rstd, group);
    }
#pragma unroll
    for (int u = 0; u < together; ++u) {
      if (sample + u * kLanes < norm.samples) {
        of_bias += grad[u];
        of_weight = __fmaf_rn(__fmaf_rn(-grad[u], mean[u], product[u]), rstd[u], of_weight);
      }
    }
  }
  if constexpr (kLanes > 1) {
    __shared__ float sums[2][kLanes][kWarp];
    sums[0][lane][threadIdx.x] = of_bias;
    sums[1][lane][threadIdx.x] = of_weight;
    for (int half = kLanes / 2; half > 0; half /= 2) {
      __syncthreads();
      if (lane < half) {
        sums[0][lane][threadIdx.x] += sums[0][lane + half][threadIdx.x];
        sums[1][lane][threadIdx.x] += sums[1][lane + half][threadIdx.x];
      }
    }
    of_bias = sums[0][0][threadIdx.x];
    of_weight = sums[1][0][threadIdx.x];
  }
  if (lane == 0 && channel < norm.channels) {
    const float bias[1] = {of_bias}, weight[1] = {of_weight};
    if (norm.grad_bias) {
      store<T>(bias, norm.weight_element, channel, norm.grad_bias);
    }
    if (norm.grad_weight) {
      store<T>(weight, norm.weight_element, channel, norm.grad_weight);
    }
  }
}

unsigned int ceil_div(int64_t n, int by) {
  return static_cast<unsigned int>((n + by - 1) / by);
}

template <class T, int kLanes>
void start_planes(const GroupNormGradient& norm, Stream stream) {
  const unsigned int blocks = ceil_div(norm.planes(), kThreads / kLanes);
  sum_kernel<T, kLanes><<<blocks, kThreads, 0, stream>>>(norm);
  scale_kernel<T><<<ceil_div(norm.all_groups(), kThreads / kWarp), kThreads, 0, stream>>>(norm);
  input_kernel<T, kLanes><<<blocks, kThreads, 0, stream>>>(norm);
}

template <class T>
void start(const GroupNormGradient& norm, Stream stream) {
  norm.plane < kManyLanes ? start_planes<T, kWarp / kElements>(norm, stream)
                          : start_planes<T, kManyLanes / kElements>(norm, stream);
  if (norm.grad_weight || norm.grad_bias) {
    const unsigned int blocks = ceil_div(norm.channels, kWarp);
    norm.samples <= kFewSamples ? weight_kernel<T, 1><<<blocks, dim3(kWarp, 1), 0, stream>>>(norm)
                                : weight_kernel<T, kWarp><<<blocks, dim3(kWarp, kWarp), 0, stream>>>(norm);
  }
}

}  // namespace

Error run(const GroupNormGradient& norm, Stream stream) {
  const bool is_float16 = norm.grad_element == Element::float16 || norm.input_element == Element::float16;
  is_float16 ? start<c10::Half>(norm, stream) : start<c10::BFloat16>(norm, stream);
  return cudaGetLastError();
}

}  // namespace fastact::cuda
