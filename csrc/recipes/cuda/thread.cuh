// What one thread of a form's kernel computes: a few vectors of the output.
#pragma once

#include <utility>

#include "../../access.cuh"
#include "form.cuh"
#include "vectors.cuh"

namespace fastact::cuda {
namespace {

struct Launch {
  Program program;
  Divisor vectors;                  // the number of threads in a row of threads
  Divisor in_sample;                // the number of rows of threads in a sample
  Divisor size[Program::kMaxDims];  // the program's dimensions
  int rows;                         // of threads
  int count;                        // of what a thread has several of: rows of the output, or vectors
  int distance;                     // between two of a thread's
};

// It first fetches all that its vectors need, so that it waits for memory once, and then computes one after the other, so that
// few registers hold numbers at a time. What the vectors look up in a table is fetched together, for the same reason.
template <class T, int n, class Form>
class Thread {
 public:
  __device__ Thread(const Launch& launch, int row, int place)
      : launch_(launch),
        program_(launch.program),
        first_((has_columns ? row : place) * (Form::spread == Spread::pairs ? 2 : 1)),
        inner_(place * n) {
    const int sample = Form::spread == Spread::sample ? launch.in_sample.divide(&first_) : 0;
#pragma unroll
    for (int u = 0; u < Form::vectors; ++u) {
      int i = vector(u);
      if constexpr (has_columns) {
        i = min(i, launch.count - 1) + sample * launch.count;
        dense_[u] = i * size() + inner_;
      } else if constexpr (Form::spread == Spread::row) {
        dense_[u] = row * size() + i * n;
        i = row;
      } else {
        dense_[u] = min(i, launch.count - 1) * n;
        int within = dense_[u];
        i = launch.size[0].divide(&within);
        rest_[u] = min(n, size() - within);
        if (rest_[u] < n) {
          find_row(i + 1, next_[u]);
        }
      }
      if constexpr (Form::spread == Spread::sample) {
        outer_[u][0] = 0;  // what isn't dense is the same in all of the sample's rows
        outer_[u][1] = sample;
      } else if constexpr (Form::spread == Spread::pairs) {
        outer_[u][0] = u;
        find_row<2>(row, outer_[u]);
      } else {
        find_row(i, outer_[u]);
      }
    }
  }

  __device__ void run() {
    fetch_all(std::make_integer_sequence<int, Form::instructions>());
    constexpr int table = Form::table(), end = Form::instructions, after = table == end ? 0 : table + 1;
    if constexpr (after > 0) {
      run_part<0, table>();
      run_part<table, after>();
    }
#pragma unroll
    for (int u = 0; u < Form::vectors; ++u) {
      run_instructions<after>(u, std::make_integer_sequence<int, end - after>());
      if (Form::spread == Spread::row || vector(u) < launch_.count) {
        store<T>(x_[u], own, dense_[u], program_.output);
      }
    }
  }

 private:
  using Row = int[Form::dims - 1];

  __device__ int vector(int u) const { return first_ + u * launch_.distance; }

  __device__ int size() const { return static_cast<int>(program_.size[0]); }  // of a row

  // Row i's place in each dimension from `first` outwards, where i counts only those.
  template <int first = 1>
  __device__ void find_row(int i, Row& row) const {
#pragma unroll
    for (int dim = first; dim < Form::dims; ++dim) {
      row[dim - 1] = i;
      if (dim + 1 < Form::dims && dim + 1 < program_.dims) {
        const int next = launch_.size[dim].divide(&i);
        row[dim - 1] = i;
        i = next;
      } else {
        i = 0;
      }
    }
  }

  // Runs the instructions from `first` up to `last` for one vector after the other.
  template <int first, int last>
  __device__ void run_part() {
#pragma unroll
    for (int u = 0; u < Form::vectors; ++u) {
      run_instructions<first>(u, std::make_integer_sequence<int, last - first>());
    }
  }

  template <int first, int... ks>
  __device__ void run_instructions(int u, std::integer_sequence<int, ks...>) {
    (run_instruction<Form::opcode(first + ks)>(first + ks, u), ...);
  }

  template <int... ks>
  __device__ void fetch_all(std::integer_sequence<int, ks...>) {
    (fetch_for<Form::opcode(ks)>(ks), ...);
  }

