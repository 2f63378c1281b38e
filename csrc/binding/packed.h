// The packed path: allocation and dtype dispatch around the kernels, below autograd, for a strided tensor on the CPU or on
// CUDA. Nothing here checks its arguments.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "../activations.h"
#include "../kernels.h"
#include "../mask.h"
#include "older_torch.h"
#include "strides.h"

#if defined(FASTACT_CUDA)
// Not ATen/cuda/CUDAContext.h: it needs the headers of cuSPARSE and cuBLAS, which a lean toolkit lacks.
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace fastact {

template <class scalar_t>
constexpr Dtype dtype_of = std::is_same_v<scalar_t, double>     ? Dtype::float64
                           : std::is_same_v<scalar_t, float>    ? Dtype::float32
                           : std::is_same_v<scalar_t, at::Half> ? Dtype::float16
                                                                : Dtype::bfloat16;

// What differs between the devices: how memory is allocated and how a kernel is run. Memory comes from the allocators
// themselves: at 64 elements a call of at::empty_like through the dispatcher is a tenth of the whole op.
struct Cpu {
  static constexpr Device device = Device::cpu;

  static at::Tensor empty_format(const at::Tensor& like, at::MemoryFormat format) {
    return at::Tensor(at::detail::empty_cpu(like.sizes(), like.scalar_type(), /*pin_memory=*/false, format));
  }

  static at::Tensor empty_strided(const at::Tensor& like, at::IntArrayRef strides) {
    return at::Tensor(at::detail::empty_strided_cpu(like.sizes(), strides, like.scalar_type()));
  }

  static at::Tensor empty_bytes(const at::Tensor&, int64_t bytes) {
    return at::Tensor(at::detail::empty_cpu({bytes}, at::kByte));
  }

  // Calls kernel(begin, end) for ranges that begin where the kernels may begin.
  template <class Kernel>
  static void parallel(int64_t n, const Kernel& kernel) {
    const int64_t blocks = (n + cpu::kBlock - 1) / cpu::kBlock;
    at::parallel_for(0, blocks, at::internal::GRAIN_SIZE / cpu::kBlock, [&](int64_t first, int64_t last) {
      kernel(first * cpu::kBlock, std::min(n, last * cpu::kBlock));
    });
  }

  static void forward(
      const at::Tensor&, Formula formula, Dtype dtype, const void* activation, const void* x, Rows rows, void* y, uint8_t* mask,
      int64_t n) {
    parallel(n, [=](int64_t begin, int64_t end) { cpu::forward(formula, dtype, activation, x, rows, y, mask, begin, end); });
  }

  // `Where` is Rows or Walk.
  template <class Where>
  static void backward(
      const at::Tensor&, Dtype dtype, const void* grad, const Where& where, const uint8_t* mask, void* y, double inside,
      double outside, int64_t n) {
    parallel(n, [&](int64_t begin, int64_t end) { cpu::backward(dtype, grad, where, mask, y, inside, outside, begin, end); });
  }
};

#if defined(FASTACT_CUDA)
struct Cuda {
  static constexpr Device device = Device::cuda;

  static at::Tensor empty_format(const at::Tensor& like, at::MemoryFormat format) {
    return at::Tensor(at::detail::empty_cuda(like.sizes(), like.scalar_type(), like.device(), format));
  }

  static at::Tensor empty_strided(const at::Tensor& like, at::IntArrayRef strides) {
    return at::Tensor(at::detail::empty_strided_cuda(like.sizes(), strides, like.scalar_type(), like.device()));
  }

  static at::Tensor empty_bytes(const at::Tensor& like, int64_t bytes) {
    return at::Tensor(at::detail::empty_cuda({bytes}, at::kByte, like.device(), std::nullopt));
  }

  static void forward(
      const at::Tensor& output, Formula formula, Dtype dtype, const void* activation, const void* x, Rows rows, void* y,
      uint8_t* mask, int64_t n) {
    const c10::cuda::CUDAGuard guard(output.device());
    check_launch(cuda::forward(formula, dtype, activation, x, rows, y, mask, n, c10::cuda::getCurrentCUDAStream()));
  }

  template <class Where>
  static void backward(
      const at::Tensor& output, Dtype dtype, const void* grad, const Where& where, const uint8_t* mask, void* y, double inside,
      double outside, int64_t n) {
    const c10::cuda::CUDAGuard guard(output.device());
    check_launch(cuda::backward(dtype, grad, where, mask, y, inside, outside, n, c10::cuda::getCurrentCUDAStream()));
  }

  static void check_launch(cudaError_t error) {
    if (error == cudaErrorNoKernelImageForDevice) {
      int device, major, minor;
      C10_CUDA_CHECK(cudaGetDevice(&device));
      C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
      C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
      TORCH_CHECK(
          false, "activations_cuda: expected code for this GPU, of compute capability ", major, ".", minor,
          ", got a build for those in activations_cuda.build_info() alone; build it again with TORCH_CUDA_ARCH_LIST=", major,
          ".", minor);
    }
    C10_CUDA_CHECK(error);
  }
};
#endif

// As at::empty_like.
template <class Backend>
at::Tensor empty(const at::Tensor& like, at::MemoryFormat format) {
  if (format != at::MemoryFormat::Preserve) {
    return Backend::empty_format(like, format);
  }
  return like.is_non_overlapping_and_dense() ? Backend::empty_strided(like, like.strides()) : at::empty_like(like);
}

template <class Op, class Backend, class... Parameters>
void run(const at::Tensor& self, const at::Tensor& output, uint8_t* mask, Parameters... parameters) {
  if (output.numel() == 0) {
    return;
  }
  const Source source = source_of(self, output);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, output.scalar_type(), Op::name, [&] {
    const typename Op::template Activation<scalar_t, Backend::device> activation(parameters...);
    Backend::forward(
        output, Op::formula, dtype_of<scalar_t>, &activation, const_data<scalar_t>(source.tensor), source.rows,
        mutable_data<scalar_t>(output), mask, output.numel());
  });
}

