// Batch norm's gradients where channels are innermost: a pass that sums up each channel, and one over the elements.
//
// In ATen's reduction a thread has a channel, every so many rows, and four pairs of sums, to which it adds a row each in turn;
// then the four are added up, then the threads of a block, halving their number, then the blocks, the same way. Here a thread
// has eight channels, which it reads at once, and one of the four. One H100, bfloat16, 256 x 64 x 112 x 112 and 256 x 2048 x 7
// x 7: 711 and 119 us, ATen's 1063 and 168; a copy of the same bytes takes 688 and 95.
#include "batch_norm.cuh"

#include <algorithm>

namespace fastact::cuda {
namespace {

constexpr int kVector = BatchNormGradient::kVector, kSums = 4;
constexpr int kThreads = 512;  // of ATen's block, and at most of ours
constexpr int kRows = 4;       // that a thread reads at once
constexpr int kColumns = 8;    // vectors of a block's rows, at most
constexpr int kTogether = 8;   // blocks' sums that a thread reads at once
constexpr int kBlock = 128;    // of the pass over the elements

using Channels = float[kVector];

// How ATen's reduction is launched: a block has `lanes` rows of threads, and there are `blocks` of them for each channel.
struct Lanes {
  int lanes, blocks;

  Lanes(int rows, int channels) {
    constexpr int tile = 32, rows_of_thread = 16, most = 128, least = 8;
    const auto power = [](int n) {
      int result = 1;
      while (result <= n / 2) {
        result *= 2;
      }
      return result;
    };
    const int columns = std::min(power(channels), tile);
    lanes = std::min(power((rows + rows_of_thread - 1) / rows_of_thread), kThreads / columns);
    blocks = std::min((rows + lanes * rows_of_thread - 1) / (lanes * rows_of_thread), most);
    blocks = blocks < least ? 1 : blocks;
  }
};

// Adds up a column's `many` floats, `pitch` apart in shared memory, by halves: many is a power of two.
__device__ void add_up(float* sums, int many, int pitch, int thread, int threads) {
  for (int half = many / 2; half > 0; half /= 2) {
    __syncthreads();
    for (int i = thread; i < half * pitch; i += threads) {
      sums[i] += sums[i + half * pitch];
    }
  }
  __syncthreads();
}

// Writes each block's sums, of the gradient and of its products with the centered input, to the scratch: [2, blocks, channels].
template <class T, class Weight, class Behind>
__global__ void __launch_bounds__(kThreads) sum_kernel(const BatchNormGradient norm, Lanes lanes) {
  extern __shared__ float sums[];  // [kSums, lanes, 2, channels of the block]
  const int vectors = norm.channels / kVector, vector = blockIdx.x * blockDim.x + threadIdx.x;
  Channels of_grad = {}, of_product = {};
  if (vector < vectors) {
    const int channel = vector * kVector;
    Channels mean;
    read_floats(norm.mean, channel, mean);
    Behind behind;
    behind.read(norm, channel, Type<Weight>());
    const int apart = lanes.lanes * lanes.blocks, step = kSums * apart;
    const int first = blockIdx.y * lanes.lanes + threadIdx.z + threadIdx.y * apart;
    for (int row = first; row < norm.samples; row += kRows * step) {
      Read<Behind, kVector> read[kRows];
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        read[u].start(norm, behind, (int64_t{min(row + u * step, norm.samples - 1)} * vectors + vector) * kVector);
      }
#pragma unroll
      for (int u = 0; u < kRows; ++u) {
        if (row + u * step < norm.samples) {
          Channels grad, input;
          read[u].template finish<T>(behind, grad, input);
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            of_grad[i] += grad[i];
            of_product[i] = __fmaf_rn(grad[i], input[i] - mean[i], of_product[i]);
          }
        }
      }
    }
  }
  const int width = blockDim.x * kVector, pitch = 2 * width;
  const int at = (threadIdx.y * lanes.lanes + threadIdx.z) * pitch + threadIdx.x * kVector;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    sums[at + i] = of_grad[i];
    sums[at + width + i] = of_product[i];
  }
  __syncthreads();
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + kSums * threadIdx.z);
  const int threads = blockDim.x * kSums * lanes.lanes, size = lanes.lanes * pitch;
  for (int i = thread; i < size; i += threads) {
    for (int k = 1; k < kSums; ++k) {
      sums[i] += sums[i + k * size];
    }
  }
  add_up(sums, lanes.lanes, pitch, thread, threads);
  for (int i = thread; i < pitch; i += threads) {
    const int channel = blockIdx.x * width + i % width;
    if (channel < norm.channels) {
      norm.scratch[(i / width * lanes.blocks + blockIdx.y) * int64_t{norm.channels} + channel] = sums[i];
    }
  }
}

