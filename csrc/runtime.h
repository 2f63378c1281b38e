// What the binding asks of the CUDA runtime, which is linked into the kernels' library: so a binding needs none, and the same
// one serves the CUDA and the CPU builds of a release of PyTorch.
#pragma once

#if defined(FASTACT_CUDA)
#include <cuda_runtime_api.h>

namespace fastact::cuda {

#pragma GCC visibility push(default)

bool is_capturing(cudaStream_t stream);

const char* describe(cudaError_t error);

// Of the current device: major * 10 + minor.
int compute_capability();

#pragma GCC visibility pop

}  // namespace fastact::cuda
#endif
