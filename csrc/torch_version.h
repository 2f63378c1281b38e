// Where the releases of PyTorch differ.
#pragma once

#include <torch/version.h>

namespace fastact {

// softshrink's CPU op in half types: does it shift by a lambd rounded to the dtype, as the CUDA op does, or by one in opmath?
constexpr bool kCpuSoftshrinkShiftsInDtype = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14;

// Group norm's backward op on a GPU: does autograd make the gradient and the input contiguous for it, or does it read any
// layout?
constexpr bool kGroupNormIsGivenContiguous = TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR <= 13;

}  // namespace fastact
