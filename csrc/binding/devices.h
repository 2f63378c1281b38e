// What knows a device's allocator and its streams.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "../bits/activations.h"
#include "../runtime.h"
#include "older_torch.h"

namespace fastact {

// What differs between the devices. Memory comes from the allocators themselves: at 64 elements a call of at::empty_like
// through the dispatcher is a tenth of the whole op.
struct Cpu {
  static constexpr Device device = Device::cpu;

  static at::Tensor empty_format(const at::Tensor& like, at::MemoryFormat format) {
    return at::Tensor(at::detail::empty_cpu(like.sizes(), like.scalar_type(), /*pin_memory=*/false, format));
  }

  static at::Tensor empty_strided(const at::Tensor& like, at::IntArrayRef strides) {
    return at::Tensor(at::detail::empty_strided_cpu(like.sizes(), strides, like.scalar_type()));
  }
};

#if defined(FASTACT_CUDA)
// By the interfaces that all builds of PyTorch have: a binding may be loaded where there is no libtorch_cuda.
struct Cuda {
  static constexpr Device device = Device::cuda;

  static at::Tensor empty_format(const at::Tensor& like, at::MemoryFormat format) {
    return empty(like.device(), like.sizes(), like.scalar_type(), format);
  }

  static at::Tensor empty_strided(const at::Tensor& like, at::IntArrayRef strides) {
    return empty_strided(like.device(), like.sizes(), strides, like.scalar_type());
  }

  static at::Tensor empty(at::Device on, at::IntArrayRef sizes, at::ScalarType dtype, at::MemoryFormat format) {
    const c10::DeviceGuard guard(on);
    return at::Tensor(at::detail::empty_generic(sizes, allocator(), kKeys, dtype, format));
  }

  static at::Tensor empty_strided(at::Device on, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
    const c10::DeviceGuard guard(on);
    return at::Tensor(at::detail::empty_strided_generic(sizes, strides, allocator(), kKeys, dtype));
  }

  static cudaStream_t current_stream(at::Device of) {
    return static_cast<cudaStream_t>(native_handle(c10::impl::VirtualGuardImpl(of.type()).getStream(of)));
  }

  // Calls kernel(stream), which launches one on the current stream of the tensor's device.
  template <class Kernel>
  static void launch(const at::Tensor& on, const Kernel& kernel) {
    const c10::DeviceGuard guard(on.device());
    check_launch(kernel(current_stream(on.device())));
  }

 private:
  static constexpr auto kKeys = c10::DispatchKeySet(c10::DispatchKey::CUDA);

  static c10::Allocator* allocator() { return at::detail::getCUDAHooks().getCUDADeviceAllocator(); }

  static void check_launch(cudaError_t error) {
    if (error == cudaErrorNoKernelImageForDevice) {
      const auto capability = cuda::compute_capability();
      const auto arch = c10::str(capability / 10, ".", capability % 10);
      TORCH_CHECK(
          false, "activations_cuda: expected code for this GPU, of compute capability ", arch,
          ", got a build for those in activations_cuda.build_info() alone; build it again with TORCH_CUDA_ARCH_LIST=", arch);
    }
    if (error != cudaSuccess) {
      raise_device_error(error, c10::str("CUDA error: ", cuda::describe(error)));
    }
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

inline at::Tensor empty_bytes(const at::Tensor& like, int64_t bytes) {
#if defined(FASTACT_CUDA)
  if (like.is_cuda()) {
    return Cuda::empty(like.device(), {bytes}, at::kByte, at::MemoryFormat::Contiguous);
  }
#endif
  return at::Tensor(at::detail::empty_cpu({bytes}, at::kByte));
}

inline at::Tensor empty_strided(const at::Tensor& like, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides) {
#if defined(FASTACT_CUDA)
  if (like.is_cuda()) {
    return Cuda::empty_strided(like.device(), sizes, strides, dtype);
  }
#endif
  return at::Tensor(at::detail::empty_strided_cpu(sizes, strides, dtype));
}

inline bool is_capturing([[maybe_unused]] at::Device device) {
#if defined(FASTACT_CUDA)
  if (device.is_cuda()) {
    return cuda::is_capturing(Cuda::current_stream(device));
  }
#endif
  return false;
}

inline void synchronize([[maybe_unused]] at::Device device) {
#if defined(FASTACT_CUDA)
  if (device.is_cuda()) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.synchronizeStream(guard.getStream(device));
  }
#endif
}

}  // namespace fastact
