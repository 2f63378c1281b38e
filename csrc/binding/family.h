// What a line of family.def says of a member, as a type: HardtanhOp and SiluOp have a name, an overload, parameters as the
// schema writes them and as types, and what Python must know. HardtanhOp has the activation's struct, SiluOp is derived from
// its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>
#include <type_traits>

#include "../bits/activations.h"
#include "../bits/kernels.h"
#include "codes/activations.h"

namespace fastact {

// As many doubles as an activation's struct is made from.
template <class Activation>
using DoublesFor = std::conditional_t<
    std::is_constructible_v<Activation, double, double>, std::tuple<double, double>,
    std::conditional_t<std::is_constructible_v<Activation, double>, std::tuple<double>, std::tuple<>>>;

#define ACTIVATION(op, overload_name, F, parameter_list, is_in_pytorch) \
  struct F##Op {                                                        \
    template <class scalar_t, Device device = Device::cpu>              \
    using Activation = F<scalar_t, device>;                             \
    using Parameters = DoublesFor<F<double, Device::cpu>>;              \
    static constexpr Formula formula = Formula::F;                      \
    static constexpr const char* name = #op;                            \
    static constexpr const char* overload = #overload_name;             \
    static constexpr const char* parameters = parameter_list;           \
    static constexpr const char* keyword = nullptr;                     \
    static constexpr bool in_pytorch = is_in_pytorch;                   \
    static constexpr Saves pytorch_saves = Activation<double>::saves;   \
    static constexpr bool saves_output = false;                         \
  };
#define SMOOTH(op, F)                                    \
  struct F##Op : F {                                     \
    static constexpr const char* name = #op;             \
    static constexpr const char* overload = "";          \
    static constexpr Saves pytorch_saves = Saves::input; \
    static constexpr bool saves_output = true;           \
  };
#include "../family.def"

template <template <class...> class Use, class Op, class Parameters>
struct Expansion;
template <template <class...> class Use, class Op, class... Parameters>
struct Expansion<Use, Op, std::tuple<Parameters...>> {
  using type = Use<Op, Parameters...>;
};

// Use<Op, Parameters...> with the types of the op's parameters.
template <template <class...> class Use, class Op>
using WithParameters = typename Expansion<Use, Op, typename Op::Parameters>::type;

}  // namespace fastact
