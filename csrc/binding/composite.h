// The composite body: an activation as a handful of differentiable ATen ops, for whatever the kernels can't see into (tracing,
// tensor subclasses, functorch's transforms, other devices). It computes in the kernels' precision and decides by their rule.
#pragma once

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

namespace fastact {

template <class Op, class... Parameters>
at::Tensor composite(const at::Tensor& self, Parameters... parameters) {
  const typename Op::template Activation<double> f(parameters...);
  const auto x = self.to(at::toOpMathType(self.scalar_type()));
  // ATen's ops would give the saturated piece a gradient at the breakpoints; the family's rule gives it none.
  const auto outer = f.slopes().outside == 0 ? x.detach() : x;
  return at::where(f.inside(x), f.linear(x), f.saturated(outer)).to(self.scalar_type());
}

}  // namespace fastact
