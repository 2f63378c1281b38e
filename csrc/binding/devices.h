// What knows a device's allocator and its streams.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>

#include "../bits/activations.h"

#if defined(FASTACT_CUDA)
// Not ATen/cuda/CUDAContext.h: it needs the headers of cuSPARSE and cuBLAS, which a lean toolkit lacks.
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace fastact {

struct Cpu {
  static constexpr Device device = Device::cpu;
};

#if defined(FASTACT_CUDA)
struct Cuda {
  static constexpr Device device = Device::cuda;

  // Calls kernel(stream), which launches one on the current stream of the tensor's device.
  template <class Kernel>
  static void launch(const at::Tensor& on, const Kernel& kernel) {
    const c10::cuda::CUDAGuard guard(on.device());
    check_launch(kernel(c10::cuda::getCurrentCUDAStream()));
  }

 private:
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

// Memory comes from the allocators themselves: at 64 elements a call of at::empty_like through the dispatcher is a tenth of the
// whole op.

inline at::Tensor empty_bytes(const at::Tensor& like, int64_t bytes) {
#if defined(FASTACT_CUDA)
  if (like.is_cuda()) {
    return at::Tensor(at::detail::empty_cuda({bytes}, at::kByte, like.device(), std::nullopt));
  }
#endif
  return at::Tensor(at::detail::empty_cpu({bytes}, at::kByte));
}

inline at::Tensor empty_strided(const at::Tensor& like, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides) {
#if defined(FASTACT_CUDA)
  if (like.is_cuda()) {
    return at::Tensor(at::detail::empty_strided_cuda(sizes, strides, dtype, like.device()));
  }
#endif
  return at::Tensor(at::detail::empty_strided_cpu(sizes, strides, dtype));
}

inline at::Tensor empty_strided(const at::Tensor& like, at::IntArrayRef strides) {
  return empty_strided(like, like.scalar_type(), like.sizes(), strides);
}

// As at::empty_like.
inline at::Tensor empty(const at::Tensor& like, at::MemoryFormat format) {
  if (format == at::MemoryFormat::Preserve) {
    return like.is_non_overlapping_and_dense() ? empty_strided(like, like.strides()) : at::empty_like(like);
  }
#if defined(FASTACT_CUDA)
  if (like.is_cuda()) {
    return at::Tensor(at::detail::empty_cuda(like.sizes(), like.scalar_type(), like.device(), format));
  }
#endif
  return at::Tensor(at::detail::empty_cpu(like.sizes(), like.scalar_type(), /*pin_memory=*/false, format));
}

inline bool is_capturing([[maybe_unused]] at::Device device) {
#if defined(FASTACT_CUDA)
  if (device.is_cuda()) {
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }
#endif
  return false;
}

inline void synchronize([[maybe_unused]] at::Device device) {
#if defined(FASTACT_CUDA)
  if (device.is_cuda()) {
    c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
  }
#endif
}

}  // namespace fastact
