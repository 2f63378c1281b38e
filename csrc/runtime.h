// What the binding asks of the CUDA runtime, without the runtime's headers. Only the kernels' library is linked to it, and has
// it inside, so one binding serves PyTorch's builds with and without CUDA.
#pragma once

struct CUstream_st;

namespace fastact::cuda {

using Stream = CUstream_st*;  // a cudaStream_t
using Error = int;            // a cudaError_t

constexpr Error kSuccess = 0, kOutOfMemory = 2, kNoKernelImage = 209;

#pragma GCC visibility push(default)

const char* name_of(Error error);
const char* describe(Error error);

Error is_capturing(Stream stream, bool* result);

// Of the current device.
Error compute_capability(int* major, int* minor);

#pragma GCC visibility pop

}  // namespace fastact::cuda
