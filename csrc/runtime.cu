#include "runtime.h"

#include <cuda_runtime_api.h>

#include <type_traits>

namespace fastact::cuda {
namespace {

static_assert(std::is_same_v<Stream, cudaStream_t>);
static_assert(
    kSuccess == cudaSuccess && kOutOfMemory == cudaErrorMemoryAllocation && kNoKernelImage == cudaErrorNoKernelImageForDevice);

// The error, which the next launch isn't to find again.
Error taken(cudaError_t error) {
  if (error != cudaSuccess) {
    cudaGetLastError();
  }
  return error;
}

}  // namespace

const char* name_of(Error error) {
  return cudaGetErrorName(static_cast<cudaError_t>(error));
}

const char* describe(Error error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

Error is_capturing(Stream stream, bool* result) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const Error error = taken(cudaStreamIsCapturing(stream, &status));
  *result = status != cudaStreamCaptureStatusNone;
  return error;
}

Error compute_capability(int* major, int* minor) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  return taken(error);
}

}  // namespace fastact::cuda
