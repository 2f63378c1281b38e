// From a value to its tensor.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "leaves.h"
#include "value.h"

namespace fastact::recipes {

// While it lives, what is called runs as an op's own forward does: below autograd and autocast.
struct Computing {
  const at::NoGradGuard no_grad;
  const at::AutoFwGradMode no_tangents{false};  // autograd has saved them itself
  const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// While it lives, a hook on a node reads values as the node would by unpacking.
struct Reading {
  Reading() { note_unpacking(); }
  const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// While it lives, whether classes and modes see calls, by __torch_function__.
class TorchFunction {
 public:
  using State = at::impl::TorchFunctionDisabledState;
  using Tls = at::impl::PythonTorchFunctionTLS;

  explicit TorchFunction(State state) { Tls::set_disabled_state(state); }
  TorchFunction(const TorchFunction&) = delete;
  TorchFunction& operator=(const TorchFunction&) = delete;
  ~TorchFunction() { Tls::set_disabled_state(before_); }

 private:
  const State before_ = Tls::get_disabled_state();
};

// While a tensor is packed, values are read to verify recipes. The hooks around the scope then get their tensor back,
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
