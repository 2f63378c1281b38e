// Layer norm's gradients: a pass over the rows, for that of the input, and one over the columns, for those of weight and bias.
//
// One H200, 16384 x 768, input in float32, with four stages of rows read ahead (there are more now): 80 us, ATen's 123; the
// gradient in bfloat16: 74 us, ATen's with the cast 163. The first pass runs at the rate of a copy, the second at 0.5 to 0.8 of
// it: the more rows each sum has, the more it waits for the last one.
#include "../layer_norm.h"

#include <cuda_pipeline.h>

#include <algorithm>

#include "../../typed.h"
#include "rows.cuh"

namespace fastact::cuda {
namespace {

constexpr int kThreads = 128;  // of a block, ATen's and ours

// Which vectors of a row a thread has: every kLanes-th.
template <int kLanes, int kVectors>
class Row {
 public:
  __device__ Row(const LayerNormGradient& norm, int row)
      : vectors_(norm.columns / kElements), lane_(threadIdx.x % kLanes), first_(int64_t{row} * vectors_) {}

  template <class Function>
  __device__ void for_each(const Function& function) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (i * kLanes + lane_ < vectors_) {
        function(i);
      }
    }
  }

  // As they are in memory: converting would wait for them.
  __device__ void read(const void* data, Element element, Vector (&to)[kVectors]) const { read(data, element, first_, to); }
  __device__ void read_weight(const LayerNormGradient& norm, Vector (&to)[kVectors]) const {
    if (norm.weight) {
      read(norm.weight, norm.weight_element, 0, to);
    }
  }

  template <class T>
  __device__ void write(const Vector (&from)[kVectors], Element element, void* data) const {
    for_each([&](int i) { store<T>(from[i], element, (first_ + i * kLanes + lane_) * kElements, data); });
  }

 private:
  __device__ void read(const void* data, Element element, int64_t first, Vector (&to)[kVectors]) const {
    for_each([&](int i) { cuda::read(data, element, first + i * kLanes + lane_, to[i]); });
  }

  const int vectors_, lane_;
  const int64_t first_;
};

// The two sums of a row. In ATen's block each thread has every 128th vector; then the threads of a warp are added up, halving
// their number, then the warps, with zeros for the warps that other blocks have. Here kLanes threads do the work of the block.
template <int kLanes, int kVectors>
class RowSums {
 public:
  __device__ void add(int vector, float grad, float centered, float rstd) {
    const int part = vector % kParts;
    sums_[0][part] += grad;
    sums_[1][part] = __fmaf_rn(rstd, grad * centered, sums_[1][part]);
  }

  __device__ void finish(float& of_grad, float& of_product) const {
    if constexpr (kLanes == kThreads) {
      float sums[2] = {sums_[0][0], sums_[1][0]};
      add_up<2>(sums, 16);
      add_up<1>(sums, 8);
      add_up<1>(sums, 4);
      add_up<1>(sums, 2);
      add_up<1>(sums, 1);
      __shared__ float of_warps[2][kThreads / kWarp];
      if (threadIdx.x % 16 == 0) {
        of_warps[threadIdx.x / 16 % 2][threadIdx.x / kWarp] = sums[0];
      }
      __syncthreads();
      const auto of_row = [](const float* parts) {
        return (parts[0] + 0.0f + (parts[2] + 0.0f)) + (parts[1] + 0.0f + (parts[3] + 0.0f));
      };
      of_grad = of_row(of_warps[0]);
      of_product = of_row(of_warps[1]);
    } else {
      float sum;
      if constexpr (kLanes == kWarp) {  // a thread has one of each warp of ATen's
        float sums[2 * kParts];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          sums[2 * part] = sums_[0][part];
          sums[2 * part + 1] = sums_[1][part];
        }
        add_up<8>(sums, 16);
        add_up<4>(sums, 8);
        add_up<2>(sums, 4);
        add_up<1>(sums, 2);
        add_up<1>(sums, 1);
        sums[0] += 0.0f;
        add_up<1>(sums, 16);
        add_up<1>(sums, 8);
        sum = sums[0];
      } else {  // four of each, and there are one or two
        constexpr int warps = kParts / 4;
        float sums[2 * warps];
#pragma unroll
        for (int i = 0; i < 2 * warps; ++i) {
          const float* const parts = sums_[i / warps] + i % warps * 4;
          sums[i] = (parts[0] + parts[2]) + (parts[1] + parts[3]);
        }
        add_up<2 * warps>(sums, 4);
        add_up<warps>(sums, 2);
        add_up<1>(sums, 1);
        sums[0] += 0.0f;
        if constexpr (warps == 2) {
          add_up<1>(sums, 2);
        }
        sum = sums[0];
      }
      of_grad = __shfl_sync(~0u, sum, 0, kLanes);
      of_product = __shfl_sync(~0u, sum, 4, kLanes);
    }
  }

 private:
  static constexpr int kParts = std::min(kThreads / kLanes, kVectors);

  float sums_[2][kParts] = {};
};

