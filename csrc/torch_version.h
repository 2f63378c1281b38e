// Where the releases of PyTorch differ.
#pragma once

#include <torch/version.h>

#define FASTACT_TORCH_VERSION (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)

// Has compiled autograd today's interface for nodes in C++? Under an older one it refuses a graph that holds ours.
#define FASTACT_COMPILED_AUTOGRAD (FASTACT_TORCH_VERSION >= 209)

// Do saved tensors say which hooks have packed them? Else there is no recompute().
#define FASTACT_RECOMPUTE (FASTACT_TORCH_VERSION >= 211)

namespace fastact {

// softshrink's CPU op in half types: does it shift by a lambd rounded to the dtype, as the CUDA op does, or by one in opmath?
constexpr bool kCpuSoftshrinkShiftsInDtype = FASTACT_TORCH_VERSION >= 214;

}  // namespace fastact
