// The composite body: an activation as a handful of differentiable ATen ops, for whatever the kernels can't see into (tracing,
// tensor subclasses, functorch's transforms, other devices). It computes in the kernels' precision and decides by their rule.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>

#include "../activations.h"

namespace fastact {

template <class F>
at::Tensor compose(const F& f, const at::Tensor& self) {
  const auto x = self.to(at::toOpMathType(self.scalar_type()));
  // ATen's ops would give the saturated piece a gradient at the breakpoints; the family's rule gives it none.
  const auto outer = f.slopes().outside == 0 ? x.detach() : x;
  return at::where(f.inside(x), f.linear(x), f.saturated(outer)).to(self.scalar_type());
}

template <class Op, class... Parameters>
at::Tensor composite(const at::Tensor& self, Parameters... parameters) {
  return AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, self.scalar_type(), Op::name, [&] {
    return self.is_cpu() ? compose(typename Op::template Activation<scalar_t, Device::cpu>(parameters...), self)
                         : compose(typename Op::template Activation<scalar_t, Device::cuda>(parameters...), self);
  });
}

}  // namespace fastact