template <class T, int kLanes, int kVectors>
__global__ void __launch_bounds__(kThreads) input_kernel(const LayerNormGradient norm) {
  const int64_t row = int64_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / kLanes;
  const int read_row = static_cast<int>(min(row, int64_t{norm.rows - 1}));
  const Row<kLanes, kVectors> vectors(norm, read_row);
  Vector grad[kVectors], input[kVectors], weight[kVectors];
  vectors.read(norm.grad, norm.grad_element, grad);
  vectors.read(norm.input, norm.input_element, input);
  vectors.read_weight(norm, weight);
  const float mean = norm.mean[read_row], rstd = norm.rstd[read_row];
  RowSums<kLanes, kVectors> sums;
  vectors.for_each([&](int vector) {
    convert<T>(norm.grad_element, grad[vector]);
    convert<T>(norm.input_element, input[vector]);
    if (norm.weight) {
      convert<T>(norm.weight_element, weight[vector]);
    } else {
#pragma unroll
      for (float& each : weight[vector]) {
        each = 1;
      }
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      sums.add(vector, grad[vector][i] * weight[vector][i], input[vector][i] - mean, rstd);
    }
  });
  float of_grad, of_product;
  sums.finish(of_grad, of_product);
  if (row >= norm.rows) {
    return;
  }
  const float count = static_cast<float>(norm.columns), scale = 1 / count * rstd;
  vectors.for_each([&](int vector) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const float projected = of_product * (rstd * (input[vector][i] - mean));
      input[vector][i] = (__fmaf_rn(grad[vector][i], count * weight[vector][i], -projected) - of_grad) * scale;
    }
  });
  vectors.template write<T>(input, norm.input_element, norm.grad_input);
}

// How ATen shares out the rows: a sum has some, then as many after those of all others, and so on.
struct Shares {
  static constexpr int kMost = 32;  // that are added up in a block of ATen's

  int many, rows;
  bool are_results;

  Shares(const LayerNormGradient& norm, int multiprocessors) {
    constexpr int tile = LayerNormGradient::kTile, most_blocks = 64 * 1024 / 2;
    are_results = norm.rows > LayerNormGradient::kManyRows && norm.columns / tile < multiprocessors / 2;
    if (are_results) {
      rows = 32;
      many = std::min(most_blocks / ((norm.columns + tile - 1) / tile), (norm.rows + rows - 1) / rows);
    } else {
      rows = 8;
      many = norm.rows < 64 ? 1 : norm.rows < 128 ? 8 : norm.rows < 256 ? 16 : kMost;
    }
  }
};

constexpr int kRows = 8;                                     // of each share that are read at once
constexpr int kColumns = 16, kShares = kThreads / kColumns;  // of a block
constexpr int kPiece = 16;                                   // bytes

// Such rows. The input's may be in a half type as well, which leaves half of each row empty.
template <bool has_half_grad>
struct alignas(kPiece) Stage {
  static constexpr int kMany = has_half_grad ? 7 : 5;  // of which one is added up while the others are read: 46.6 KB at most

  float grad[kRows][has_half_grad ? kThreads / 2 : kThreads], input[kRows][kThreads];
  float mean[kShares][kRows], rstd[kShares][kRows];
};