template <class Op, class Backend, class... Parameters>
at::Tensor packed(const at::Tensor& self, Parameters... parameters) {
  at::Tensor output = empty<Backend>(self, output_format<Op>(self));
  run<Op, Backend>(self, output, nullptr, parameters...);
  return output;
}

template <class Op, class Backend, class... Parameters>
std::tuple<at::Tensor, at::Tensor> packed_with_mask(const at::Tensor& self, Parameters... parameters) {
  at::Tensor output = empty<Backend>(self, output_format<Op>(self));
  at::Tensor mask = Backend::empty_bytes(self, mask_bytes(self.numel()));
  run<Op, Backend>(self, output, mutable_data<uint8_t>(mask), parameters...);
  return {std::move(output), std::move(mask)};
}

// In place. A tensor that overlaps itself is not dense, and copy_ refuses it.
template <class Op, class Backend, class... Parameters>
void packed_inplace(const at::Tensor& self, Parameters... parameters) {
  if (self.is_non_overlapping_and_dense()) {
    run<Op, Backend>(self, self, nullptr, parameters...);
  } else {
    self.copy_(packed<Op, Backend>(self, parameters...));
  }
}

// In place. Returns beside the mask the tensor whose memory order it has: `self`, or where that isn't dense, a dense copy.
template <class Op, class Backend, class... Parameters>
std::tuple<at::Tensor, at::Tensor> packed_inplace_with_mask(const at::Tensor& self, Parameters... parameters) {
  if (self.is_non_overlapping_and_dense()) {
    at::Tensor mask = Backend::empty_bytes(self, mask_bytes(self.numel()));
    run<Op, Backend>(self, self, mutable_data<uint8_t>(mask), parameters...);
    return {self, std::move(mask)};
  }
  auto result = packed_with_mask<Op, Backend>(self, parameters...);
  self.copy_(std::get<0>(result));
  return result;
}

// Without strides the output has those of an elementwise op on `grad`, and the mask the output's memory order.
template <class Backend>
at::Tensor packed_backward(
    const at::Tensor& grad, const at::Tensor& mask, double inside, double outside, at::OptionalIntArrayRef mask_strides,
    at::OptionalIntArrayRef strides) {
  at::Tensor output = strides ? Backend::empty_strided(grad, *strides) : empty<Backend>(grad, elementwise_format(grad));
  if (output.numel() == 0) {
    return output;
  }
  const auto run = [&](const auto& where) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, output.scalar_type(), "masked_scale", [&] {
      Backend::backward(
          output, dtype_of<scalar_t>, const_data<scalar_t>(grad), where, const_data<uint8_t>(mask),
          mutable_data<scalar_t>(output), inside, outside, output.numel());
    });
  };
  const at::IntArrayRef order = mask_strides ? *mask_strides : output.strides();
  const bool in_order = !mask_strides || agree(output.sizes(), order, output.strides());
  if (in_order && agree(output.sizes(), grad.strides(), output.strides())) {
    run(Rows{output.numel(), output.numel()});
  } else if (const auto rows = in_order ? rows_of(grad, output) : std::nullopt) {
    run(*rows);
  } else {
    run(walk_of(grad, order, output));
  }
  return output;
}

}  // namespace fastact
