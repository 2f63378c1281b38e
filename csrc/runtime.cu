#include "runtime.h"

#include <cuda_runtime_api.h>

#include <type_traits>

namespace fastact::cuda {

static_assert(std::is_same_v<Stream, cudaStream_t>);
static_assert(kSuccess == cudaSuccess && kNoKernelImage == cudaErrorNoKernelImageForDevice);

const char* describe(Error error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

Error is_capturing(Stream stream, bool* result) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const Error error = cudaStreamIsCapturing(stream, &status);
  *result = status != cudaStreamCaptureStatusNone;
  return error;
}

Error compute_capability(int* major, int* minor) {
  int device = 0;
  Error error = cudaGetDevice(&device);
  if (error == kSuccess) {
    error = cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, device);
  }
  return error == kSuccess ? cudaDeviceGetAttribute(minor, cudaDevAttrComputeCapabilityMinor, device) : error;
}

}  // namespace fastact::cuda
