// How a kernel is run on each device: threads on the CPU; device guard, current stream and launch check on CUDA.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "../kernels.h"
#include "../mask.h"

#if defined(FASTACT_CUDA)
// Not ATen/cuda/CUDAContext.h: it needs the headers of cuSPARSE and cuBLAS, which a lean toolkit lacks.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace fastact {

struct Cpu {
  // Calls kernel(begin, count) for ranges whose starts no mask byte straddles.
  template <class Kernel>
  static void parallel(int64_t n, const Kernel& kernel) {
    const int64_t blocks = (n + cpu::kBlock - 1) / cpu::kBlock;
    at::parallel_for(0, blocks, at::internal::GRAIN_SIZE / cpu::kBlock, [&](int64_t first, int64_t last) {
      const int64_t begin = first * cpu::kBlock;
      kernel(begin, std::min(n, last * cpu::kBlock) - begin);
    });
  }

  template <class F, class scalar_t>
  static void forward(const at::Tensor&, F f, const scalar_t* x, scalar_t* y, uint8_t* mask, int64_t n) {
    parallel(n, [=](int64_t begin, int64_t count) {
      cpu::forward<F, scalar_t>(f, x + begin, y + begin, mask ? mask + begin / kMaskBits : nullptr, count);
    });
  }

  template <class scalar_t, class T>
  static void masked_scale(
      const at::Tensor&, const scalar_t* grad, const uint8_t* mask, scalar_t* y, T inside, T outside, int64_t n) {
    parallel(n, [=](int64_t begin, int64_t count) {
      cpu::masked_scale<scalar_t>(grad + begin, mask + begin / kMaskBits, y + begin, inside, outside, count);
    });
  }
};

#if defined(FASTACT_CUDA)
struct Cuda {
  template <class F, class scalar_t>
  static void forward(const at::Tensor& self, F f, const scalar_t* x, scalar_t* y, uint8_t* mask, int64_t n) {
    const c10::cuda::CUDAGuard guard(self.device());
    C10_CUDA_CHECK((cuda::forward<F, scalar_t>(f, x, y, mask, n, c10::cuda::getCurrentCUDAStream())));
  }

  template <class scalar_t, class T>
  static void masked_scale(
      const at::Tensor& grad, const scalar_t* g, const uint8_t* mask, scalar_t* y, T inside, T outside, int64_t n) {
    const c10::cuda::CUDAGuard guard(grad.device());
    C10_CUDA_CHECK(cuda::masked_scale<scalar_t>(g, mask, y, inside, outside, n, c10::cuda::getCurrentCUDAStream()));
  }
};
#endif

}  // namespace fastact
