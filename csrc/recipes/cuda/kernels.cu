// The GPU's kernel. A thread computes a few vectors: in one column, so that what is the same in all rows, as a channel's
// statistics are in channels-last, is read once; or along one row, if that is what shares it.
//
// It is compiled as an interpreter, which runs any program, and for forms: the instructions of common programs, known in
// advance. On an H100 forms take 0.99 to 1.2 times the time in which a copy moves the same bytes, the interpreter 1.5 to 3
// times that.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <utility>

#include "../../access.cuh"
#include "../instructions.h"

namespace fastact::cuda {
namespace {

constexpr int kBlock = 128;

struct Launch {
  Program program;
  Divisor vectors;                  // of a row
  Divisor size[Program::kMaxDims];  // of the dimensions that rows are counted in
  int64_t rows, distance;           // a thread's vectors are so many rows, or so many elements of a row, apart
};

// What an instruction of a form reads. `dense` has the output's layout and dtype, `dense_any` and `bits` its layout. Parameters
// are the same in all rows (`column`) or in all of a row (`row`), and float32, or of the half type (`half_column`). `same_row`
// has its element where the reference before it has. A `gate` has the output's dtype and, if vectors are along a row, one
// element for it, else vectors. `any` may lie anyhow, and a `table` is no tensor of the output's elements.
enum class Layout : uint8_t { number, stash, dense, dense_any, bits, column, half_column, row, same_row, gate, any, table };

template <Opcode opcode_, Layout... layouts>
struct InstructionOf {
  static constexpr Opcode opcode = opcode_;

  FASTACT_HOST_DEVICE static constexpr Layout layout(int reference) {
    constexpr Layout all[] = {layouts..., Layout::number};
    return all[reference];
  }
};

// The instructions of a program of at most so many dimensions, and how many vectors a thread has.
template <int vectors_, int dims_, class... Instructions>
struct Form {
  static constexpr bool is_known = true, is_along = false;
  static constexpr int vectors = vectors_, dims = dims_, instructions = sizeof...(Instructions);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 860
  static constexpr int blocks = 1;  // of a multiprocessor, at least: for more ptxas would spill registers here
#else
  static constexpr int blocks = 0;  // for ptxas to say
#endif

  FASTACT_HOST_DEVICE static constexpr Opcode opcode(int k) {
    constexpr Opcode all[] = {Instructions::opcode...};
    return all[k];
  }

  FASTACT_HOST_DEVICE static constexpr Layout layout(int k, int reference) {
    Layout result = Layout::number;
    ((k-- == 0 ? void(result = Instructions::layout(reference)) : void()), ...);
    return result;
  }
};

// With the vectors along a row.
template <int vectors, int dims, class... Instructions>
struct FormAlong : Form<vectors, dims, Instructions...> {
  static constexpr bool is_along = true;
};

struct Interpreted {
  static constexpr bool is_known = false, is_along = false;
  static constexpr int vectors = 1, dims = Program::kMaxDims;
  static constexpr int blocks = 1;  // or ptxas would spill registers for more
};

// Two numbers of a half type, which are converted at once: one by one it takes several times as long.
template <class T>
__device__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
  } else {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
}

template <class T>
__device__ float2 unpack(uint32_t both) {
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    return {__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&both));
  }
}

template <int n>
using Pairs = uint32_t[(n + 1) / 2];

template <class T, int n>
__device__ void pack(const float (&x)[n], Pairs<n>& to) {
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    to[i / 2] = pack<T>(x[i], i + 1 < n ? x[i + 1] : 0);
  }
}

template <class T, int n>
__device__ void unpack(const Pairs<n>& from, float (&x)[n]) {
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    const float2 both = unpack<T>(from[i / 2]);
    x[i] = both.x;
    if (i + 1 < n) {
      x[i + 1] = both.y;
    }
  }
}

template <int n>
struct alignas(n * 4) Words {
  uint32_t word[n];
};

// Moves n words, in pieces of 16 bytes where there are as many.
template <int n>
__device__ void move(const void* from, void* to) {
  constexpr int piece = n < 4 ? n : 4;
#pragma unroll
  for (int i = 0; i < n / piece; ++i) {
    static_cast<Words<piece>*>(to)[i] = static_cast<const Words<piece>*>(from)[i];
  }
}

