// From what the binding names to the types of the kernels.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "layout.h"

namespace fastact {

template <class T>
struct Type {
  using type = T;
};

// Calls function(Type) with the type of a dtype.
template <class Function>
auto with_half_type(Dtype dtype, const Function& function) {
  return dtype == Dtype::float16 ? function(Type<c10::Half>()) : function(Type<c10::BFloat16>());
}
template <class Function>
auto with_type(Dtype dtype, const Function& function) {
  switch (dtype) {
    case Dtype::float64:
      return function(Type<double>());
    case Dtype::float32:
      return function(Type<float>());
    default:
      return with_half_type(dtype, function);
  }
}

}  // namespace fastact
