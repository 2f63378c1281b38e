// The tables of the smooth activations: made from the installed PyTorch's ops when they are first needed, and compared with
// them.
#pragma once

#include <ATen/core/Tensor.h>

#include "activations.h"

namespace fastact {

// The tables of an activation, for a dtype and a device.
struct Tables {
  int bits;
  at::Tensor entries;         // by input: its number; for CUDA the output in the lower half of a word, the number in the upper
  at::Tensor outputs;         // by input, for CUDA
  at::Tensor first, inputs;   // by output and number: the input
  at::Tensor slopes, direct;  // likewise: what a gradient is multiplied by; for CUDA
  int factors;
  at::Tensor derivative;  // by input: two factors, the second of which may be 1; for CUDA
};

// The tables for a plain tensor of a dtype of 16 bits, or null where PyTorch's op must serve: its gradient isn't what these
// tables give (there is a warning then, once), or the tables aren't there yet and can't be made now, while a CUDA graph is
// being captured or, on the CPU, while oneDNN is disabled.
const Tables* tables_for(const Smooth& activation, const at::Tensor& self);

}  // namespace fastact