  // Fetches what an instruction reads.
  template <Opcode opcode>
  __device__ void fetch_for(int k) {
    int here[Form::vectors] = {}, next[Form::vectors] = {};  // offsets of what is the same in all of a row
#pragma unroll
    for (int r = 0; r < references_of(opcode); ++r) {
      const Layout of = layout(k, r);
      if (of == Layout::number || of == Layout::stash || of == Layout::twin || of == Layout::table) {
        continue;
      }
      const auto& from = operand(k, r);
#pragma unroll
      for (int u = 0; u < Form::vectors; ++u) {
        if (u > 0 && is_shared(k, r)) {
          continue;  // with a bound that depends on it nvcc doesn't unroll the loop, and words_ is in memory
        }
        uint32_t (&words)[n] = words_[k][r][u];
        if (!is_of_row(k, r)) {
          fetch(from.data, element(k, r), of == Layout::any && from.stride[0] == 0, offset_of(k, r, u), words);
          continue;
        }
        here[u] = is_same_row(of) ? here[u] : offset_of(from, 0, outer_[u]);
        fetch_one(k, r, here[u], words[kHere]);
        if (Form::spread == Spread::anywhere && rest_[u] < n) {
          next[u] = is_same_row(of) ? next[u] : offset_of(from, 0, next_[u]);
          fetch_one(k, r, next[u], words[kNext]);
        }
      }
    }
  }

  __device__ void fetch_one(int k, int r, int offset, uint32_t& to) {
    uint32_t one[1];
    fetch(operand(k, r).data, element(k, r), true, offset, one);
    to = one[0];
  }

  template <Opcode opcode>
  __device__ void run_instruction(int k, int u) {
    if constexpr (opcode == Opcode::look_up) {
      look_up<T>(static_cast<const uint16_t*>(operand(k, 0).data), x_[u]);
    } else if constexpr (opcode == Opcode::gradient) {
      float grad[n];
      read<true>(k, 0, u, grad);
      differentiate<T>(grad, static_cast<const float2*>(operand(k, 1).data), x_[u]);
    } else if constexpr (opcode == Opcode::stash) {
      assign(x_[u], stashed_[u]);
    } else if constexpr (!is_norm(opcode)) {
      apply_with<opcode, opcode == Opcode::clamp ? 1 : n, 1>(k, u);
    } else if (is_one(k, 0) && is_one(k, 1)) {
      is_one(k, 2) && is_one(k, 3) ? apply_with<opcode, 1, 1>(k, u) : apply_with<opcode, 1, n>(k, u);
    } else {
      apply_with<opcode, n, n>(k, u);
    }
    if (!is_rounded_next(k) && is_rounded(k)) {
      round<T>(x_[u]);
    }
  }

  __device__ bool is_rounded(int k) const {
    if constexpr (Form::spread == Spread::pairs && n == 8) {
      return Form::rounds(k);
    }
    return program_.instruction[k].rounded_to != Element::float32;
  }

  // Whether what follows instruction k rounds the numbers to the half type anyway: a table, or the output.
  __device__ static bool is_rounded_next(int k) {
    return own != Element::float32 && (k + 1 == Form::instructions || k + 1 == Form::table());
  }

  // `first` elements of the first two references and `last` of the others: n, or one that is all of them.
  template <Opcode opcode, int first, int last>
  __device__ void apply_with(int k, int u) {
    constexpr int references = references_of(opcode);
    float a[first] = {}, b[first] = {}, c[last] = {}, d[last] = {};
    read<0 < references>(k, 0, u, a);
    read<1 < references>(k, 1, u, b);
    read<2 < references>(k, 2, u, c);
    read<3 < references>(k, 3, u, d);
    float next[Instruction::kMaxReferences] = {};
    const bool may_cross = Form::spread == Spread::anywhere && is_of_row(k, 0);
    if (may_cross) {
#pragma unroll
      for (int r = 0; r < references; ++r) {
        const bool is_number = layout(k, r) == Layout::number;
        next[r] = is_number ? program_.instruction[k].reference[r].number : one_of(words_[k][r][u][kNext], element(k, r));
      }
    }
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float x = x_[u][i];
      x_[u][i] = compute<opcode, T>(x, a[i % first], b[i % first], c[i % last], d[i % last]);
      if (may_cross) {
        x_[u][i] = i < rest_[u] ? x_[u][i] : compute<opcode, T>(x, next[0], next[1], next[2], next[3]);
      }
    }
  }

  static constexpr bool has_columns =
      Form::spread == Spread::columns || Form::spread == Spread::sample || Form::spread == Spread::pairs;

  // The output's dtype; bfloat16 stands for T.
  static constexpr Element own = n == 8 ? Element::bfloat16 : Element::float32;

  // Indices into words_ of what is the same in all of a row: for a vector's own row, and for the one after it.
  static constexpr int kHere = 0, kNext = 1;

