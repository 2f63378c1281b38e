// From an activation's name to its struct.
#pragma once

#include "activations.h"
#include "kernels.h"

namespace fastact {

// Calls function(activation) with the struct that lies there.
template <Device device, class scalar_t, class Function>
auto with_activation(Formula formula, const void* activation, const Function& function) {
  switch (formula) {
#define ACTIVATION(op, overload, F, parameters, in_pytorch) \
  case Formula::F:                                          \
    return function(*static_cast<const F<scalar_t, device>*>(activation));
#include "../family.def"
  }
  __builtin_unreachable();
}

}  // namespace fastact