// Reads n elements, or one that is all of them. T is the half type of the program.
template <class T, int n>
__device__ void load(const void* data, Element element, bool is_one, int64_t offset, float (&to)[n]) {
  if (element == Element::bit) {
    const unsigned int byte = static_cast<const uint8_t*>(data)[offset / 8] >> (offset % 8);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      to[i] = static_cast<float>(byte >> i & 1);
    }
    return;
  }
  const auto* words = static_cast<const float*>(data) + offset;
  const auto* halves = static_cast<const uint16_t*>(data) + offset;
  if (n == 1 || is_one) {
    const float one = element == Element::float32 ? *words : unpack<T>(*halves).x;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      to[i] = one;
    }
  } else if (element == Element::float32) {
    move<n>(words, to);
  } else {
    Pairs<n> pairs;
    move<(n + 1) / 2>(halves, pairs);
    unpack<T>(pairs, to);
  }
}

template <class T, int n>
__device__ void store(const float (&x)[n], Element element, int64_t offset, void* output) {
  if (element == Element::float32) {
    move<n>(x, static_cast<float*>(output) + offset);
    return;
  }
  Pairs<n> pairs;
  pack<T>(x, pairs);
  auto* to = static_cast<uint16_t*>(output) + offset;
  if constexpr (n == 1) {
    *to = static_cast<uint16_t>(pairs[0]);
  } else {
    move<n / 2>(pairs, to);
  }
}

template <class T, int n, class Form>
class Thread {
 public:
  __device__ Thread(const Launch& launch, int64_t inner, int64_t row)
      : launch_(launch), program_(launch.program), inner_(inner) {
#pragma unroll
    for (int u = 0; u < Form::vectors; ++u) {
      int64_t i = Form::is_along ? row : min(row + u * launch.distance, launch.rows - 1);
      dense_[u] = i * program_.size[0] + inner + (Form::is_along ? u * launch.distance : 0);
#pragma unroll
      for (int dim = 1; dim < Form::dims; ++dim) {
        outer_[u][dim - 1] = i;
        if (dim + 1 < Form::dims && dim + 1 < program_.dims) {
          const int64_t next = launch.size[dim].divide(&i);
          outer_[u][dim - 1] = i;
          i = next;
        } else {
          i = 0;
        }
      }
    }
  }

  __device__ void run() {
    if constexpr (Form::is_known) {
      run_instructions(std::make_integer_sequence<int, Form::instructions>());
    } else {
      for (int k = 0; k < program_.instructions; ++k) {
        with_opcode(program_.instruction[k].opcode, [&](auto opcode) { run_instruction<opcode.value>(k); });
      }
    }
  }

  __device__ void store_vector(int u) const {
    store<T>(x_[u], Form::is_known ? own : program_.element, dense_[u], program_.output);
  }

 private:
  template <int... ks>
  __device__ void run_instructions(std::integer_sequence<int, ks...>) {
    (run_instruction<Form::opcode(ks)>(ks), ...);
  }

  template <Opcode opcode>
  __device__ void run_instruction(int k) {
    if constexpr (opcode == Opcode::look_up) {
      look_up(static_cast<const uint16_t*>(operand(k, 0).data));
    } else if constexpr (opcode == Opcode::gradient) {
      differentiate(k, static_cast<const float2*>(operand(k, 1).data));
    } else if constexpr (opcode == Opcode::stash) {
#pragma unroll
      for (int i = 0; i < Form::vectors * n; ++i) {
        stashed_[i / n][i % n] = x_[i / n][i % n];
      }
    } else if constexpr (!is_norm(opcode)) {
      apply_with<opcode, opcode == Opcode::clamp ? 1 : n, 1>(k);
    } else if (is_one(k, 0) && is_one(k, 1)) {
      is_one(k, 2) && is_one(k, 3) ? apply_with<opcode, 1, 1>(k) : apply_with<opcode, 1, n>(k);
    } else {
      apply_with<opcode, n, n>(k);
    }
    if (program_.instruction[k].rounded_to != Element::float32) {
#pragma unroll
      for (int u = 0; u < Form::vectors; ++u) {
        Pairs<n> pairs;
        pack<T>(x_[u], pairs);
        unpack<T>(pairs, x_[u]);
      }
    }
  }

