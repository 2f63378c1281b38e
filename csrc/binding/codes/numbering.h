// Which number each input of a function gets, so that it can be told from the others that share its output. For a dtype of 16
// bits; inputs and outputs are bit patterns. Nothing here knows of ATen.
#pragma once

#include <cstdint>
#include <vector>

namespace fastact {

constexpr int kPatterns = 1 << 16;
constexpr uint16_t kNaN = 0x7fff;  // which stands for any other

using Patterns = std::vector<uint16_t>;  // by input

// What one function is on all inputs, in each way that PyTorch has of computing it.
using Variants = std::vector<Patterns>;

// The outputs of an input, each once.
std::vector<uint16_t> outputs_of(const Variants& variants, int x);

// Numbers the inputs that share an output, with the same numbers in all variants. If an output has more inputs than there are
// numbers, inputs with the same derivative share one as soon as the others are needed. Empty if there are too few numbers.
Patterns number(const Variants& variants, const std::vector<uint64_t>& derivatives, int numbers);

}  // namespace fastact
