// The kernel of a form. A thread computes a few vectors: of the same columns, where what is the same in all rows (a channel's
// statistics in channels-last) is read once; otherwise of one row, or of any.
//
// On an H200 it takes 1.0 to 1.2 times the time in which a copy moves the same bytes, or 1.6 times for a rotary embedding of
// what is normalized.
#pragma once

#include <algorithm>

#include "../../mask.h"
#include "form.cuh"
#include "thread.cuh"

namespace fastact::cuda {
namespace {

constexpr int kBlock = 128;

template <class T, int n, class Form>
__global__ void __launch_bounds__(kBlock, Form::blocks) run_kernel(const __grid_constant__ Launch launch) {
  int place = static_cast<int>(blockIdx.x) * kBlock + threadIdx.x;
  const int row = launch.vectors.divide(&place);
  if (row >= launch.rows) {
    return;
  }
  Thread<T, n, Form>(launch, row, place).run();
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
      fits &= operand.stride[dim] % (operand.element == Element::bit ? kMaskBits : n) == 0;
    }
    if (!fits) {
      return false;
    }
  }
  return true;
}

// Whether vectors of n fit, of which each may cross the end of one row: what is read in vectors is aligned.
bool fits_across_rows(const Program& program, int n) {
  const Program::Operand* const last = program.operand + program.operands;
  return program.size[0] >= n && program.numel() % n == 0 && is_aligned(program.output, program.element, n) &&
         std::all_of(program.operand, last, [&](const auto& operand) {
           return operand.stride[0] == 0 || is_aligned(operand.data, operand.element, n);
         });
}

template <class T, int n, class Form>
bool start(const Program& program, Stream stream) {
  const auto numel = static_cast<int>(program.numel()), size = static_cast<int>(program.size[0]);
  Launch launch;
  launch.program = program;
  for (int dim = 0; dim < Program::kMaxDims; ++dim) {
    launch.size[dim] = Divisor(dim < program.dims ? program.size[dim] : 1, numel);
  }
  const int rows = numel / size, vectors = size / n;
  const auto divide = [&](int count) {
    launch.count = count;
    launch.distance = (count + Form::vectors - 1) / Form::vectors;
    return launch.distance;
  };
  int in_row;  // threads in a row of threads
  if constexpr (Form::spread == Spread::columns) {
    launch.rows = divide(rows);
    in_row = vectors;
  } else if constexpr (Form::spread == Spread::pairs) {
    launch.count = rows;
    launch.distance = 1;
    launch.rows = rows / 2;
    in_row = vectors;
  } else if constexpr (Form::spread == Spread::sample) {
    const auto of_sample = static_cast<int>(program.size[1]);
    launch.rows = rows / of_sample * divide(of_sample);
    launch.in_sample = Divisor(launch.distance, launch.rows);
    in_row = vectors;
  } else if constexpr (Form::spread == Spread::row) {
    launch.rows = rows;
    in_row = divide(vectors);
  } else {
    launch.rows = 1;
    in_row = divide(numel / n);
  }
  for (int k = 0; k < program.instructions; ++k) {  // the form's order of operands
    for (int r = 0; r < references_of(program.instruction[k].opcode); ++r) {
      if (program.instruction[k].reference[r].operand >= 0) {
        launch.program.operand[Form::operand(k, r)] = program.operand[program.instruction[k].reference[r].operand];
      }
    }
  }
  const int threads = launch.rows * in_row;
  launch.vectors = Divisor(in_row, threads + kBlock);
  run_kernel<T, n, Form><<<(threads + kBlock - 1) / kBlock, kBlock, 0, stream>>>(launch);
  return true;
}

}  // namespace
}  // namespace fastact::cuda