  // `first` elements of the first two references and `last` of the others: n, or one that is all of them.
  template <Opcode opcode, int first, int last>
  __device__ void apply_with(int k) {
    constexpr int references = references_of(opcode);
    float a[Form::vectors][first] = {}, b[Form::vectors][first] = {}, c[Form::vectors][last] = {}, d[Form::vectors][last] = {};
    read<0 < references>(k, 0, a);
    read<1 < references>(k, 1, b);
    read<2 < references>(k, 2, c);
    read<3 < references>(k, 3, d);
#pragma unroll
    for (int u = 0; u < Form::vectors; ++u) {
#pragma unroll
      for (int i = 0; i < n; ++i) {
        x_[u][i] = apply<opcode>(x_[u][i], a[u][i % first], b[u][i % first], c[u][i % last], d[u][i % last]);
      }
    }
  }

  // The output's dtype in a form; bfloat16 stands for T.
  static constexpr Element own = n == 8 ? Element::bfloat16 : Element::float32;

  __device__ static bool is_column(Layout layout) { return layout == Layout::column || layout == Layout::half_column; }

  __device__ const Reference& reference(int k, int r) const { return program_.instruction[k].reference[r]; }

  __device__ const Program::Operand& operand(int k, int r) const { return program_.operand[reference(k, r).operand]; }

  __device__ static Layout layout(int k, int r) {
    if constexpr (Form::is_known) {
      return Form::layout(k, r);
    }
    return Layout::any;
  }

  // Whether it is the same for all of a vector.
  __device__ bool is_one(int k, int r) const {
    if constexpr (Form::is_known) {
      const Layout of = layout(k, r);
      return of == Layout::number || of == Layout::row || of == Layout::same_row || (of == Layout::gate && Form::is_along);
    } else {
      const int of = reference(k, r).operand;
      return of >= 0 ? operand(k, r).stride[0] == 0 : of == Reference::kNumber;
    }
  }

  // Reads instruction k's r-th reference, for all vectors: the first use of one waits for it.
  template <bool is_read, int size>
  __device__ void read(int k, int r, float (&to)[Form::vectors][size]) {
    if constexpr (!is_read) {
      return;
    } else if constexpr (!Form::is_known) {
      read_vector(k, r, reference(k, r).operand < 0 ? Element::float32 : operand(k, r).element, 0, to[0]);
    } else {
      constexpr Element half = Element::bfloat16;  // stands for T
      switch (layout(k, r)) {
        case Layout::dense:
        case Layout::gate:
          return read_as(k, r, own, to);
        case Layout::half_column:
          return read_as(k, r, half, to);
        case Layout::bits:
          return read_as(k, r, Element::bit, to);
        case Layout::dense_any:
          return operand(k, r).element == Element::float32 ? read_as(k, r, Element::float32, to) : read_as(k, r, half, to);
        case Layout::any:
          return read_as(k, r, operand(k, r).element, to);
        default:
          return read_as(k, r, Element::float32, to);
      }
    }
  }

  template <int size>
  __device__ void read_as(int k, int r, Element element, float (&to)[Form::vectors][size]) {
    const Layout of = layout(k, r);
    const bool is_shared = Form::is_along ? is_one(k, r) : is_column(of) || of == Layout::number;
#pragma unroll
    for (int u = 0; u < Form::vectors; ++u) {
      if (u > 0 && is_shared) {
        copy(to[0], to[u]);
      } else {
        read_vector(k, r, element, u, to[u]);
      }
    }
  }

  template <int size>
  __device__ void read_vector(int k, int r, Element element, int u, float (&to)[size]) {
    if (Form::is_known ? layout(k, r) == Layout::number : reference(k, r).operand == Reference::kNumber) {
      fill(reference(k, r).number, to);
    } else if (Form::is_known ? layout(k, r) == Layout::stash : reference(k, r).operand == Reference::kStash) {
      copy(stashed_[u], to);
    } else {
      const auto& of = operand(k, r);
      const bool is_one_element = is_one(k, r) || (layout(k, r) == Layout::any && of.stride[0] == 0);
      load<T>(of.data, element, is_one_element, offset_of(k, r, u), to);
    }
  }

