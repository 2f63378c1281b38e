#include <ATen/WrapDimUtils.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include "../../dtypes.h"
#include "../fusion.h"
#include "answers.h"
#include "nodes.h"

namespace fastact::recipes {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;
using torch::autograd::generated::CatBackward0;
using torch::autograd::generated::ToCopyBackward0;
using torch::autograd::generated::UpsampleNearest1DBackward0;
using torch::autograd::generated::UpsampleNearest2DBackward0;
using torch::autograd::generated::UpsampleNearest3DBackward0;

// Under autocast nearest upsampling is in float32, and so is all that it is concatenated with, for a layer that casts that to a
// half type. The gradient comes in the half type, and so do parts that were in it; a part for upsampling is cast alone, into
// dense memory, as it would be copied.
class CatPreHook : public PreHook {
 public:
  explicit CatPreHook(CatBackward0& node) : node_(node) {}

  bool takes_half() const override { return true; }

  variable_list operator()(const variable_list& grads) override {
    const at::Tensor& grad = grads[0];
    if (!grad.defined() || grad.scalar_type() == dtype_of_output(node_)) {
      return grads;
    }
    variable_list parts = may_answer(node_, grad) ? parts_of(grad) : variable_list();
    const size_t count = parts.size();
    return count > 0 ? answer(std::move(parts), grads.size(), /*for_next=*/count) : decline(node_, grads);
  }

 private:
  // What the next nodes are to have; empty if one of them isn't known to make the same of it.
  variable_list parts_of(const at::Tensor& grad) {
    const int64_t dim = at::maybe_wrap_dim(node_.dim, grad.dim());
    const size_t count = node_.next_edges().size();
    variable_list result(count);
    int64_t start = 0;
    for (size_t i = 0; i < count; ++i) {
      const auto& sizes = node_.tensors_args_sizes_symint[i];
      if (static_cast<int64_t>(sizes.size()) != grad.dim()) {
        return {};  // an empty one of any shape
      }
      const int64_t length = sizes[dim].guard_int(__FILE__, __LINE__);
      const at::Tensor part = grad.narrow(dim, start, length);
      start += length;
      if (!node_.next_edge(i).function || !node_.task_should_compute_output(i)) {
        continue;
      }
      const at::ScalarType dtype = dtype_for(i, grad);
      if (dtype == at::ScalarType::Undefined) {
        return {};
      }
      const py::gil_scoped_acquire gil;
      result[i] = cast_copy(part, dtype);
    }
    return result;
  }

  // In which the next node of an input takes its gradient, or undefined.
  at::ScalarType dtype_for(size_t i, const at::Tensor& grad) {
    const at::ScalarType dtype = node_.tensors_args_scalartypes[i];
    if (dtype == grad.scalar_type()) {
      return dtype;
    }
    Node& next = *node_.next_edge(i).function;
    if (dtype != at::kFloat || is_hooked(next) || !passes_unnoticed(node_, /*has_saved=*/false, i)) {
      return at::ScalarType::Undefined;
    }
    if (as<ToCopyBackward0>(&next)) {  // which makes the same of it, to whatever dtype
      return grad.scalar_type();
    }
    const bool is_upsampled =
        as<UpsampleNearest1DBackward0>(&next) || as<UpsampleNearest2DBackward0>(&next) || as<UpsampleNearest3DBackward0>(&next);
    return is_upsampled ? at::kFloat : at::ScalarType::Undefined;
  }

  CatBackward0& node_;
};

}  // namespace

void add_cat_hooks(Node& node) {
  if (auto* const cat = as<CatBackward0>(&node)) {
    add_hooks<CatPreHook>(*cat);
  }
}

}  // namespace fastact::recipes
