// What a line of family.def says of a member, as a type: HardtanhOp has a name, an overload, parameters as the schema writes
// them, the activation's struct and PyTorch's own op.
#pragma once

#include <ATen/ATen.h>

#include <type_traits>

#include "../activations.h"

namespace fastact {

// For a member that PyTorch doesn't have.
constexpr std::nullptr_t none = nullptr;

// Use<Op, double...> with as many doubles as the activation's struct is made from.
template <template <class...> class Use, class Op, class Activation>
using WithDoubles = std::conditional_t<
    std::is_constructible_v<Activation, double, double>, Use<Op, double, double>,
    std::conditional_t<std::is_constructible_v<Activation, double>, Use<Op, double>, Use<Op>>>;

#define ACTIVATION(op, overload_name, F, parameter_list, pytorch_op)        \
  struct F##Op {                                                            \
    template <class scalar_t, Device device = Device::cpu>                  \
    using Activation = F<scalar_t, device>;                                 \
    template <template <class...> class Use>                                \
    using WithParameters = WithDoubles<Use, F##Op, F<double, Device::cpu>>; \
    static constexpr const char* name = #op;                                \
    static constexpr const char* overload = #overload_name;                 \
    static constexpr const char* parameters = parameter_list;               \
    static constexpr const char* keyword = nullptr;                         \
    static constexpr auto pytorch = pytorch_op;                             \
  };
#include "../family.def"

template <class Op>
constexpr bool pytorch_has = !std::is_null_pointer_v<std::decay_t<decltype(Op::pytorch)>>;

}  // namespace fastact