  // Where vector u is in an operand.
  __device__ int64_t offset_of(int k, int r, int u) {
    switch (layout(k, r)) {
      case Layout::dense:
      case Layout::dense_any:
      case Layout::bits:
        return dense_[u];
      case Layout::column:
      case Layout::half_column:
        return inner_;
      case Layout::same_row:
        return offset_[u];
      default:
        return offset_[u] = offset_of(operand(k, r), u);
    }
  }

  __device__ int64_t offset_of(const Program::Operand& operand, int u) const {
    int64_t offset = (inner_ + (Form::is_along ? u * launch_.distance : 0)) * operand.stride[0];
#pragma unroll
    for (int dim = 1; dim < Form::dims; ++dim) {
      if (dim == 1 || dim < program_.dims) {
        offset += outer_[u][dim - 1] * operand.stride[dim];
      }
    }
    return offset;
  }

  template <int size>
  __device__ static void fill(float number, float (&to)[size]) {
#pragma unroll
    for (int i = 0; i < size; ++i) {
      to[i] = number;
    }
  }

  template <int from_size, int size>
  __device__ static void copy(const float (&from)[from_size], float (&to)[size]) {
#pragma unroll
    for (int i = 0; i < size; ++i) {
      to[i] = from[i];
    }
  }

  __device__ void look_up(const uint16_t* table) {
#pragma unroll
    for (int u = 0; u < Form::vectors; ++u) {
      Pairs<n> pairs;
      pack<T>(x_[u], pairs);
#pragma unroll
      for (int i = 0; i < n; i += 2) {
        const uint32_t low = __ldg(table + (pairs[i / 2] & 0xffff));
        const uint32_t high = i + 1 < n ? __ldg(table + (pairs[i / 2] >> 16)) : 0;
        pairs[i / 2] = low | high << 16;
      }
      unpack<T>(pairs, x_[u]);
    }
  }

  __device__ void differentiate(int k, const float2* factors) {
    float grad[Form::vectors][n];
    read<true>(k, 0, grad);
#pragma unroll
    for (int u = 0; u < Form::vectors; ++u) {
      Pairs<n> pairs;
      pack<T>(x_[u], pairs);
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const float2 of_number = __ldg(factors + (pairs[i / 2] >> (i % 2 * 16) & 0xffff));
        x_[u][i] = scaled(grad[u][i], of_number.x, of_number.y);
      }
    }
  }

  const Launch& launch_;
  const Program& program_;
  int64_t inner_, outer_[Form::vectors][Form::dims - 1], dense_[Form::vectors], offset_[Form::vectors];
  float x_[Form::vectors][n], stashed_[Form::vectors][n];
};

template <class T, int n, class Form>
__global__ void __launch_bounds__(kBlock, Form::blocks) run_kernel(const __grid_constant__ Launch launch) {
  int64_t vector = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  const int64_t row = launch.vectors.divide(&vector);
  if (row >= (Form::is_along ? launch.rows : launch.distance)) {
    return;
  }
  Thread<T, n, Form> thread(launch, vector * n, row);
  thread.run();
#pragma unroll
  for (int u = 0; u < Form::vectors; ++u) {
    if (Form::is_along || row + u * launch.distance < launch.rows) {
      thread.store_vector(u);
    }
  }
}

bool has_layout(const Program& program, const Instruction& instruction, int r, Layout layout, bool is_along) {
  const Reference& reference = instruction.reference[r];
  if (layout == Layout::number) {
    return reference.operand == Reference::kNumber;
  }
  if (layout == Layout::stash) {
    return reference.operand == Reference::kStash;
  }
  if (reference.operand < 0) {
    return false;
  }
  const auto& operand = program.operand[reference.operand];
  const bool is_half = operand.element == Element::float16 || operand.element == Element::bfloat16;
  int64_t dense = 1;
  for (int dim = 0; dim < program.dims; ++dim) {
    const int64_t stride = operand.stride[dim];
    const auto fits = [&] {
      switch (layout) {
        case Layout::dense:
          return stride == dense && operand.element == program.element;
        case Layout::dense_any:
          return stride == dense && operand.element != Element::bit;
        case Layout::bits:
          return stride == dense && operand.element == Element::bit;
        case Layout::column:
          return stride == (dim == 0) && operand.element == Element::float32;
        case Layout::half_column:
          return stride == (dim == 0) && is_half;
        case Layout::row:
          return (dim > 0 || stride == 0) && operand.element == Element::float32;
        case Layout::gate:
          return (dim > 0 || stride == !is_along) && operand.element == program.element;
        case Layout::same_row:
          return stride == program.operand[instruction.reference[r - 1].operand].stride[dim] &&
                 operand.element == Element::float32;
        default:
          return true;
      }
    };
    if (!fits()) {
      return false;
    }
    dense *= program.size[dim];
  }
  return true;
}

