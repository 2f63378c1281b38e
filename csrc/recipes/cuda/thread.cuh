// What one thread of the kernel computes: a few vectors of the output.
#pragma once

#include <utility>

#include "../../access.cuh"
#include "form.cuh"
#include "vectors.cuh"

namespace fastact::cuda {
namespace {

struct Launch {
  Program program;
  Divisor vectors;                       // the number of threads in a row of threads
  Divisor size[Program::kMaxDims];       // the program's dimensions
  int64_t rows;                          // of threads
  int64_t count;                         // of what a thread has several of: rows of the output, or vectors
  int64_t distance;                      // between two of a thread's
  bool is_dense[Program::kMaxOperands];  // whether it lies as the output does, for the interpreter
};

template <class T, int n, class Form>
class Thread {
 public:
  __device__ Thread(const Launch& launch, int64_t row, int64_t place)
      : launch_(launch), program_(launch.program), inner_(place * n) {
#pragma unroll
    for (int u = 0; u < Form::vectors; ++u) {
      int64_t i = (Form::spread == Spread::columns ? row : place) + u * launch.distance;
      if constexpr (Form::spread == Spread::columns) {
        i = min(i, launch.count - 1);
        dense_[u] = i * program_.size[0] + inner_;
      } else if constexpr (Form::spread == Spread::row) {
        dense_[u] = row * program_.size[0] + i * n;
        i = row;
      } else {
        dense_[u] = min(i, launch.count - 1) * n;
        int64_t within = dense_[u];
        i = launch.size[0].divide(&within);
        rest_[u] = static_cast<int>(min(int64_t{n}, program_.size[0] - within));
        if constexpr (!Form::is_known) {
          inner_ = within;
          find_row(i + 1, next_);
        }
      }
      find_row(i, outer_[u]);
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
  using Row = int64_t[Form::dims - 1];

  // Row i's place in each dimension but the innermost.
  __device__ void find_row(int64_t i, Row& row) const {
#pragma unroll
    for (int dim = 1; dim < Form::dims; ++dim) {
      row[dim - 1] = i;
      if (dim + 1 < Form::dims && dim + 1 < program_.dims) {
        const int64_t next = launch_.size[dim].divide(&i);
        row[dim - 1] = i;
        i = next;
      } else {
        i = 0;
      }
    }
  }

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
      if constexpr (Form::is_known && Form::spread == Spread::anywhere) {
        if (is_of_row(k, 0) && rest_[u] < n) {
          apply_to_two_rows<opcode>(k, u, a[u][0], b[u][0], c[u][0], d[u][0]);
          continue;
        }
      }
#pragma unroll
      for (int i = 0; i < n; ++i) {
        x_[u][i] = apply<opcode>(x_[u][i], a[u][i % first], b[u][i % first], c[u][i % last], d[u][i % last]);
      }
    }
  }

  // Applies it to a vector that crosses the end of a row: a, b, c and d are the first row's, and the next row's are read here.
  template <Opcode opcode>
  __device__ void apply_to_two_rows(int k, int u, float a, float b, float c, float d) {
    constexpr int references = references_of(opcode);
    Row row;
    int64_t place = dense_[u] + n - 1;
    find_row(launch_.size[0].divide(&place), row);
    float next[Instruction::kMaxReferences][1] = {};
    int64_t offset = 0;
#pragma unroll
    for (int r = 0; r < references; ++r) {
      offset = layout(k, r) == Layout::same_row ? offset : offset_of(operand(k, r), 0, row);
      load<T>(operand(k, r).data, layout(k, r) == Layout::gate ? own : Element::float32, true, offset, next[r]);
    }
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const bool is_next = i >= rest_[u];
      x_[u][i] = apply<opcode>(
          x_[u][i], is_next ? next[0][0] : a, is_next ? next[1][0] : b, is_next ? next[2][0] : c, is_next ? next[3][0] : d);
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

  // Whether it is the same for all of a row.
  __device__ static bool is_of_row(int k, int r) {
    const Layout of = layout(k, r);
    return of == Layout::row || of == Layout::same_row || (of == Layout::gate && Form::spread != Spread::columns);
  }

  // Whether it is the same for all of a vector, or for what is of one row.
  __device__ bool is_one(int k, int r) const {
    if constexpr (Form::is_known) {
      return layout(k, r) == Layout::number || is_of_row(k, r);
    } else {
      const int of = reference(k, r).operand;
      return of >= 0 ? Form::spread == Spread::columns && operand(k, r).stride[0] == 0 : of == Reference::kNumber;
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
    const bool is_shared = is_column(of) || of == Layout::number || (Form::spread == Spread::row && is_one(k, r));
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
      if constexpr (!Form::is_known) {
        if (launch_.is_dense[reference(k, r).operand]) {
          return load<T>(of.data, element, false, dense_[u], to);
        }
        if constexpr (Form::spread == Spread::anywhere) {
          return read_across_rows(of, element, to);
        }
      }
      const bool is_one_element = is_one(k, r) || (layout(k, r) == Layout::any && of.stride[0] == 0);
      load<T>(of.data, element, is_one_element, offset_of(k, r, u), to);
    }
  }

  // Reads what doesn't lie as the output does for a vector that may cross the end of a row.
  template <int size>
  __device__ void read_across_rows(const Program::Operand& of, Element element, float (&to)[size]) const {
    const int64_t here = offset_of(of, inner_, outer_[0]), next = offset_of(of, -rest_[0], next_);
    if (of.stride[0] == 0) {
      float first[1], second[1];
      load<T>(of.data, element, true, here, first);
      load<T>(of.data, element, true, rest_[0] < n ? next : here, second);
#pragma unroll
      for (int i = 0; i < size; ++i) {
        to[i] = i < rest_[0] ? first[0] : second[0];
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < size; ++i) {
      float one[1];
      load<T>(of.data, element, true, (i < rest_[0] ? here : next) + i * of.stride[0], one);
      to[i] = one[0];
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
        return offset_[u] = offset_of(operand(k, r), inner_, outer_[u]);
    }
  }

  __device__ int64_t offset_of(const Program::Operand& operand, int64_t inner, const Row& row) const {
    int64_t offset = inner * operand.stride[0];
#pragma unroll
    for (int dim = 1; dim < Form::dims; ++dim) {
      if (dim == 1 || dim < program_.dims) {
        offset += row[dim - 1] * operand.stride[dim];
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
  int64_t inner_, dense_[Form::vectors], offset_[Form::vectors];
  Row outer_[Form::vectors];
  Row next_;                 // the row after the vector's; of an interpreted program's Spread::anywhere
  int rest_[Form::vectors];  // how many of a vector's elements are of its first row; of Spread::anywhere
  float x_[Form::vectors][n], stashed_[Form::vectors][n];
};

}  // namespace
}  // namespace fastact::cuda
