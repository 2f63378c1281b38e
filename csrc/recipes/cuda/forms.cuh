// The common programs. Each file that includes this compiles their kernels for one type of the output.
#pragma once

#include <type_traits>

#include "launch.cuh"
#include "starts.h"

namespace fastact::cuda {
namespace {

template <class T, int n, class... Forms>
bool start_one_of(const Program& program, Stream stream) {
  return ((has_form<n, Forms>(program) && start<T, n, Forms>(program, stream)) || ...);
}

constexpr auto number = Layout::number, stash = Layout::stash, dense = Layout::dense, dense_any = Layout::dense_any,
               column = Layout::column, half_column = Layout::half_column, row = Layout::row, half_row = Layout::half_row,
               same_row = Layout::same_row, apart = Layout::apart, apart_any = Layout::apart_any, gate = Layout::gate,
               any = Layout::any, twin = Layout::twin, sign = Layout::sign;
constexpr int two = 2, three = 3, more = 4, all = Program::kMaxDims;  // dimensions

using Load = InstructionOf<Opcode::load, dense>;
using LoadAny = InstructionOf<Opcode::load, dense_any>;
using LoadAnywhere = InstructionOf<Opcode::load, any>;
using Stash = InstructionOf<Opcode::stash>;
using Clamp = InstructionOf<Opcode::clamp, number, number>;
using Silu = InstructionOf<Opcode::silu>;
using Power = InstructionOf<Opcode::power, number>;
using Tanh = InstructionOf<Opcode::tanh>;
using LookUp = InstructionOf<Opcode::look_up, Layout::table>;
using Gradient = InstructionOf<Opcode::gradient, dense, Layout::table>;
using SiluGradient = InstructionOf<Opcode::silu_gradient, dense_any>;
using TanhGradient = InstructionOf<Opcode::tanh_gradient, dense>;
template <Layout layout>
using Add = InstructionOf<Opcode::add, layout, number>;
template <Layout layout>
using Multiply = InstructionOf<Opcode::multiply, layout>;
template <Layout layout>
using MultiplyAdd = InstructionOf<Opcode::multiply_add, layout, layout>;
template <Layout layout>
using Divide = InstructionOf<Opcode::divide, layout>;
using Bits = Multiply<Layout::bits>;

// A smooth activation and its gradient: in half types by tables, in float32 SiLU's.
template <int n>
using Smooth = std::conditional_t<n == 8, LookUp, Silu>;
template <int n>
using SmoothGradient = std::conditional_t<n == 8, Gradient, SiluGradient>;

// A normalization behind a gate, or one for which there is a gate or its like: a factor for each channel of each sample, in
// squeeze-and-excitation, or for each sample, in stochastic depth.
template <class T, int n, class Norm>
bool start_gated_norm_of_columns(const Program& program, Stream stream) {
  constexpr int some = n == 8 ? 4 : 2;
  return start_one_of<
      T, n, FormOfSample<some, Load, Norm, Clamp, Multiply<gate>>, FormOfSample<some, Load, Norm, Smooth<n>, Multiply<gate>>,
      FormOfSample<some, Load, Norm, Multiply<gate>, Clamp>, FormOfSample<some, Load, Norm, Multiply<gate>, Add<dense>, Clamp>,
      FormOfSample<2, Load, Norm, Stash, Load, Norm, Multiply<gate>, Add<stash>, Clamp>,
      FormOfSample<some, Load, Multiply<gate>, Norm, Smooth<n>>,
      FormOfSample<some, Load, Multiply<gate>, Norm, SmoothGradient<n>>, Form<2, more, Load, Norm, Multiply<any>, Add<dense>>,
      Form<2, more, Load, Norm, Multiply<any>, Add<dense>, Clamp>,
      Form<some, more, Load, Norm, Stash, Load, Norm, Multiply<any>, Add<stash>>>(program, stream);
}

// A normalization, and what follows it: nothing, an activation or its gradient, a gate's gradient, dropout, a residual, or
// another normalization of the same kind as one.
template <class T, int n, class Norm>
bool start_norm_of_columns(const Program& program, Stream stream) {
  // Four vectors share what they read of a column. In float32, of twice the bytes, two are enough.
  constexpr int some = n == 8 ? 4 : 2;
  return start_one_of<
             T, n, Form<some, two, Load, Norm>, Form<some, two, Load, Norm, Clamp>, Form<some, two, Load, Norm, Smooth<n>>,
             Form<some, two, Load, Norm, SmoothGradient<n>>, Form<2, two, Load, Norm, Clamp, Multiply<dense>>,
             Form<some, two, Load, Norm, Smooth<n>, Multiply<dense>>, Form<2, two, Load, Norm, Clamp, Bits, Multiply<number>>,
             Form<some, two, Load, Norm, Add<dense>>, Form<some, two, Load, Norm, Add<dense>, Clamp>,
             Form<some, two, Load, Norm, Smooth<n>, Add<dense>>, Form<some, two, Load, Norm, Stash, Load, Norm, Add<stash>>,
             Form<some, two, Load, Norm, Stash, Load, Norm, Add<stash>, Clamp>,
             Form<some, two, Load, Norm, Add<dense>, Clamp, Stash, Load, Norm, Add<stash>, Clamp>,  // two residual blocks
             Form<some, two, Load, Norm, Smooth<n>, Stash, Load, Norm, Add<stash>>, Form<some, two, Load, Smooth<n>, Norm>,
             Form<2, two, LoadAny, Norm>, Form<2, two, LoadAny, Norm, Multiply<column>, Add<dense_any>>,  // layer scale
             Form<2, two, LoadAny, Norm, Clamp, Multiply<any>, Add<any>>>(program, stream) ||  // a learned scale and shift
         start_gated_norm_of_columns<T, n, Norm>(program, stream);
}

// The same of contiguous planes, each a row. Of two rows' values four vectors would take too many registers.
template <class T, int n, Spread spread, class Norm>
bool start_norm_of_planes(const Program& program, Stream stream) {
  constexpr int some = spread == Spread::row && n == 8 ? 4 : 2;
  return start_one_of<
      T, n, FormOfRows<1, three, spread, LoadAny, Norm>, FormOfRows<2, three, spread, Load, Norm, Clamp>,
      FormOfRows<some, three, spread, Load, Norm, Smooth<n>>, FormOfRows<some, three, spread, Load, Norm, SmoothGradient<n>>,
      FormOfRows<2, three, spread, Load, Norm, Clamp, Multiply<gate>>,
      FormOfRows<some, three, spread, Load, Norm, Smooth<n>, Multiply<gate>>,
      FormOfRows<2, three, spread, Load, Norm, Add<dense>>, FormOfRows<2, three, spread, Load, Norm, Add<dense>, Clamp>,
      FormOfRows<2, three, spread, Load, Norm, Smooth<n>, Add<dense>>,
      FormOfRows<2, three, spread, Load, Norm, Multiply<gate>, Add<dense>>,
      FormOfRows<2, three, spread, Load, Norm, Multiply<gate>, Add<dense>, Clamp>,
      FormOfRows<2, three, spread, Load, Norm, Stash, Load, Norm, Add<stash>, Clamp>,
      FormOfRows<2, three, spread, Load, Norm, Add<dense>, Clamp, Stash, Load, Norm, Add<stash>, Clamp>>(program, stream);
}

template <Layout row, Layout same>
using GroupNormOf = InstructionOf<Opcode::folded_norm, row, same, row, same>;

// A group norm is in float32 under autocast, and so is what follows it. In a net of a half type its statistics are in it, too.
template <class T, int n, Spread spread>
bool start_group_norm(const Program& program, Stream stream) {
  using Norm = GroupNormOf<row, same_row>;
  if constexpr (n == 8) {
    constexpr int some = spread == Spread::row ? 4 : 2;
    using HalfNorm = GroupNormOf<half_row, Layout::same_half_row>;
    if (start_one_of<
            T, n, FormOfRows<some, more, spread, Load, HalfNorm>, FormOfRows<some, more, spread, Load, HalfNorm, LookUp>,
            FormOfRows<some, more, spread, Load, HalfNorm, Gradient>, FormOfRows<some, more, spread, Load, Norm, LookUp>,
            FormOfRows<some, more, spread, Load, Norm, Gradient>>(program, stream)) {
      return true;
    }
  }
  return start_one_of<
      T, n, FormOfRows<2, more, spread, LoadAny, Norm>, FormOfRows<2, more, spread, LoadAny, Norm, Clamp>,
      FormOfRows<2, more, spread, LoadAny, Norm, Silu>, FormOfRows<2, more, spread, LoadAny, Norm, SiluGradient>,
      FormOfRows<2, more, spread, Load, Norm, Add<dense>>, FormOfRows<2, more, spread, Load, Norm, Add<dense>, Clamp>>(
      program, stream);
}

// A contiguous plane is a row for batch and group norm, whose length often isn't a multiple of a vector's: 14 x 14 isn't one of
// eight, nor 7 x 7 of four.
template <class T, int n, Spread spread>
bool start_rows(const Program& program, Stream stream) {
  using BatchNorm = InstructionOf<Opcode::batch_norm, row, same_row, same_row, same_row>;
  using NormOfCudnn = InstructionOf<Opcode::folded_norm, row, same_row, same_row, same_row>;
  constexpr bool is_of_cudnn = n == 4 || std::is_same_v<T, c10::Half>;  // which PyTorch doesn't call in bfloat16
  if constexpr (is_of_cudnn) {
    if (start_norm_of_planes<T, n, spread, NormOfCudnn>(program, stream)) {
      return true;
    }
  }
  using OfWeights = InstructionOf<Opcode::batch_norm, row, same_row, same_row, number>;
  return start_norm_of_planes<T, n, spread, BatchNorm>(program, stream) || start_group_norm<T, n, spread>(program, stream) ||
         start_one_of<T, n, FormOfRows<2, two, spread, LoadAny, OfWeights>>(program, stream);
}

template <Layout weight, Layout bias>
using LayerNormWith = InstructionOf<Opcode::centered_norm, row, same_row, weight, bias>;
using LayerNorm = LayerNormWith<column, column>;

// A layer norm, and what follows it: nothing, dropout, or the scale and shift of a diffusion transformer. Its parameters may be
// in the half type as its input is.
template <class T, int n>
bool start_layer_norm(const Program& program, Stream stream) {
  using WithoutParameters = LayerNormWith<number, number>;
  if constexpr (n == 8) {
    using Norm = LayerNormWith<half_column, half_column>;
    if (start_one_of<
            T, n, Form<4, two, Load, Norm>, Form<2, two, Load, Norm, LookUp>, Form<2, two, Load, Norm, Gradient>,
            Form<2, two, Load, Add<dense>, Norm>, Form<2, two, Load, LayerNormWith<half_column, number>>>(program, stream)) {
      return true;
    }
  }
  return start_one_of<
      T, n, Form<n == 8 ? 4 : 2, two, LoadAny, LayerNorm>, Form<2, more, LoadAny, LayerNorm>,
      Form<2, more, LoadAnywhere, LayerNorm>,  // transposed for attention
      Form<2, two, LoadAny, LayerNorm, Bits, Multiply<number>>, Form<2, two, LoadAny, Add<dense_any>, LayerNorm>,
      Form<2, two, LoadAny, LayerNormWith<column, number>>, Form<2, two, LoadAny, WithoutParameters>,
      Form<2, more, LoadAny, WithoutParameters, Multiply<any>, Add<any>>,
      Form<2, more, LoadAny, LayerNorm, Multiply<any>, Add<dense_any>>>(program, stream);  // stochastic depth
}

// RMS norms of several ops.
template <class T, int n>
bool start_rms_norm(const Program& program, Stream stream) {
  return start_one_of<
      T, n, Form<2, two, LoadAny, Multiply<row>>, Form<1, two, LoadAny, Multiply<row>, Multiply<column>>,
      Form<2, two, LoadAny, Multiply<row>, Multiply<half_column>>, Form<2, more, LoadAny, Multiply<any>>,  // of heads
      Form<2, more, LoadAny, Multiply<any>, Multiply<any>>>(program, stream);
}

// Rotary embeddings of queries and keys, which may be normalized before. If the pairs are the halves of a head, the input is
// read twice, first with its halves swapped, times -1 and 1.
template <class T, int n>
bool start_rotary_embedding(const Program& program, Stream stream) {
  using LoadApart = InstructionOf<Opcode::load, n == 8 ? apart : apart_any>;
  using LoadTwin = InstructionOf<Opcode::load, twin>;
  using Sign = Multiply<sign>;
  using Times = Multiply<apart_any>;
  return start_one_of<
      T, n, FormOfPairs<LoadApart, Sign, Times, Stash, LoadTwin, Times, Add<stash>>,
      FormOfPairs<
          LoadApart, Multiply<row>, Times, Sign, Times, Stash, LoadTwin, Multiply<twin>, Multiply<twin>, Times, Add<stash>>,
      Form<2, more, LoadAnywhere, Multiply<any>, Stash, LoadAnywhere, Multiply<any>, Add<stash>>,
      Form<2, more, LoadAnywhere, Multiply<any>, Stash, LoadAnywhere, Multiply<any>, Multiply<any>, Multiply<any>, Add<stash>>>(
      program, stream);
}

// A residual stream in float32 to which a half type is added, and what was added to it.
template <class T, int n>
bool start_residual_stream(const Program& program, Stream stream) {
  using Last = std::conditional_t<n == 8, InstructionOf<Opcode::addend, dense_any>, Add<dense_any>>;
  return start_one_of<T, n, Form<2, two, LoadAny, Last>, Form<2, two, LoadAny, LayerNorm, Last>>(program, stream);
}

// GELU by tanh, of several ops: its parts and, in float32, its output. In a half type that reads one tensor, as a table does.
template <class... Last>
using FormOfTanh = Form<2, two, LoadAny, Power, Multiply<number>, Add<dense_any>, Multiply<number>, Tanh, Last...>;

template <class T, int n>
bool start_gelu_of_ops(const Program& program, Stream stream) {
  if constexpr (n == 4) {
    using Output = FormOfTanh<Add<number>, Stash, LoadAny, Multiply<number>, Multiply<stash>>;
    if (start_one_of<T, n, Output>(program, stream)) {
      return true;
    }
  }
  return start_one_of<
      T, n, FormOfTanh<>, FormOfTanh<TanhGradient>, FormOfTanh<Add<number>>, FormOfTanh<Add<number>, Multiply<dense_any>>>(
      program, stream);
}

template <class T, int n>
bool start_common(const Program& program, Stream stream) {
  // Channels-last.
  return start_norm_of_columns<T, n, InstructionOf<Opcode::batch_norm, column, column, column, column>>(program, stream) ||
         start_norm_of_columns<T, n, InstructionOf<Opcode::scaled_norm, column, column, column, column>>(program, stream) ||
         start_one_of<
             T, n, Form<4, two, Load, Smooth<n>, Multiply<dense>>,                          // SwiGLU
             Form<4, two, InstructionOf<Opcode::load, apart>, Smooth<n>, Multiply<apart>>,  // the same of one tensor's halves
             Form<4, more, LoadAnywhere, LookUp, Multiply<any>>,                            // or of two dtypes, or broadcast
             // The same, scaled, shifted and added to what it is of, as in ConvNeXt V2.
             Form<2, more, Load, LookUp, Multiply<any>, MultiplyAdd<column>, Stash, Load, LookUp, Add<stash>>,
             Form<4, two, Load, LookUp>,                               // whatever of one tensor
             Form<2, two, LoadAny>, Form<2, all, LoadAnywhere>,        // repeated by upsampling
             Form<2, two, LoadAny, Multiply<number>, Add<dense_any>>,  // scaled residuals
             Form<2, two, Load, InstructionOf<Opcode::affine_norm, column, column, column, column>>,
             Form<2, two, LoadAny, Multiply<number>, Multiply<dense_any>>,
             Form<2, two, LoadAny, Power, Multiply<number>, Multiply<dense_any>>,  // gradients of a cube
             Form<2, two, LoadAny, Multiply<number>, Multiply<row>>,               // of a mean of squares
             // Arithmetic of two dtypes, or of what is broadcast or a part.
             Form<2, two, LoadAny, MultiplyAdd<column>>, Form<2, more, LoadAnywhere, Add<any>>,
             Form<2, more, LoadAnywhere, Multiply<any>>, Form<2, more, LoadAnywhere, Divide<any>>,
             Form<2, two, LoadAny, Multiply<dense_any>>,  // of a product
             Form<2, two, LoadAny, Multiply<row>, Multiply<dense_any>>,
             Form<2, two, LoadAny, Bits, Multiply<number>>,  // dropout
             Form<2, two, LoadAny, Bits, Multiply<number>, Add<dense_any>>,
             Form<2, more, LoadAny, Multiply<any>, Add<dense_any>>,  // layer scale
             Form<2, more, LoadAny, Multiply<any>, Multiply<any>, Add<dense_any>>,
             Form<2, more, LoadAny, Multiply<any>, Add<dense_any>, Stash, LoadAny, Multiply<any>, Add<stash>>,  // of two blocks
             Form<
                 2, more, LoadAny, Multiply<any>, Multiply<any>, Add<dense_any>, Stash, LoadAny, Multiply<any>, Multiply<any>,
                 Add<stash>>,
             Form<2, more, LoadAny, Multiply<any>, Stash, LoadAny, LayerNorm, Add<stash>>>(program, stream);
}

template <class T, int n>
bool start_any_form(const Program& program, Stream stream) {
  return (fits_across_rows(program, n) &&
          (start_rows<T, n, Spread::row>(program, stream) || start_rows<T, n, Spread::anywhere>(program, stream))) ||
         (is_in_vectors(program, n) &&
          (start_common<T, n>(program, stream) || start_layer_norm<T, n>(program, stream) ||
           start_rms_norm<T, n>(program, stream) || start_gelu_of_ops<T, n>(program, stream) ||
           start_rotary_embedding<T, n>(program, stream) || start_residual_stream<T, n>(program, stream)));
}

}  // namespace
}  // namespace fastact::cuda
