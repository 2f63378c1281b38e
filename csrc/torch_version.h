// Where the releases of PyTorch differ.
#pragma once

#include <torch/version.h>

namespace fastact {

constexpr int kTorchVersion = TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR;

// softshrink's CPU op in half types: does it shift by a lambd rounded to the dtype, as the CUDA op does, or by one in opmath?
constexpr bool kCpuSoftshrinkShiftsInDtype = kTorchVersion >= 214;

}  // namespace fastact