template <int n, class Form>
bool has_form(const Program& program) {
  if (program.instructions != Form::instructions || program.dims > Form::dims ||
      (Form::is_along && program.size[0] % (Form::vectors * n) != 0)) {
    return false;
  }
  for (int k = 0; k < program.instructions; ++k) {
    const Instruction& instruction = program.instruction[k];
    if (instruction.opcode != Form::opcode(k)) {
      return false;
    }
    for (int r = 0; r < references_of(instruction.opcode); ++r) {
      if (!has_layout(program, instruction, r, Form::layout(k, r), Form::is_along)) {
        return false;
      }
    }
  }
  return true;
}

// Whether all that is read lies in vectors of n, or is one element for all of a vector.
bool is_in_vectors(const Program& program, int n) {
  const auto is_aligned_to = [&](const void* data, Element element) {
    const int bytes = element == Element::bit ? 1 : element == Element::float32 ? kVectorBytes : 2 * n;
    return reinterpret_cast<uintptr_t>(data) % bytes == 0;
  };
  if (program.size[0] % n != 0 || !is_aligned_to(program.output, program.element)) {
    return false;
  }
  for (int k = 0; k < program.operands; ++k) {
    const auto& operand = program.operand[k];
    bool fits = operand.stride[0] == 0 || (operand.stride[0] == 1 && is_aligned_to(operand.data, operand.element));
    for (int dim = 1; dim < program.dims && operand.stride[0] != 0; ++dim) {
      fits &= operand.stride[dim] % (operand.element == Element::bit ? 8 : n) == 0;
    }
    if (!fits) {
      return false;
    }
  }
  return true;
}

// One row of all elements as rows, of which a thread has several.
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
bool start(Launch& launch, cudaStream_t stream) {
  const Program& program = launch.program;
  launch.rows = program.numel() / program.size[0];
  launch.distance = ((Form::is_along ? program.size[0] : launch.rows) + Form::vectors - 1) / Form::vectors;
  const int64_t vectors = (Form::is_along ? launch.distance : program.size[0]) / n;
  const int64_t threads = vectors * (Form::is_along ? launch.rows : launch.distance);
  launch.vectors = Divisor(vectors, threads + kBlock);
  run_kernel<T, n, Form><<<static_cast<unsigned int>((threads + kBlock - 1) / kBlock), kBlock, 0, stream>>>(launch);
  return true;
}

template <class T, int n, class... Forms>
bool start_form(Launch& launch, cudaStream_t stream) {
  return ((has_form<n, Forms>(launch.program) && start<T, n, Forms>(launch, stream)) || ...);
}

constexpr auto number = Layout::number, stash = Layout::stash, dense = Layout::dense, dense_any = Layout::dense_any,
               column = Layout::column, half_column = Layout::half_column, row = Layout::row, same_row = Layout::same_row,
               gate = Layout::gate, any = Layout::any;
constexpr int two = 2, three = 3, more = 4;  // dimensions

using Load = InstructionOf<Opcode::load, dense>;
using LoadAny = InstructionOf<Opcode::load, dense_any>;
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
bool start_norm_of_columns(Launch& launch, cudaStream_t stream) {
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
      Form<2, more, Load, Norm, Multiply<any>, Add<dense>>,  // stochastic depth
      Form<2, two, Load, Norm, Stash, Load, Norm, Add<stash>>, Form<2, two, Load, Norm, Stash, Load, Norm, Add<stash>, Clamp>,
      Form<2, more, Load, Norm, Stash, Load, Norm, Multiply<any>, Add<stash>>>(launch, stream);
}

