// From a value to its tensor.
#pragma once

#include "value.h"

namespace fastact::recipes {

// While a tensor is packed, values are read only to verify recipes. The hooks around the scope then get their tensor back,
// because those that offload asynchronously return each one once.
struct Packing {
  Packing() : outer(current) { current = this; }
  ~Packing() { current = outer; }

  Packing* outer;
  static thread_local Packing* current;
};

// Whether it is a cast back to the half type that all its elements came from, by movements alone: nothing is to be cast.
bool is_cast_back(const Value& value);

// A recipe's tensor in the half type that all its elements came from (Value::half).
at::Tensor in_half(Value& value);

}  // namespace fastact::recipes
