// Tensors joined along a dimension, as cat does, in pieces of 16 bytes.
#pragma once

#include <cstdint>

#include "../runtime.h"

namespace fastact {

struct Join {
  static constexpr int kPiece = 16;  // to which all are aligned
  static constexpr int kMostParts = 64;

  struct Part {
    const void* data;
    int64_t width;  // of each of its rows, in pieces
  };

  // A row of the output is one of each part, in their order. All are contiguous.
  int64_t rows;
  int parts;
  Part part[kMostParts];
  void* output;
};

#pragma GCC visibility push(default)

namespace cuda {

// Queued on `stream` of the current device.
FASTACT_WEAK Error run(const Join& join, Stream stream);

}  // namespace cuda

#pragma GCC visibility pop

}  // namespace fastact
