#include "../runtime.h"

namespace fastact::cuda {

bool is_capturing(cudaStream_t stream) {
  auto status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone;
}

const char* describe(cudaError_t error) {
  return cudaGetErrorString(error);
}

int compute_capability() {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return 10 * major + minor;
}

}  // namespace fastact::cuda