template <class T, int n, class Norm>
bool start_norm_of_rows(Launch& launch, cudaStream_t stream) {
  if constexpr (n == 8) {
    if (start_form<
            T, n, FormAlong<4, more, Load, Norm, LookUp>, FormAlong<4, more, Load, Norm, LookUp, Multiply<gate>>,
            FormAlong<4, more, Load, Norm, Gradient>>(launch, stream)) {
      return true;
    }
  }
  return start_form<
      T, n, FormAlong<2, more, LoadAny, Norm>, FormAlong<2, more, Load, Norm, Clamp>, FormAlong<2, more, LoadAny, Norm, Silu>,
      FormAlong<2, more, LoadAny, Norm, SiluGradient>, FormAlong<2, more, Load, Norm, Add<dense>>,
      FormAlong<2, more, Load, Norm, Add<dense>, Clamp>, FormAlong<2, more, Load, Norm, Stash, Load, Norm, Add<stash>, Clamp>>(
      launch, stream);
}

template <class T, int n>
void start_common(Launch& launch, cudaStream_t stream) {
  using LayerNorm = InstructionOf<Opcode::layer_norm, row, same_row, column, column>;
  using Bits = Multiply<Layout::bits>;
  // Channels-last.
  start_norm_of_columns<T, n, InstructionOf<Opcode::batch_norm, column, column, column, column>>(launch, stream) ||
      start_norm_of_columns<T, n, InstructionOf<Opcode::scaled_norm, column, column, column, column>>(launch, stream) ||
      start_norm_of_rows<T, n, InstructionOf<Opcode::batch_norm, row, same_row, same_row, same_row>>(launch, stream) ||
      start_norm_of_rows<T, n, InstructionOf<Opcode::group_norm, row, same_row, row, same_row>>(launch, stream) ||
      start_form<
          T, n, Form<2, two, LoadAny, LayerNorm>, Form<2, more, LoadAny, LayerNorm>,
          Form<2, two, Load, InstructionOf<Opcode::layer_norm, row, same_row, half_column, half_column>>,
          Form<2, two, LoadAny, LayerNorm, Bits, Multiply<number>>, Form<2, two, LoadAny, Multiply<row>>,  // RMS norm
          Form<1, two, LoadAny, Multiply<row>, Multiply<column>>, Form<2, two, LoadAny, Multiply<row>, Multiply<half_column>>,
          Form<4, two, Load, LookUp, Multiply<dense>>,                                          // SwiGLU
          Form<2, two, LoadAny>, Form<2, two, LoadAny, Multiply<number>, Multiply<dense_any>>,  // GELU, composed
          Form<2, two, LoadAny, Power, Multiply<number>, Add<dense_any>, Multiply<number>, Tanh>,
          Form<2, two, LoadAny, Bits, Multiply<number>>,  // dropout
          Form<2, two, LoadAny, Bits, Multiply<number>, Add<dense_any>>,
          Form<2, more, LoadAny, Multiply<any>, Add<dense_any>>,  // layer scale
          Form<2, more, LoadAny, Multiply<any>, Multiply<any>, Add<dense_any>>>(launch, stream) ||
      start<T, n, Interpreted>(launch, stream);
}

template <class T>
void start_of_type(Launch& launch, cudaStream_t stream) {
  const bool is_wide = launch.program.element == Element::float32;
  if (!is_wide && is_in_vectors(launch.program, 8)) {
    start_common<T, 8>(launch, stream);
  } else if (!is_in_vectors(launch.program, 4)) {
    start<T, 1, Interpreted>(launch, stream);
  } else if (std::is_same_v<T, c10::BFloat16> && is_wide) {
    start_common<c10::BFloat16, 4>(launch, stream);
  } else {
    start<T, 4, Interpreted>(launch, stream);
  }
}

}  // namespace

cudaError_t run(const Program& program, cudaStream_t stream) {
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
  has_float16 ? start_of_type<c10::Half>(launch, stream) : start_of_type<c10::BFloat16>(launch, stream);
  return cudaGetLastError();
}

}  // namespace fastact::cuda