// Copies a thread's pieces of a tensor from the rows of a share.
class Copy {
 public:
  __device__ Copy(const LayerNormGradient& norm, const Shares& shares, const void* data, Element element)
      : is_float_(element == Element::float32), row_bytes_(norm.columns * (is_float_ ? 4 : 2)) {
    const int pieces = kThreads * (is_float_ ? 4 : 2) / kPiece, of_share = pieces / kShares;
    piece_ = threadIdx.x % pieces;
    row_ = threadIdx.x / pieces;
    const int share = blockIdx.y * kShares + piece_ / of_share;
    const int offset = (blockIdx.x * of_share + piece_ % of_share) * kPiece;
    from_ = static_cast<const char*>(data) + (int64_t{share} * shares.rows + row_) * row_bytes_ + offset;
    rows_ = offset < row_bytes_ && share < shares.many ? norm.rows - share * shares.rows - row_ : 0;
  }

  template <int n>
  __device__ void start(float (&rows)[kRows][n]) const {
    float* const to = rows[row_] + piece_ * (kPiece / 4);
    if (0 < rows_) {
      __pipeline_memcpy_async(to, from_, kPiece);
    }
    if (is_float_ && kRows / 2 < rows_) {
      __pipeline_memcpy_async(to + kRows / 2 * n, from_ + kRows / 2 * row_bytes_, kPiece);
    }
  }

  __device__ void advance(int rows) {
    from_ += int64_t{rows} * row_bytes_;
    rows_ -= rows;
  }

 private:
  const bool is_float_;
  const int64_t row_bytes_;
  const char* from_;
  int piece_, row_, rows_;  // how many there still are
};

// A thread's numbers of a stage.
template <class T, int n>
__device__ void read(const float (&rows)[kRows][n], Element element, float (&to)[kRows]) {
  if (element == Element::float32) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      to[i] = rows[i][threadIdx.x];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      to[i] = static_cast<float>(reinterpret_cast<const T*>(rows[i])[threadIdx.x]);
    }
  }
}

template <class T, bool has_half_grad>
__global__ void __launch_bounds__(kThreads) sum_kernel(const LayerNormGradient norm, const Shares shares) {
  constexpr int many = Stage<has_half_grad>::kMany;
  __shared__ Stage<has_half_grad> stages[many];
  Copy of_grads(norm, shares, norm.grad, norm.grad_element), of_inputs(norm, shares, norm.input, norm.input_element);
  // Each thread also copies a mean or an rstd.
  const bool has_mean = threadIdx.x < kThreads / 2;
  const int row_of_share = threadIdx.x % kRows, its_share = threadIdx.x / kRows % kShares;
  int64_t its_row = int64_t{blockIdx.y * kShares + its_share} * shares.rows + row_of_share;
  const auto start = [&](int turn, int rows) {
    Stage<has_half_grad>& stage = stages[turn % many];
    of_grads.start(stage.grad);
    of_inputs.start(stage.input);
    if (its_row < norm.rows) {
      float* const to = (has_mean ? stage.mean : stage.rstd)[its_share] + row_of_share;
      __pipeline_memcpy_async(to, (has_mean ? norm.mean : norm.rstd) + its_row, sizeof(float));
    }
    __pipeline_commit();
    of_grads.advance(rows);
    of_inputs.advance(rows);
    its_row += rows;
  };
  // From a turn's rows to the next one's.
  const int in_share = shares.rows / kRows;
  const auto step = [&](int turn) { return (turn + 1) % in_share == 0 ? kRows + (shares.many - 1) * shares.rows : kRows; };

  const int column = blockIdx.x * kColumns + threadIdx.x % kColumns, share_of_block = threadIdx.x / kColumns;
  const int share = blockIdx.y * kShares + share_of_block;
  float of_grad = 0, of_product = 0;
  for (int turn = 0; turn < many - 1; ++turn) {
    start(turn, step(turn));
  }
  const int turns = ((norm.rows - 1) / (shares.many * shares.rows) + 1) * in_share;
  int rows = norm.rows - share * shares.rows;  // how many there still are
  for (int turn = 0; turn < turns; ++turn) {
    __pipeline_wait_prior(many - 2);
    __syncthreads();
    start(turn + many - 1, step(turn + many - 1));
    const Stage<has_half_grad>& stage = stages[turn % many];
    float grad[kRows], input[kRows], mean[kRows], rstd[kRows];
    read<T>(stage.grad, has_half_grad ? norm.grad_element : Element::float32, grad);
    read<T>(stage.input, norm.input_element, input);
    move<kRows>(stage.mean[share_of_block], mean);
    move<kRows>(stage.rstd[share_of_block], rstd);
    if (kRows <= rows) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        of_grad += grad[i];
        of_product = __fmaf_rn(rstd[i], grad[i] * (input[i] - mean[i]), of_product);
      }
    } else {  // ATen adds zeros for those that there aren't
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        of_grad += i < rows ? grad[i] : 0;
        of_product = i < rows ? __fmaf_rn(rstd[i], grad[i] * (input[i] - mean[i]), of_product) : of_product + 0.0f;
      }
    }
    rows -= step(turn);
  }
  if (column < norm.columns && share < shares.many) {
    const Element element = shares.are_results ? norm.weight_element : Element::float32;
    const float sums[2][1] = {{of_grad}, {of_product}};
    store<T>(sums[0], element, int64_t{share} * norm.columns + column, norm.sums);
    store<T>(sums[1], element, (int64_t{shares.many} + share) * norm.columns + column, norm.sums);
  }
}

