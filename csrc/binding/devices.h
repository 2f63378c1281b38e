// What knows a device's allocator, its streams and its threads.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>  // GRAIN_SIZE
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "../bits/activations.h"
#include "../runtime.h"

namespace fastact {

#if defined(FASTACT_CUDA)
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

inline c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

struct Cpu {
  static constexpr Device device = Device::cpu;

  // Calls kernel(begin, end) in several threads, for ranges of n elements that begin at multiples of `unit`.
  template <class Kernel>
  static void launch(int64_t n, int64_t unit, const Kernel& kernel) {
    at::parallel_for(0, (n + unit - 1) / unit, at::internal::GRAIN_SIZE / unit, [&](int64_t first, int64_t last) {
      kernel(first * unit, std::min(n, last * unit));
    });
  }
};

struct Cuda {
  static constexpr Device device = Device::cuda;

  // Calls kernel(stream), which launches one on the current stream of the tensor's device.
  template <class Kernel>
  static void launch(const at::Tensor& on, const Kernel& kernel) {
    const c10::DeviceGuard guard(on.device());
    check(kernel(handle(current_stream(on.device()))));
  }

  static bool is_capturing(at::Device device) {
    bool result = false;
    check(cuda::is_capturing(handle(current_stream(device)), &result));
    return result;
  }

 private:
  static cuda::Stream handle(const c10::Stream& stream) { return static_cast<cuda::Stream>(stream.native_handle()); }

  static void check(cuda::Error error) {
    if (error == cuda::kNoKernelImage) {
      int major = 0, minor = 0;
      check(cuda::compute_capability(&major, &minor));
      TORCH_CHECK(
          false, "activations_cuda: expected code for this GPU, of compute capability ", major, ".", minor,
          ", got a build for those in activations_cuda.build_info() alone; build it again with TORCH_CUDA_ARCH_LIST=", major,
          ".", minor);
    }
    TORCH_CHECK_WITH(
        OutOfMemoryError, error != cuda::kOutOfMemory, "activations_cuda: CUDA error: ", cuda::describe(error), " (",
        cuda::name_of(error), ")");
    if (error != cuda::kSuccess) {
      throw c10::AcceleratorError(
          {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, error,
          c10::str(
              "activations_cuda: CUDA error: ", cuda::describe(error), " (", cuda::name_of(error),
              "). It may be an earlier kernel's: CUDA_LAUNCH_BLOCKING=1 shows whose."));
    }
  }
};

// Memory comes from the allocators themselves: at 64 elements a call of at::empty_like through the dispatcher is a tenth of the
// whole op.

// Calls make(allocator, keys) on the tensor's device.
template <class Make>
at::Tensor allocated(const at::Tensor& like, const Make& make) {
  if (like.is_cpu()) {
    return at::Tensor(make(c10::GetCPUAllocator(), c10::DispatchKeySet(c10::DispatchKey::CPU)));
  }
  const c10::DeviceGuard guard(like.device());
  return at::Tensor(make(at::detail::getCUDAHooks().getCUDADeviceAllocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA)));
}

inline at::Tensor empty_bytes(const at::Tensor& like, int64_t bytes) {
  return allocated(like, [&](c10::Allocator* allocator, c10::DispatchKeySet keys) {
    return at::detail::empty_generic({bytes}, allocator, keys, at::kByte, std::nullopt);
  });
}

inline at::Tensor empty_strided(const at::Tensor& like, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return allocated(like, [&](c10::Allocator* allocator, c10::DispatchKeySet keys) {
    return at::detail::empty_strided_generic(sizes, strides, allocator, keys, dtype);
  });
}

inline at::Tensor empty_strided(const at::Tensor& like, at::IntArrayRef strides) {
  return empty_strided(like, like.scalar_type(), like.sizes(), strides);
}

// As at::empty_like.
inline at::Tensor empty(const at::Tensor& like, at::MemoryFormat format) {
  if (format == at::MemoryFormat::Preserve) {
    return like.is_non_overlapping_and_dense() ? empty_strided(like, like.strides()) : at::empty_like(like);
  }
  return allocated(like, [&](c10::Allocator* allocator, c10::DispatchKeySet keys) {
    return at::detail::empty_generic(like.sizes(), allocator, keys, like.scalar_type(), format);
  });
}

inline bool is_capturing(at::Device device) {
  return kHasCuda && device.is_cuda() && Cuda::is_capturing(device);
}

inline void synchronize(at::Device device) {
  if (device.is_cuda()) {
    current_stream(device).synchronize();
  }
}

}  // namespace fastact
