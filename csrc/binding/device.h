// What differs between the devices: how memory is allocated and how a kernel is run. Memory comes from the allocators
// themselves, since a call of at::empty_like through the dispatcher costs a tenth of the whole op.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "../kernels.h"
#include "../mask.h"

#if defined(FASTACT_CUDA)
// Not ATen/cuda/CUDAContext.h: it needs the headers of cuSPARSE and cuBLAS, which a lean toolkit lacks.
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace fastact {

struct Cpu {
  // As at::empty_like.
  static at::Tensor empty(const at::Tensor& like, at::MemoryFormat format) {
    if (format != at::MemoryFormat::Preserve) {
      return at::Tensor(at::detail::empty_cpu(like.sizes(), like.scalar_type(), /*pin_memory=*/false, format));
    }
    if (like.is_non_overlapping_and_dense()) {
      return at::Tensor(at::detail::empty_strided_cpu(like.sizes(), like.strides(), like.scalar_type()));
    }
    return at::empty_like(like);
  }

  static at::Tensor empty_mask(const at::Tensor& like) {
    return at::Tensor(at::detail::empty_cpu({mask_bytes(like.numel())}, at::kByte));
  }

  // Calls kernel(begin, end) for ranges that begin where the kernels may begin.
  template <class Kernel>
  static void parallel(int64_t n, const Kernel& kernel) {
    const int64_t blocks = (n + cpu::kBlock - 1) / cpu::kBlock;
    at::parallel_for(0, blocks, at::internal::GRAIN_SIZE / cpu::kBlock, [&](int64_t first, int64_t last) {
      kernel(first * cpu::kBlock, std::min(n, last * cpu::kBlock));
    });
  }

  template <class F, class scalar_t>
  static void forward(const at::Tensor&, F f, const scalar_t* x, Rows rows, scalar_t* y, uint8_t* mask, int64_t n) {
    parallel(n, [=](int64_t begin, int64_t end) { cpu::forward<F, scalar_t>(f, x, rows, y, mask, begin, end); });
  }

  template <class scalar_t, class T>
  static void masked_scale(
      const at::Tensor&, const scalar_t* grad, Rows rows, const uint8_t* mask, scalar_t* y, T inside, T outside, int64_t n) {
    parallel(
        n, [=](int64_t begin, int64_t end) { cpu::masked_scale<scalar_t>(grad, rows, mask, y, inside, outside, begin, end); });
  }
};

#if defined(FASTACT_CUDA)
struct Cuda {
  // As at::empty_like.
  static at::Tensor empty(const at::Tensor& like, at::MemoryFormat format) {
    if (format != at::MemoryFormat::Preserve) {
      return at::Tensor(at::detail::empty_cuda(like.sizes(), like.scalar_type(), like.device(), format));
    }
    if (like.is_non_overlapping_and_dense()) {
      return at::Tensor(at::detail::empty_strided_cuda(like.sizes(), like.strides(), like.scalar_type(), like.device()));
    }
    return at::empty_like(like);
  }

  static at::Tensor empty_mask(const at::Tensor& like) {
    return at::Tensor(at::detail::empty_cuda({mask_bytes(like.numel())}, at::kByte, like.device(), std::nullopt));
  }

  template <class F, class scalar_t>
  static void forward(const at::Tensor& output, F f, const scalar_t* x, Rows rows, scalar_t* y, uint8_t* mask, int64_t n) {
    const c10::cuda::CUDAGuard guard(output.device());
    C10_CUDA_CHECK((cuda::forward<F, scalar_t>(f, x, rows, y, mask, n, c10::cuda::getCurrentCUDAStream())));
  }

  template <class scalar_t, class T>
  static void masked_scale(
      const at::Tensor& output, const scalar_t* grad, Rows rows, const uint8_t* mask, scalar_t* y, T inside, T outside,
      int64_t n) {
    const c10::cuda::CUDAGuard guard(output.device());
    C10_CUDA_CHECK(cuda::masked_scale<scalar_t>(grad, rows, mask, y, inside, outside, n, c10::cuda::getCurrentCUDAStream()));
  }
};
#endif

}  // namespace fastact
