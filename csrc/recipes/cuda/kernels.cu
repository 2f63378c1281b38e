// The GPU's kernel. A thread computes a few vectors: of the same columns, where what is the same in all rows (a channel's
// statistics in channels-last) is read once; otherwise of one row, or of any.
//
// It is compiled as an interpreter, which runs any program, and for forms: the instructions of common programs, known in
// advance. On an H100 forms take 0.99 to 1.3 times the time in which a copy moves the same bytes, where rows end within vectors
// 1.4 to 1.8 times; the interpreter takes 2 to 3 times, there 6 to 7.
#include <algorithm>

#include "form.cuh"
#include "thread.cuh"

namespace fastact::cuda {
namespace {

constexpr int kBlock = 128;

template <class T, int n, class Form>
__global__ void __launch_bounds__(kBlock, Form::blocks) run_kernel(const __grid_constant__ Launch launch) {
  int64_t place = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  const int64_t row = launch.vectors.divide(&place);
  if (row >= launch.rows) {
    return;
  }
  Thread<T, n, Form> thread(launch, row, place);
  thread.run();
#pragma unroll
  for (int u = 0; u < Form::vectors; ++u) {
    const int64_t i = (Form::spread == Spread::columns ? row : place) + u * launch.distance;
    if (Form::spread == Spread::row || i < launch.count) {
      thread.store_vector(u);
    }
  }
}

bool is_aligned(const void* data, Element element, int n) {
  const int bytes = element == Element::bit ? 1 : element == Element::float32 ? kVectorBytes : 2 * n;
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

// Whether vectors of n fit a form of rows: they are aligned, and each crosses the end of one row at most.
bool is_of_rows(const Program& program, int n) {
  const Program::Operand* const last = program.operand + program.operands;
  return program.size[0] >= n && program.numel() % n == 0 && is_aligned(program.output, program.element, n) &&
         std::all_of(program.operand, last, [&](const auto& operand) {
           return operand.stride[0] == 0 || is_aligned(operand.data, operand.element, n);
         });
}

// Whether all that is read lies in vectors of n, or is one element for all of a vector.
bool is_in_vectors(const Program& program, int n) {
  if (program.size[0] % n != 0 || !is_aligned(program.output, program.element, n)) {
    return false;
  }
  for (int k = 0; k < program.operands; ++k) {
    const auto& operand = program.operand[k];
    bool fits = operand.stride[0] == 0 || (operand.stride[0] == 1 && is_aligned(operand.data, operand.element, n));
    for (int dim = 1; dim < program.dims && operand.stride[0] != 0; ++dim) {
      fits &= operand.stride[dim] % (operand.element == Element::bit ? 8 : n) == 0;
    }
    if (!fits) {
      return false;
    }
  }
  return true;
}

// Whether vectors of n fit what lies as the output does, and each crosses the end of one row at most.
bool is_across_rows(const Program& program, int n) {
  const Program::Operand* const last = program.operand + program.operands;
  return program.size[0] >= n && program.numel() % n == 0 && is_aligned(program.output, program.element, n) &&
         std::all_of(program.operand, last, [&](const auto& operand) {
           return !is_dense(program, operand) || is_aligned(operand.data, operand.element, n);
         });
}

// Splits a single row into four, so that a thread has vectors of several.
void split(Program* program) {
  constexpr int rows = 4, vector = 8;
  if (program->dims > 1 || program->size[0] % (rows * vector) != 0) {
    return;
  }
  program->dims = 2;
  program->size[0] /= rows;
  program->size[1] = rows;
  for (int k = 0; k < program->operands; ++k) {
    program->operand[k].stride[1] = program->operand[k].stride[0] * program->size[0];
  }
}

template <class T, int n, class Form>
bool start(Launch& launch, Stream stream) {
  const Program& program = launch.program;
  const int64_t rows = program.numel() / program.size[0], vectors = program.size[0] / n;
  const auto divide = [&](int64_t count) {
    launch.count = count;
    launch.distance = (count + Form::vectors - 1) / Form::vectors;
    return launch.distance;
  };
  int64_t in_row;  // threads in a row of threads
  if constexpr (Form::spread == Spread::columns) {
    launch.rows = divide(rows);
    in_row = vectors;
  } else if constexpr (Form::spread == Spread::row) {
    launch.rows = rows;
    in_row = divide(vectors);
  } else {
    launch.rows = 1;
    in_row = divide(program.numel() / n);
  }
  if constexpr (!Form::is_known) {
    for (int k = 0; k < program.operands; ++k) {
      launch.is_dense[k] = is_dense(program, program.operand[k]);
    }
  }
  const int64_t threads = launch.rows * in_row;
  launch.vectors = Divisor(in_row, threads + kBlock);
  run_kernel<T, n, Form><<<static_cast<unsigned int>((threads + kBlock - 1) / kBlock), kBlock, 0, stream>>>(launch);
  return true;
}

template <class T, int n, class... Forms>
bool start_form(Launch& launch, Stream stream) {
  return ((has_form<n, Forms>(launch.program) && start<T, n, Forms>(launch, stream)) || ...);
}

constexpr auto number = Layout::number, stash = Layout::stash, dense = Layout::dense, dense_any = Layout::dense_any,
               column = Layout::column, half_column = Layout::half_column, row = Layout::row, same_row = Layout::same_row,
               gate = Layout::gate, any = Layout::any;
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
using SiluGradient = InstructionOf<Opcode::silu_gradient, dense>;
template <Layout layout>
using Add = InstructionOf<Opcode::add, layout, number>;
template <Layout layout>
using Multiply = InstructionOf<Opcode::multiply, layout>;

// A normalization, and what follows it: nothing, an activation or its gradient, a gate, a residual, or another normalization of
// the same kind as one.
template <class T, int n, class Norm>
bool start_norm_of_columns(Launch& launch, Stream stream) {
  if constexpr (n == 8) {
    // Tables are read faster by more vectors at once.
    if (start_form<
            T, n, Form<4, two, Load, Norm, LookUp>, Form<4, three, Load, Norm, LookUp, Multiply<gate>>,
            Form<4, two, Load, Norm, Gradient>, Form<2, two, Load, Norm, LookUp, Stash, Load, Norm, Add<stash>>>(
            launch, stream)) {
      return true;
    }
  } else if (start_form<
                 T, n, Form<2, two, Load, Norm, Silu>, Form<2, three, Load, Norm, Silu, Multiply<gate>>,
                 Form<2, two, Load, Norm, SiluGradient>>(launch, stream)) {
    return true;
  }
  return start_form<
      T, n, Form<2, two, Load, Norm>, Form<2, two, Load, Norm, Clamp>, Form<2, two, Load, Norm, Add<dense>>,
      Form<2, two, Load, Norm, Add<dense>, Clamp>, Form<2, three, Load, Norm, Clamp, Multiply<gate>>,
      Form<2, more, Load, Norm, Multiply<any>, Add<dense>>,         // stochastic depth
      Form<2, more, Load, Norm, Multiply<any>, Add<dense>, Clamp>,  // squeeze-and-excitation
      Form<2, two, Load, Norm, Stash, Load, Norm, Add<stash>>, Form<2, two, Load, Norm, Stash, Load, Norm, Add<stash>, Clamp>,
      Form<2, more, Load, Norm, Stash, Load, Norm, Multiply<any>, Add<stash>>>(launch, stream);
}

template <class T, int n, Spread spread, class Norm>
bool start_norm_and_table(Launch& launch, Stream stream) {
  if constexpr (n == 8) {
    return start_form<
        T, n, FormOfRows<4, more, spread, Load, Norm, LookUp>, FormOfRows<4, more, spread, Load, Norm, LookUp, Multiply<gate>>,
        FormOfRows<4, more, spread, Load, Norm, Gradient>>(launch, stream);
  }
  return false;
}

template <class T, int n, Spread spread, class Norm>
bool start_norm_of_rows(Launch& launch, Stream stream) {
  return start_form<
      T, n, FormOfRows<2, more, spread, LoadAny, Norm>, FormOfRows<2, more, spread, Load, Norm, Clamp>,
      FormOfRows<2, more, spread, LoadAny, Norm, Silu>, FormOfRows<2, more, spread, LoadAny, Norm, SiluGradient>,
      FormOfRows<2, more, spread, Load, Norm, Add<dense>>, FormOfRows<2, more, spread, Load, Norm, Add<dense>, Clamp>,
      FormOfRows<2, more, spread, Load, Norm, Stash, Load, Norm, Add<stash>, Clamp>>(launch, stream);
}

// A contiguous plane is a row for batch and group norm, whose length often isn't a multiple of a vector's: 14 x 14 isn't one of
// eight, nor 7 x 7 of four.
template <class T, int n>
bool start_rows(Launch& launch, Stream stream) {
  using BatchNorm = InstructionOf<Opcode::batch_norm, row, same_row, same_row, same_row>;
  using GroupNorm = InstructionOf<Opcode::group_norm, row, same_row, row, same_row>;
  return is_of_rows(launch.program, n) && (start_norm_and_table<T, n, Spread::row, BatchNorm>(launch, stream) ||
                                           start_norm_and_table<T, n, Spread::anywhere, BatchNorm>(launch, stream) ||
                                           start_norm_of_rows<T, n, Spread::anywhere, BatchNorm>(launch, stream) ||
                                           start_norm_and_table<T, n, Spread::row, GroupNorm>(launch, stream) ||
                                           start_norm_of_rows<T, n, Spread::row, GroupNorm>(launch, stream) ||
                                           start_norm_and_table<T, n, Spread::anywhere, GroupNorm>(launch, stream) ||
                                           start_form<
                                               T, n, FormOfRows<2, more, Spread::anywhere, LoadAny, GroupNorm>,
                                               FormOfRows<2, more, Spread::anywhere, Load, GroupNorm, Clamp>>(launch, stream));
}

template <class T, int n>
void start_common(Launch& launch, Stream stream) {
  using LayerNorm = InstructionOf<Opcode::layer_norm, row, same_row, column, column>;
  using Bits = Multiply<Layout::bits>;
  // Channels-last.
  start_norm_of_columns<T, n, InstructionOf<Opcode::batch_norm, column, column, column, column>>(launch, stream) ||
      start_norm_of_columns<T, n, InstructionOf<Opcode::scaled_norm, column, column, column, column>>(launch, stream) ||
      start_form<
          T, n, Form<2, two, LoadAny, LayerNorm>, Form<2, more, LoadAny, LayerNorm>,
          Form<2, more, LoadAnywhere, LayerNorm>,  // transposed for attention
          Form<2, two, Load, InstructionOf<Opcode::layer_norm, row, same_row, half_column, half_column>>,
          Form<2, two, LoadAny, LayerNorm, Bits, Multiply<number>>, Form<2, two, LoadAny, Multiply<row>>,  // RMS norm
          Form<1, two, LoadAny, Multiply<row>, Multiply<column>>, Form<2, two, LoadAny, Multiply<row>, Multiply<half_column>>,
          Form<4, two, Load, LookUp, Multiply<dense>>,                    // SwiGLU
          Form<4, two, LoadAnywhere, LookUp, Multiply<any>>,              // the same of one tensor's halves
          Form<4, two, Load, LookUp, Multiply<number>>,                   // scaled, as in nets without norms
          Form<4, two, Load, Multiply<number>, LookUp, Multiply<dense>>,  // quick GELU
          Form<2, two, LoadAny>, Form<2, all, LoadAnywhere>,              // repeated by upsampling
          Form<2, two, LoadAny, Multiply<number>, Add<dense_any>>,        // scaled residuals
          Form<2, two, Load, InstructionOf<Opcode::affine_norm, column, column, column, column>>,
          Form<2, two, LoadAny, Multiply<number>, Multiply<dense_any>>,  // GELU, composed
          Form<2, two, LoadAny, Power, Multiply<number>, Add<dense_any>, Multiply<number>, Tanh>,
          Form<2, two, LoadAny, Bits, Multiply<number>>,  // dropout
          Form<2, two, LoadAny, Bits, Multiply<number>, Add<dense_any>>,
          Form<2, more, LoadAny, Multiply<any>, Add<dense_any>>,  // layer scale
          Form<2, more, LoadAny, Multiply<any>, Multiply<any>, Add<dense_any>>,
          Form<2, more, LoadAny, Multiply<any>, Stash, LoadAny, LayerNorm, Add<stash>>>(launch, stream) ||
      start<T, n, Interpreted>(launch, stream);
}

template <class T>
void start_of_type(Launch& launch, Stream stream) {
  const bool is_wide = launch.program.element == Element::float32;
  const bool is_all_float32 = is_wide && std::is_same_v<T, c10::BFloat16>;  // it stands for no operand's type then
  if (is_all_float32 ? start_rows<c10::BFloat16, 4>(launch, stream) : !is_wide && start_rows<T, 8>(launch, stream)) {
    return;
  }
  if (!is_wide && is_in_vectors(launch.program, 8)) {
    start_common<T, 8>(launch, stream);
  } else if (is_in_vectors(launch.program, 4)) {
    is_all_float32 ? start_common<c10::BFloat16, 4>(launch, stream) : void(start<T, 4, Interpreted>(launch, stream));
  } else if (!is_wide && is_across_rows(launch.program, 8)) {
    start<T, 8, InterpretedAcrossRows>(launch, stream);
  } else if (is_across_rows(launch.program, 4)) {
    start<T, 4, InterpretedAcrossRows>(launch, stream);
  } else {
    start<T, 1, Interpreted>(launch, stream);
  }
}

}  // namespace

Error run(const Program& program, Stream stream) {
  Launch launch;
  launch.program = program;
  split(&launch.program);
  for (int dim = 0; dim < Program::kMaxDims; ++dim) {
    launch.size[dim] = Divisor(dim < launch.program.dims ? launch.program.size[dim] : 1, program.numel());
  }
  bool has_float16 = program.element == Element::float16;
  for (int k = 0; k < program.operands; ++k) {
    has_float16 |= program.operand[k].element == Element::float16;
  }
  for (int k = 0; k < program.instructions; ++k) {
    has_float16 |= program.instruction[k].rounded_to == Element::float16;
  }
  has_float16 ? start_of_type<c10::Half>(launch, stream) : start_of_type<c10::BFloat16>(launch, stream);
  return cudaGetLastError();
}

}  // namespace fastact::cuda
