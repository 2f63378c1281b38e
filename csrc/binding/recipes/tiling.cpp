#include "tiling.h"

#include <algorithm>
#include <numeric>

#include "lowering.h"

namespace fastact::recipes {
namespace {

// Of fewer elements, or rows, it would take as long as what it saves.
constexpr int64_t kFewestToJoin = int64_t{1} << 20, kFewestRows = 16;

// Whether an operand's second row continues its first.
bool continues(const Program& program, const Program::Operand& operand) {
  return operand.stride[1] == operand.stride[0] * program.size[0];
}

bool is_column(const Program& program, const Program::Operand& operand) {
  const auto is_backwards = [](int64_t stride) { return stride < 0; };  // as swapped halves, which no tensor can be
  return operand.stride[1] == 0 && operand.element != Element::bit &&
         std::none_of(operand.stride, operand.stride + program.dims, is_backwards);
}

// How many rows make one of whole vectors.
int64_t rows_in_vectors(const Program& program) {
  const int64_t vector = program.element == Element::float32 ? kElementsOfVector / 2 : kElementsOfVector;
  return vector / std::gcd(vector, program.size[0]);
}

// The column so many times, one below the other, in each of the outer dimensions that it has.
at::Tensor repeated(const at::Tensor& tensor, const Program& program, Program::Operand* operand, int64_t rows) {
  at::DimVector sizes, strides;
  for (int dim = program.dims - 1; dim > 1; --dim) {
    sizes.push_back(operand->stride[dim] == 0 ? 1 : program.size[dim]);
    strides.push_back(operand->stride[dim]);
  }
  sizes.append({rows, program.size[0]});
  strides.append({0, operand->stride[0]});
  const at::Tensor result = tensor.as_strided(sizes, strides).contiguous();
  int64_t elements = rows * program.size[0];
  for (int dim = 2; dim < program.dims; ++dim) {
    if (operand->stride[dim] != 0) {
      operand->stride[dim] = elements;
      elements *= program.size[dim];
    }
  }
  operand->data = result.const_data_ptr();
  operand->stride[0] = 1;
  return result;
}

}  // namespace

c10::SmallVector<at::Tensor, 4> join_rows(Program* program, c10::ArrayRef<at::Tensor> tensors) {
  const int64_t rows = rows_in_vectors(*program);
  Program::Operand *const first = program->operand, *const last = first + program->operands;
  if (rows == 1 || program->dims == 1 || program->numel() < kFewestToJoin || program->size[1] % rows != 0 ||
      program->size[1] / rows < kFewestRows ||
      !std::all_of(
          first, last, [&](const auto& operand) { return continues(*program, operand) || is_column(*program, operand); })) {
    return {};
  }
  c10::SmallVector<at::Tensor, 4> result;
  for (int k = 0; k < program->operands; ++k) {
    Program::Operand& operand = program->operand[k];
    if (continues(*program, operand)) {
      operand.stride[1] *= rows;
    } else {
      result.push_back(repeated(tensors[k], *program, &operand, rows));
    }
  }
  program->size[0] *= rows;
  program->size[1] /= rows;
  return result;
}

}  // namespace fastact::recipes