// Adds up the blocks' sums into the first ones, and writes the gradients of weight and bias.
template <class Weight>
__global__ void __launch_bounds__(kThreads) add_up_kernel(const BatchNormGradient norm, int blocks) {
  __shared__ float sums[2 * kThreads];  // [lanes, 2, channels of the block]
  const int channel = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.y;
  const auto of_block = [&](int which, int block) -> float& {
    return norm.scratch[(which * blocks + block) * int64_t{norm.channels} + channel];
  };
  const bool is_one = blocks == 1;
  for (int which = 0; which < 2; ++which) {
    float sum = is_one && channel < norm.channels ? of_block(which, 0) : 0;
    for (int block = lane; !is_one && block < blocks; block += kTogether * blockDim.y) {
      float part[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        const int other = block + u * static_cast<int>(blockDim.y);
        part[u] = other < blocks && channel < norm.channels ? of_block(which, other) : 0;
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        if (block + u * static_cast<int>(blockDim.y) < blocks) {
          sum += part[u];
        }
      }
    }
    sums[(lane * 2 + which) * blockDim.x + threadIdx.x] = sum;
  }
  if (!is_one) {
    add_up(sums, blockDim.y, 2 * blockDim.x, threadIdx.x + blockDim.x * lane, blockDim.x * blockDim.y);
  }
  if (lane == 0 && channel < norm.channels) {
    const float of_grad = sums[threadIdx.x], of_product = sums[blockDim.x + threadIdx.x];
    of_block(0, 0) = of_grad;
    of_block(1, 0) = of_product;
    static_cast<Weight*>(norm.grad_bias)[channel] = static_cast<Weight>(of_grad);
    static_cast<Weight*>(norm.grad_weight)[channel] = static_cast<Weight>(of_product * norm.invstd[channel]);
  }
}

template <class T, class Weight, class Behind>
__global__ void __launch_bounds__(kBlock) input_kernel(const BatchNormGradient norm, int blocks, float inverse_rows) {
  const int vectors = norm.channels / kVector, apart = (norm.samples + kRows - 1) / kRows;
  const unsigned int thread = blockIdx.x * kBlock + threadIdx.x;
  const int first = static_cast<int>(thread / vectors), vector = static_cast<int>(thread % vectors);
  if (first >= apart) {
    return;
  }
  Behind behind;
  Read<Behind, kVector> read[kRows];
  const auto offset_of = [&](int u) {
    return (int64_t{min(first + u * apart, norm.samples - 1)} * vectors + vector) * kVector;
  };
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    read[u].start(norm, behind, offset_of(u));
  }
  const int channel = vector * kVector;
  behind.read(norm, channel, Type<Weight>());
  Channels mean, invstd, of_grad, slope, scale;
  read_floats(norm.mean, channel, mean);
  read_floats(norm.invstd, channel, invstd);
  read_floats(norm.scratch, channel, of_grad);
  read_floats(norm.scratch + int64_t{blocks} * norm.channels, channel, slope);
  read_as_float<Weight>(norm.weight, channel, scale);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    slope[i] = invstd[i] * invstd[i] * slope[i] * inverse_rows;
    scale[i] = scale[i] * invstd[i];
  }
#pragma unroll
  for (int u = 0; u < kRows; ++u) {
    if (first + u * apart < norm.samples) {
      Channels grad, input;
      read[u].template finish<T>(behind, grad, input);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float centered = __fmaf_rn(-of_grad[i], inverse_rows, grad[i]);
        grad[i] = __fmaf_rn(mean[i] - input[i], slope[i], centered) * scale[i];
      }
      store<T>(grad, kHalf, offset_of(u), norm.grad_input);
    }
  }
}

template <class T, class Weight, class Behind>
void start_with(const BatchNormGradient& norm, Stream stream) {
  const Lanes lanes(norm.samples, norm.channels);
  const auto ceil_div = [](int64_t n, int64_t by) { return static_cast<unsigned int>((n + by - 1) / by); };
  const int vectors = norm.channels / kVector;
  const int columns = std::min({vectors, kColumns, kThreads / (kSums * lanes.lanes)});
  const dim3 threads(columns, kSums, lanes.lanes);
  const size_t bytes = sizeof(float) * kSums * lanes.lanes * 2 * columns * kVector;
  sum_kernel<T, Weight, Behind><<<dim3(ceil_div(vectors, columns), lanes.blocks), threads, bytes, stream>>>(norm, lanes);
  const int channels = std::min(32, kThreads / lanes.lanes);
  add_up_kernel<Weight><<<ceil_div(norm.channels, channels), dim3(channels, lanes.lanes), 0, stream>>>(norm, lanes.blocks);
  const int64_t vectors_of_rows = ceil_div(norm.samples, kRows) * int64_t{vectors};
  input_kernel<T, Weight, Behind>
      <<<ceil_div(vectors_of_rows, kBlock), kBlock, 0, stream>>>(norm, lanes.blocks, static_cast<float>(1.0 / norm.samples));
}

template <class T, class Weight>
void start(const BatchNormGradient& norm, Stream stream) {
  with_behind<T, kVector>(norm, [&](auto behind) { start_with<T, Weight, typename decltype(behind)::type>(norm, stream); });
}

bool has_planes(const BatchNormGradient& norm) {
  return norm.plane > 1;
}

}  // namespace

int64_t scratch_floats(const BatchNormGradient& norm) {
  return has_planes(norm) ? scratch_floats_of_planes(norm)
                          : int64_t{2} * Lanes(norm.samples, norm.channels).blocks * norm.channels;
}

Error run(const BatchNormGradient& norm, Stream stream) {
  if (has_planes(norm)) {
    start_planes(norm, stream);
  } else if (norm.element == Element::float16) {
    norm.has_float_weight ? start<c10::Half, float>(norm, stream) : start<c10::Half, c10::Half>(norm, stream);
  } else {
    norm.has_float_weight ? start<c10::BFloat16, float>(norm, stream) : start<c10::BFloat16, c10::BFloat16>(norm, stream);
  }
  return cudaGetLastError();
}

}  // namespace fastact::cuda
