// Batch norm's gradients where planes are innermost: a pass that adds up each channel, and one over the elements.
//
// ATen has a block for each channel. Each of its threads adds up every so many elements of every so many samples, which it
// reads one after another; then the threads of a warp are added up, halving their number, then the warps. Products, and what a
// thread gets from another, are rounded to the input's dtype. Here a thread has the sums of four of ATen's, or of one if planes
// aren't a multiple of four, and reads ahead. One H200, bfloat16, 256 x 64 x 112 x 112, 256 x 256 x 56 x 56 and 256 x 2048 x 7
// x 7: 855, 529 and 126 us, ATen's 5805, 1834 and 177; a copy of the same bytes takes 509, 503 and 67.
#include <algorithm>

#include "batch_norm.cuh"

namespace fastact::cuda {
namespace {

constexpr int kThreads = 512, kWarp = 32, kWarps = kThreads / kWarp;  // ATen's
constexpr int kBlock = 64;                                            // threads; 32 and 128 take as long
constexpr int kAhead = 8;  // vectors that a thread reads at once; 4 take up to 1.5 times as long

// How many of ATen's threads are next to each other in a plane. The others are in other samples.
int width_of(int plane) {
  int width = kWarp;
  while (width < plane && width < kThreads) {
    width *= 2;
  }
  return width;
}

// The places of a thread's vectors in a channel, of `threads` that share it: every `width` elements of a plane, then those of
// its next sample.
template <int n>
class Walk {
 public:
  __device__ Walk(const BatchNormGradient& norm, int channel, int thread, int threads, int width)
      : norm_(norm),
        channel_(channel),
        first_(thread * n % width),
        width_(width),
        apart_(threads * n / width),
        sample_(first_ < norm.plane ? thread * n / width : norm.samples),
        x_(first_) {}

  __device__ bool is_in() const { return sample_ < norm_.samples; }
  __device__ int offset() const { return (sample_ * norm_.channels + channel_) * norm_.plane + x_; }
  __device__ void next() {
    x_ += width_;
    if (x_ >= norm_.plane) {
      x_ = first_;
      sample_ += apart_;
    }
  }

 private:
  const BatchNormGradient& norm_;
  const int channel_, first_, width_, apart_;
  int sample_, x_;
};

// The next vectors of a thread, as many as it reads at once.
template <class Behind, int n>
class Vectors {
 public:
  __device__ bool any() const { return many_ > 0; }

  __device__ void start(const BatchNormGradient& norm, const Behind& behind, Walk<n>& walk) {
    many_ = 0;
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      offset_[u] = walk.is_in() ? walk.offset() : 0;  // past the end something is read that nobody needs, without a branch
      read_[u].start(norm, behind, offset_[u]);
      many_ += walk.is_in();
      walk.next();
    }
  }

  // Calls function(offset, grad, input) for each, in order.
  template <class T, class Function>
  __device__ void finish(const Behind& behind, const Function& function) const {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (u < many_) {
        float grad[n], input[n];
        read_[u].template finish<T>(behind, grad, input);
        function(offset_[u], grad, input);
      }
    }
  }

 private:
  Read<Behind, n> read_[kAhead];
  int offset_[kAhead], many_;
};

// Adds up the sums of kWarp of ATen's threads, of which each of ours has n, into those threads' first. The others' are garbage.
template <class T, int n>
__device__ void add_up(float (&sums)[n]) {
#pragma unroll
  for (int half = kWarp / 2; half > 0; half /= 2) {
    float others[n];
#pragma unroll
    for (int i = 0; i < n; ++i) {
      others[i] = half < n ? sums[(i + half) % n] : __shfl_down_sync(~0u, sums[i], half / n);
    }
    round<T>(others);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      sums[i] += others[i];
    }
  }
}

// A channel's sum of each warp, of the gradient or of its products with the centered input.
__device__ float* sums_of(const BatchNormGradient& norm, int which, int channel) {
  return norm.scratch + (which * int64_t{norm.channels} + channel) * kWarps;
}

// The last step of ATen's sum, over the warps. Each of our warps does it again.
template <class T>
__device__ float total_of(const BatchNormGradient& norm, int which, int channel) {
  const int lane = threadIdx.x % kWarp;
  float sum[] = {lane < kWarps ? sums_of(norm, which, channel)[lane] : 0};
  add_up<T>(sum);
  return __shfl_sync(~0u, sum[0], 0);
}

// Calls function(Type) with the weight's type: a thread reads too few of them to compile a kernel for each.
template <class T, class Function>
__device__ void with_weight_type(const BatchNormGradient& norm, const Function& function) {
  norm.has_float_weight ? function(Type<float>()) : function(Type<T>());
}

