// The kernel of programs that have no form. A thread first has what its vectors read copied to shared memory, so that it waits
// for memory once, and then runs one instruction after the other.
#include <cuda_pipeline.h>

#include <algorithm>

#include "../../access.cuh"
#include "starts.h"
#include "vectors.cuh"

namespace fastact::cuda {
namespace {

constexpr int kVectors = 2;               // of a thread
constexpr int kBlock = 64, kBlocks = 12;  // of a multiprocessor, at least
constexpr int kSharedBytes = 48 << 10;    // that a kernel may have without asking

// How a thread finds an operand's elements.
enum class Reading : uint8_t {
  none,      // not at all, as after a table took the place of what reads them; a table itself is found by its address
  column,    // in vectors that are the same for all rows, and so in L1: they aren't copied
  vector,    // in vectors
  row,       // one for all of a row
  elements,  // one by one
};

// How an instruction finds what it reads: in what is copied lie vectors of halves or floats, bits in a word, or the elements of
// a row and of the next one as floats.
enum class Kind : uint8_t { number, half_column, float_column, row, halves, floats, bits };

struct Source {
  Kind kind;
  float number;
  int offset;  // in shared memory
  const void* data;
};

struct Step {
  Opcode opcode;
  bool is_rounded;
  Source source[Instruction::kMaxReferences];
};

struct Interpretation {
  Program program;
  Divisor size[Program::kMaxDims];
  Reading reading[Program::kMaxOperands];
  int offset[Program::kMaxOperands];  // in shared memory
  int stash;                          // the same, of what is stashed
  Step step[Program::kMaxInstructions];
  int vectors;   // of the output
  int distance;  // between two of a thread's
};

__host__ __device__ constexpr bool is_copied(Reading reading) {
  return reading != Reading::none && reading != Reading::column;
}

constexpr Kind kind_of(Reading reading, Element element) {
  const bool is_float = element == Element::float32;
  return reading == Reading::column ? (is_float ? Kind::float_column : Kind::half_column)
         : reading == Reading::row  ? Kind::row
         : element == Element::bit  ? Kind::bits
         : is_float                 ? Kind::floats
                                    : Kind::halves;
}

// What a vector takes in shared memory.
__host__ __device__ constexpr int bytes_of(Kind kind, int n) {
  return kind == Kind::row ? 8 : kind == Kind::bits ? 4 : kind == Kind::floats ? 4 * n : 2 * n;
}

// Copies to shared memory, for what follows __pipeline_wait_prior(). __pipeline_memcpy_async() bypasses L1 for 16 bytes: what
// many threads read would come from the same line of L2, one after the other.
template <int bytes>
__device__ void copy_async(char* to, const void* from) {
#if __CUDA_ARCH__ >= 800
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(bytes) : "memory");
#else
  __pipeline_memcpy_async(to, from, bytes);
#endif
}

// Whether an instruction's r-th reference is always a number.
constexpr bool is_number(Opcode opcode, int r) {
  return opcode == Opcode::clamp || opcode == Opcode::power ||
         ((opcode == Opcode::add || opcode == Opcode::subtract) && r == 1);
}

template <class T, int n>
class Interpreter {
 public:
  __device__ Interpreter(const Interpretation& given, char* shared, int thread)
      : given_(given), program_(given.program), shared_(shared) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      index_[u] = thread + u * given.distance;
      inner_[u] = min(index_[u], given.vectors - 1) * n;
      const int row = given.size[0].divide(&inner_[u]);
      find_row(row, row_[u]);
      rest_[u] = static_cast<int>(program_.size[0]) - inner_[u];
      if (rest_[u] < n) {
        find_row(row + 1, next_[u]);
      }
    }
  }

  __device__ void run() {
    for (int k = 0; k < program_.operands; ++k) {
      if (is_copied(given_.reading[k])) {
#pragma unroll
        for (int u = 0; u < kVectors; ++u) {
          copy(k, u);
        }
      }
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    for (int k = 0; k < program_.instructions; ++k) {
      const Step& step = given_.step[k];
      with_opcode(step.opcode, [&](auto opcode) { run_step<opcode.value>(step); });
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (index_[u] < given_.vectors) {
        store<T>(x_[u], program_.element, index_[u] * n, program_.output);
      }
    }
  }

 private:
  using Row = int[Program::kMaxDims - 1];

  // Row i's place in each of the outer dimensions.
  __device__ void find_row(int i, Row& row) const {
#pragma unroll
    for (int dim = 1; dim < Program::kMaxDims; ++dim) {
      row[dim - 1] = i;
      i = dim + 1 < program_.dims ? given_.size[dim].divide(&row[dim - 1]) : 0;
    }
  }

  __device__ int offset_of(const Program::Operand& operand, int inner, const Row& row) const {
    int offset = inner * static_cast<int>(operand.stride[0]);
#pragma unroll
    for (int dim = 1; dim < Program::kMaxDims; ++dim) {
      if (dim < program_.dims) {
        offset += row[dim - 1] * static_cast<int>(operand.stride[dim]);
      }
    }
    return offset;
  }

  // The calling thread's p-th piece of so many bytes of vector u, of which each has `pieces`.
  template <int bytes, int pieces = 1>
  __device__ char* piece(int offset, int u, int p = 0) const {
    return shared_ + offset + ((u * pieces + p) * kBlock + static_cast<int>(threadIdx.x)) * bytes;
  }

  // A vector of so many bytes has pieces of 16, or is one.
  template <int bytes>
  static constexpr int size_of_piece = bytes < kVectorBytes ? bytes : kVectorBytes;

  __device__ void copy(int k, int u) const {
    const auto& operand = program_.operand[k];
    const int to = given_.offset[k], here = offset_of(operand, inner_[u], row_[u]);
    if (given_.reading[k] == Reading::vector) {
      return copy_vector(operand, here, to, u);
    }
    const int next = rest_[u] < n ? offset_of(operand, -rest_[u], next_[u]) : here;  // as if the vector were in the next row
    if (given_.reading[k] == Reading::row) {
      auto* const both = reinterpret_cast<float2*>(piece<8>(to, u));
      *both = {load<T>(operand.data, operand.element, here), load<T>(operand.data, operand.element, next)};
    } else {
      copy_elements(operand, here, next, to, u);
    }
  }

  __device__ void copy_vector(const Program::Operand& operand, int offset, int to, int u) const {
    if (operand.element == Element::float32) {
      copy_pieces<4 * n>(static_cast<const float*>(operand.data) + offset, to, u);
    } else if (operand.element == Element::bit) {
      *reinterpret_cast<uint32_t*>(piece<4>(to, u)) = bits_from(operand, offset);
    } else {
      copy_pieces<2 * n>(static_cast<const uint16_t*>(operand.data) + offset, to, u);
    }
  }

  template <int bytes>
  __device__ void copy_pieces(const void* from, int to, int u) const {
    constexpr int size = size_of_piece<bytes>, pieces = bytes / size;
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
      if constexpr (size >= 4) {
        copy_async<size>(piece<size, pieces>(to, u, p), static_cast<const char*>(from) + p * size);
      } else {
        *reinterpret_cast<uint16_t*>(piece<size>(to, u)) = *static_cast<const uint16_t*>(from);
      }
    }
  }

  __device__ void copy_elements(const Program::Operand& operand, int here, int next, int to, int u) const {
    const auto stride = static_cast<int>(operand.stride[0]);
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const int offset = (i < rest_[u] ? here : next) + i * stride;
      if (operand.element == Element::float32) {
        constexpr int size = size_of_piece<4 * n>, of_piece = size / 4;
        copy_async<4>(
            piece<size, n / of_piece>(to, u, i / of_piece) + i % of_piece * 4,
            static_cast<const float*>(operand.data) + offset);
      } else if (operand.element == Element::bit) {
        bits |= (bits_from(operand, offset) & 1) << i;
        *reinterpret_cast<uint32_t*>(piece<4>(to, u)) = bits;
      } else {
        reinterpret_cast<uint16_t*>(piece<2 * n>(to, u))[i] = static_cast<const uint16_t*>(operand.data)[offset];
      }
    }
  }

  // Those of a byte from `offset` on.
  __device__ static uint32_t bits_from(const Program::Operand& operand, int offset) {
    uint32_t word[1];
    fetch(operand.data, Element::bit, /*is_one=*/false, offset, word);
    return word[0];
  }

  template <Opcode opcode>
  __device__ void run_step(const Step& step) {
    if constexpr (opcode == Opcode::stash || opcode == Opcode::look_up || opcode == Opcode::gradient) {
      float grad[n] = {};  // a column is read for the first vector alone
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if constexpr (opcode == Opcode::stash) {
          stash(u);
        } else if constexpr (opcode == Opcode::look_up) {
          look_up<T>(static_cast<const uint16_t*>(step.source[0].data), x_[u]);
        } else {
          read<true>(step.source[0], u, grad);
          differentiate<T>(grad, static_cast<const float2*>(step.source[1].data), x_[u]);
        }
      }
    } else {
      apply_to_all<opcode>(step);
    }
    if (step.is_rounded) {
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        round<T>(x_[u]);
      }
    }
  }

  template <Opcode opcode>
  __device__ void apply_to_all(const Step& step) {
    constexpr int references = references_of(opcode);
    float a[is_number(opcode, 0) ? 1 : n] = {}, b[is_number(opcode, 1) ? 1 : n] = {}, c[n] = {}, d[n] = {};
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      read<0 < references>(step.source[0], u, a);
      read<1 < references>(step.source[1], u, b);
      read<2 < references>(step.source[2], u, c);
      read<3 < references>(step.source[3], u, d);
#pragma unroll
      for (int i = 0; i < n; ++i) {
        constexpr bool is_one_a = is_number(opcode, 0), is_one_b = is_number(opcode, 1);
        x_[u][i] = compute<opcode, T>(x_[u][i], a[is_one_a ? 0 : i], b[is_one_b ? 0 : i], c[i], d[i]);
      }
    }
  }

  template <bool is_read, int size>
  __device__ void read(const Source& source, int u, float (&to)[size]) const {
    if constexpr (!is_read) {
      return;
    } else if constexpr (size < n) {
      to[0] = source.number;
    } else {
      switch (source.kind) {
        case Kind::number:
          return fill(source.number, to);
        case Kind::half_column:
          return u == 0 ? read_column(source, Element::bfloat16, to) : void();
        case Kind::float_column:
          return u == 0 ? read_column(source, Element::float32, to) : void();
        case Kind::row: {
          const float2 both = *reinterpret_cast<const float2*>(piece<8>(source.offset, u));
#pragma unroll
          for (int i = 0; i < n; ++i) {
            to[i] = i < rest_[u] ? both.x : both.y;
          }
          return;
        }
        case Kind::halves:
          return read_pieces<2 * n>(source, u, Element::bfloat16, to);  // stands for T
        case Kind::floats:
          return read_pieces<4 * n>(source, u, Element::float32, to);
        case Kind::bits:
          return read_pieces<4>(source, u, Element::bit, to);
      }
    }
  }

  __device__ void read_column(const Source& source, Element element, float (&to)[n]) const {
    uint32_t words[n];
    fetch(source.data, element, /*is_one=*/false, inner_[0], words);
    convert<T>(words, element, to);
  }

  template <int bytes>
  __device__ void read_pieces(const Source& source, int u, Element element, float (&to)[n]) const {
    constexpr int size = size_of_piece<bytes>, pieces = bytes / size;
    uint32_t words[n];
    if constexpr (size < 4) {
      words[0] = *reinterpret_cast<const uint16_t*>(piece<size>(source.offset, u));
    } else {
#pragma unroll
      for (int p = 0; p < pieces; ++p) {
        move<size / 4>(piece<size, pieces>(source.offset, u, p), words + p * size / 4);
      }
    }
    convert<T>(words, element, to);
  }

  __device__ void stash(int u) const {
    constexpr int size = size_of_piece<4 * n>, pieces = 4 * n / size;
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
      move<size / 4>(x_[u] + p * size / 4, piece<size, pieces>(given_.stash, u, p));
    }
  }

  const Interpretation& given_;
  const Program& program_;
  char* const shared_;
  int index_[kVectors], inner_[kVectors], rest_[kVectors];  // `rest`: of the row
  Row row_[kVectors], next_[kVectors];                      // the next one if the vector crosses the end of its row
  alignas(kVectorBytes) float x_[kVectors][n];
};

