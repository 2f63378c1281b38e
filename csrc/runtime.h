// What the binding asks of the CUDA runtime, without the runtime's headers; and how it refers to the kernels for CUDA. It isn't
// linked to their library, which needs the runtime, so that it serves PyTorch's builds with and without CUDA: activations_cuda
// loads that library first where torch has CUDA. Elsewhere these functions are null, and no tensor leads to them.
#pragma once

#define FASTACT_WEAK __attribute__((weak))

struct CUstream_st;

namespace fastact::cuda {

using Stream = CUstream_st*;  // a cudaStream_t
using Error = int;            // a cudaError_t

constexpr Error kSuccess = 0, kOutOfMemory = 2, kNoKernelImage = 209;

#pragma GCC visibility push(default)

FASTACT_WEAK const char* name_of(Error error);
FASTACT_WEAK const char* describe(Error error);

FASTACT_WEAK Error is_capturing(Stream stream, bool* result);

// That of the current device.
FASTACT_WEAK Error compute_capability(int* major, int* minor);

#pragma GCC visibility pop

}  // namespace fastact::cuda