template <class T, int n, class Behind>
__global__ void __launch_bounds__(kBlock) sum_kernel(const BatchNormGradient norm, int width) {
  const int channel = blockIdx.x, thread = blockIdx.y * kBlock + threadIdx.x;
  const float mean = norm.mean[channel];
  Behind behind;
  with_weight_type<T>(norm, [&](auto type) { behind.read(norm, channel, type); });
  float of_grad[n] = {}, of_product[n] = {};
  Walk<n> walk(norm, channel, thread, kThreads / n, width);
  Vectors<Behind, n> now, next;  // where channels are few, threads are: each is to have something on its way all the time
  now.start(norm, behind, walk);
  while (now.any()) {
    next.start(norm, behind, walk);
    now.template finish<T>(behind, [&](int, const float (&grad)[n], const float (&input)[n]) {
      float product[n];
#pragma unroll
      for (int i = 0; i < n; ++i) {
        product[i] = grad[i] * (input[i] - mean);
      }
      round<T>(product);
#pragma unroll
      for (int i = 0; i < n; ++i) {
        of_grad[i] += grad[i];
        of_product[i] += product[i];
      }
    });
    now = next;
  }
  add_up<T>(of_grad);
  add_up<T>(of_product);
  constexpr int of_warp = kWarp / n;
  if (thread % of_warp == 0) {
    sums_of(norm, 0, channel)[thread / of_warp] = of_grad[0];
    sums_of(norm, 1, channel)[thread / of_warp] = of_product[0];
  }
}

template <class T, int n, class Behind>
__global__ void __launch_bounds__(kBlock) input_kernel(const BatchNormGradient norm, int width, float inverse) {
  const int channel = blockIdx.x, thread = blockIdx.y * kBlock + threadIdx.x;
  const float mean = norm.mean[channel], invstd = norm.invstd[channel];
  Behind behind;
  float weight[1];
  with_weight_type<T>(norm, [&](auto type) {
    behind.read(norm, channel, type);
    read_as_float<typename decltype(type)::type>(norm.weight, channel, weight);
  });
  const float of_grad = total_of<T>(norm, 0, channel), of_product = total_of<T>(norm, 1, channel);
  const float shift = of_grad * inverse, slope = of_product * inverse * invstd * invstd, scale = weight[0] * invstd;
  Walk<n> walk(norm, channel, thread, gridDim.y * kBlock, width);
  while (walk.is_in()) {
    Vectors<Behind, n> vectors;
    vectors.start(norm, behind, walk);
    vectors.template finish<T>(behind, [&](int offset, float (&grad)[n], const float (&input)[n]) {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        grad[i] = (__fmaf_rn(-slope, input[i] - mean, grad[i]) - shift) * scale;
      }
      store<T>(grad, kHalf, offset, norm.grad_input);
    });
  }
  if (thread == 0) {
    with_weight_type<T>(norm, [&](auto type) {
      using Weight = typename decltype(type)::type;
      static_cast<Weight*>(norm.grad_bias)[channel] = static_cast<Weight>(of_grad);
      static_cast<Weight*>(norm.grad_weight)[channel] = static_cast<Weight>(of_product * invstd);
    });
  }
}

template <class T, int n>
void start(const BatchNormGradient& norm, Stream stream) {
  const auto ceil_div = [](int a, int b) { return (a + b - 1) / b; };
  constexpr int most_blocks = 65535;  // of a grid's second dimension
  // The sums need ATen's width; the elements may come in any order.
  const int width = width_of(norm.plane), width_of_block = std::min(width, kBlock * n);
  const int with_sample = ceil_div(norm.samples, kBlock * n / width_of_block);  // blocks of a channel that each have one
  const int steps = with_sample * ceil_div(norm.plane, width_of_block);
  const int blocks = std::min({with_sample, ceil_div(steps, kAhead), most_blocks});
  const float inverse = 1.0f / static_cast<float>(norm.samples * norm.plane);
  with_behind<T, 1>(norm, [&](auto behind) {
    using Behind = typename decltype(behind)::type;
    sum_kernel<T, n, Behind><<<dim3(norm.channels, kThreads / n / kBlock), kBlock, 0, stream>>>(norm, width);
    input_kernel<T, n, Behind><<<dim3(norm.channels, blocks), kBlock, 0, stream>>>(norm, width_of_block, inverse);
  });
}

template <class T>
void start(const BatchNormGradient& norm, Stream stream) {
  constexpr int vector = 4;
  norm.plane % vector == 0 ? start<T, vector>(norm, stream) : start<T, 1>(norm, stream);
}

}  // namespace

int64_t scratch_floats_of_planes(const BatchNormGradient& norm) {
  return int64_t{2} * norm.channels * kWarps;
}

void start_planes(const BatchNormGradient& norm, Stream stream) {
  norm.element == Element::float16 ? start<c10::Half>(norm, stream) : start<c10::BFloat16>(norm, stream);
}

}  // namespace fastact::cuda