// Adds up the sums, halving their number, a power of two.
template <class T>
__global__ void __launch_bounds__(kWarp* Shares::kMost) add_up_kernel(const LayerNormGradient norm) {
  __shared__ float sums[Shares::kMost][kWarp];
  const int column = blockIdx.x * kWarp + threadIdx.x;
  const int64_t row = int64_t{blockIdx.y} * blockDim.y + threadIdx.y;
  float& sum = sums[threadIdx.y][threadIdx.x];
  sum = column < norm.columns ? static_cast<const float*>(norm.sums)[row * norm.columns + column] : 0;
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) {
      sum += sums[threadIdx.y + half][threadIdx.x];
    }
  }
  if (threadIdx.y == 0 && column < norm.columns) {
    const float result[1] = {sum};
    store<T>(result, norm.weight_element, column, blockIdx.y == 0 ? norm.grad_bias : norm.grad_weight);
  }
}

unsigned int ceil_div(int64_t n, int by) {
  return static_cast<unsigned int>((n + by - 1) / by);
}

static_assert(kThreads * 8 * kElements == LayerNormGradient::kMostColumns);

template <class T>
void start(const LayerNormGradient& norm, const Shares& shares, Stream stream) {
  const auto input = [&](auto kernel, int lanes) {
    kernel<<<ceil_div(norm.rows, kThreads / lanes), kThreads, 0, stream>>>(norm);
  };
  norm.columns <= 128    ? input(input_kernel<T, 8, 4>, 8)
  : norm.columns <= 256  ? input(input_kernel<T, 8, 8>, 8)
  : norm.columns <= 512  ? input(input_kernel<T, kWarp, 4>, kWarp)
  : norm.columns <= 1024 ? input(input_kernel<T, kWarp, 8>, kWarp)
  : norm.columns <= 2048 ? input(input_kernel<T, kThreads, 4>, kThreads)
                         : input(input_kernel<T, kThreads, 8>, kThreads);
  if (!norm.sums) {
    return;
  }
  const auto sum = norm.grad_element == Element::float32 ? sum_kernel<T, false> : sum_kernel<T, true>;
  sum<<<dim3(ceil_div(norm.columns, kColumns), ceil_div(shares.many, kShares)), kThreads, 0, stream>>>(norm, shares);
  if (!shares.are_results) {
    add_up_kernel<T><<<dim3(ceil_div(norm.columns, kWarp), 2), dim3(kWarp, shares.many), 0, stream>>>(norm);
  }
}

Error shares_of(const LayerNormGradient& norm, Shares* result) {
  int device = 0, multiprocessors = 0;
  Error error = cudaGetDevice(&device);
  error = error ? error : cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  *result = Shares(norm, multiprocessors);
  return error;
}

}  // namespace

Error sums_of(const LayerNormGradient& norm, LayerNormSums* result) {
  Shares shares(norm, 0);
  const Error error = shares_of(norm, &shares);
  *result = {shares.many, shares.are_results};
  return error;
}

Error run(const LayerNormGradient& norm, Stream stream) {
  Shares shares(norm, 0);
  if (const Error error = shares_of(norm, &shares)) {
    return error;
  }
  const bool is_float16 = norm.grad_element == Element::float16 || norm.input_element == Element::float16;
  is_float16 ? start<c10::Half>(norm, shares, stream) : start<c10::BFloat16>(norm, shares, stream);
  return cudaGetLastError();
}

}  // namespace fastact::cuda
