// From what the binding names to the types of the kernels.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "activations.h"
#include "kernels.h"

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

// Calls function(activation) with the struct that lies there.
template <Device device, class scalar_t, class Function>
auto with_activation(Formula formula, const void* activation, const Function& function) {
  switch (formula) {
#define ACTIVATION(op, overload, F, parameters, in_pytorch) \
  case Formula::F:                                          \
    return function(*static_cast<const F<scalar_t, device>*>(activation));
#include "family.def"
  }
  __builtin_unreachable();
}

}  // namespace fastact