template <class T, int n>
__global__ void __launch_bounds__(kBlock, kBlocks) interpreted_run_kernel(const __grid_constant__ Interpretation given) {
  extern __shared__ __align__(kVectorBytes) char shared[];
  const int thread = static_cast<int>(blockIdx.x) * kBlock + threadIdx.x;
  if (thread < given.distance) {
    Interpreter<T, n>(given, shared, thread).run();
  }
}

// Whether an instruction reads an operand, other than as a table.
bool is_read(const Program& program, int operand) {
  return std::any_of(program.instruction, program.instruction + program.instructions, [&](const Instruction& each) {
    const int table = each.opcode == Opcode::look_up ? 0 : each.opcode == Opcode::gradient ? 1 : -1;
    for (int r = 0; r < references_of(each.opcode); ++r) {
      if (r != table && each.reference[r].operand == operand) {
        return true;
      }
    }
    return false;
  });
}

// Where rows don't consist of whole vectors, an operand must be dense to be read in them.
Reading reading_of(const Program& program, const Program::Operand& operand, int n) {
  const int64_t *outer = operand.stride + 1, *last = operand.stride + program.dims;
  const bool is_bit = operand.element == Element::bit;
  const bool has_vectors = is_aligned(operand.data, operand.element, n) && operand.stride[0] == 1;
  const bool has_whole_rows = program.size[0] % n == 0;
  if (has_vectors && has_whole_rows && !is_bit && program.dims > 1 &&
      std::all_of(outer, last, [](int64_t each) { return each == 0; })) {
    return Reading::column;
  }
  if (has_vectors && (program.is_dense(operand) || (has_whole_rows && std::all_of(outer, last, [&](int64_t each) {
                                                      return each % (is_bit ? kMaskBits : n) == 0;
                                                    })))) {
    return Reading::vector;
  }
  return operand.stride[0] == 0 ? Reading::row : Reading::elements;
}