  __device__ static bool is_column(Layout layout) { return layout == Layout::column || layout == Layout::half_column; }

  __device__ static bool is_same_row(Layout layout) { return layout == Layout::same_row || layout == Layout::same_half_row; }

  __device__ const Program::Operand& operand(int k, int r) const { return program_.operand[Form::operand(k, r)]; }

  __device__ static Layout layout(int k, int r) { return Form::layout(k, r); }

  // The dtype of what an instruction reads from memory.
  __device__ Element element(int k, int r) const {
    switch (layout(k, r)) {
      case Layout::dense:
      case Layout::apart:
      case Layout::gate:
        return own;
      case Layout::half_column:
      case Layout::half_row:
      case Layout::same_half_row:
        return Element::bfloat16;  // stands for T
      case Layout::bits:
        return Element::bit;
      case Layout::dense_any:
      case Layout::apart_any:
        return operand(k, r).element == Element::float32 ? Element::float32 : Element::bfloat16;
      case Layout::any:
        return operand(k, r).element;
      default:
        return Element::float32;
    }
  }

  // Whether it is the same for all of a row.
  __device__ static bool is_of_row(int k, int r) {
    const Layout of = layout(k, r);
    return of == Layout::row || of == Layout::sign || of == Layout::half_row || is_same_row(of) ||
           (of == Layout::gate && !has_columns);
  }

  // Whether it is the same for all vectors of a thread.
  __device__ static bool is_shared(int k, int r) {
    return is_column(layout(k, r)) || (Form::spread == Spread::row && is_of_row(k, r)) ||
           (Form::spread == Spread::sample && layout(k, r) == Layout::gate);
  }

  // Whether it is the same for all of a vector, or for what is of one row.
  __device__ static bool is_one(int k, int r) { return layout(k, r) == Layout::number || is_of_row(k, r); }

  __device__ static float one_of(uint32_t word, Element element) {
    float result[1];
    convert<T>({word}, element, result);
    return result[0];
  }

  // What instruction k's r-th reference is to, for vector u.
  template <bool is_read, int size>
  __device__ void read(int k, int r, int u, float (&to)[size]) {
    if constexpr (!is_read) {
      return;
    } else if (layout(k, r) == Layout::number) {
      fill(program_.instruction[k].reference[r].number, to);
    } else if (layout(k, r) == Layout::stash) {
      assign(stashed_[u], to);
    } else if constexpr (Form::spread == Spread::pairs) {
      const bool is_twin = layout(k, r) == Layout::twin;
      read_fetched(is_twin ? k - Form::to_twin() : k, r, is_twin ? 1 - u : u, to);
    } else {
      read_fetched(k, r, u, to);
    }
  }

  template <int size>
  __device__ void read_fetched(int k, int r, int u, float (&to)[size]) const {
    const uint32_t (&words)[n] = words_[k][r][is_shared(k, r) ? 0 : u];
    if (is_of_row(k, r)) {
      fill(one_of(words[kHere], element(k, r)), to);
    } else if constexpr (size == n) {
      convert<T>(words, element(k, r), to);
    }
  }

  // Where vector u is in what an instruction reads in vectors.
  __device__ int offset_of(int k, int r, int u) const {
    switch (layout(k, r)) {
      case Layout::dense:
      case Layout::dense_any:
      case Layout::bits:
        return dense_[u];
      case Layout::column:
      case Layout::half_column:
        return inner_;
      default:
        return offset_of(operand(k, r), inner_, outer_[u]);
    }
  }

  __device__ int offset_of(const Program::Operand& operand, int inner, const Row& row) const {
    int offset = inner * static_cast<int>(operand.stride[0]);
#pragma unroll
    for (int dim = Form::dims - 1; dim > 0; --dim) {  // last the one in which a pair's rows differ
      if (dim == 1 || dim < program_.dims) {
        offset += row[dim - 1] * static_cast<int>(operand.stride[dim]);
      }
    }
    return offset;
  }

  const Launch& launch_;
  const Program& program_;
  int first_;  // vector's index, or for Spread::columns, sample and pairs its row's
  int inner_, dense_[Form::vectors];
  Row outer_[Form::vectors], next_[Form::vectors];  // of Spread::anywhere the row after it, if the vector crosses its end
  int rest_[Form::vectors];                         // how many of a vector's elements are of its first row; of Spread::anywhere
  uint32_t words_[Form::instructions][Instruction::kMaxReferences][Form::vectors][n];  // as fetched
  float x_[Form::vectors][n], stashed_[Form::vectors][n];
};

}  // namespace
}  // namespace fastact::cuda