template <class T, int n>
void start(const Program& program, Stream stream) {
  const auto numel = static_cast<int>(program.numel()), size = static_cast<int>(program.size[0]);
  Interpretation given = {program};
  for (int dim = 0; dim < program.dims; ++dim) {
    given.size[dim] = Divisor(program.size[dim], numel);
  }
  given.vectors = numel / n;
  const int in_row = program.dims > 1 && size % n == 0 ? size / n : 1;  // for columns
  const int rows = given.vectors / in_row;
  given.distance = (rows + kVectors - 1) / kVectors * in_row;
  int bytes = 0;
  for (int k = 0; k < program.operands; ++k) {
    const auto& operand = program.operand[k];
    given.reading[k] = is_read(program, k) ? reading_of(program, operand, n) : Reading::none;
    given.offset[k] = bytes;
    bytes += is_copied(given.reading[k]) ? bytes_of(kind_of(given.reading[k], operand.element), n) * kVectors * kBlock : 0;
  }
  given.stash = bytes;
  for (int k = 0; k < program.instructions; ++k) {
    const Instruction& instruction = program.instruction[k];
    Step& step = given.step[k];
    step.opcode = instruction.opcode;
    step.is_rounded = instruction.rounded_to != Element::float32;
    if (step.opcode == Opcode::stash) {
      bytes = given.stash + bytes_of(Kind::floats, n) * kVectors * kBlock;
    }
    for (int r = 0; r < references_of(instruction.opcode); ++r) {
      const int of = instruction.reference[r].operand;
      step.source[r] =
          of == Reference::kNumber ? Source{Kind::number, instruction.reference[r].number}
          : of == Reference::kStash
              ? Source{Kind::floats, 0, given.stash}
              : Source{kind_of(given.reading[of], program.operand[of].element), 0, given.offset[of], program.operand[of].data};
    }
  }
  if (bytes > kSharedBytes) {  // asks for the most that a program has, since another thread may do so too
    constexpr int most = (Program::kMaxOperands + 1) * bytes_of(Kind::floats, n) * kVectors * kBlock;
    cudaFuncSetAttribute(interpreted_run_kernel<T, n>, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  }
  interpreted_run_kernel<T, n><<<(given.distance + kBlock - 1) / kBlock, kBlock, bytes, stream>>>(given);
}

template <class T>
void start_any(const Program& program, Stream stream) {
  const int n = program.element == Element::float32 ? 4 : 8;
  if (program.size[0] < n || program.numel() % n != 0 || !is_aligned(program.output, program.element, n)) {
    start<T, 1>(program, stream);
  } else {
    n == 4 ? start<T, 4>(program, stream) : start<T, 8>(program, stream);
  }
}

}  // namespace

void start_interpreter(const Program& program, bool has_float16, Stream stream) {
  has_float16 ? start_any<c10::Half>(program, stream) : start_any<c10::BFloat16>(program, stream);
}

}  // namespace fastact::cuda
