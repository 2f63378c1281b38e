#include <ATen/WrapDimUtils.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include <optional>

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
    const auto dtypes = may_answer(node_, grad) ? dtypes_for(grad) : std::nullopt;
    return dtypes ? answer(parts_of(grad, *dtypes), grads.size(), /*for_next=*/dtypes->size()) : decline(node_, grads);
  }

 private:
  using Dtypes = c10::SmallVector<at::ScalarType, 4>;  // undefined for what isn't needed

  variable_list parts_of(const at::Tensor& grad, const Dtypes& dtypes) {
    const int64_t dim = at::maybe_wrap_dim(node_.dim, grad.dim());
    variable_list result;
    int64_t start = 0;
    for (size_t i = 0; i < dtypes.size(); ++i) {
      const int64_t length = node_.tensors_args_sizes_symint[i][dim].guard_int(__FILE__, __LINE__);
      const bool is_needed = dtypes[i] != at::ScalarType::Undefined;
      result.push_back(is_needed ? cast_copy(grad.narrow(dim, start, length), dtypes[i]) : at::Tensor());
      start += length;
    }
    return result;
  }

  // In which the next nodes take their gradients; none if one of them isn't known to make the same of it.
  std::optional<Dtypes> dtypes_for(const at::Tensor& grad) {
    Dtypes dtypes(node_.next_edges().size(), at::ScalarType::Undefined);
    for (size_t i = 0; i < dtypes.size(); ++i) {
      if (node_.tensors_args_sizes_symint[i].size() != grad.sizes().size()) {
        return std::nullopt;  // an empty one of any shape
      }
      if (!node_.next_edge(i).function || !node_.task_should_compute_output(i)) {
        continue;
      }
      dtypes[i] = dtype_for(i, grad);
      if (dtypes[i] == at::ScalarType::Undefined) {
        return std::nullopt;
      }
    }
    return dtypes;
  }

  at::ScalarType dtype_for(size_t i, const at::Tensor& grad) {
    const at::ScalarType dtype = node_.tensors_args_scalartypes[i], half = grad.scalar_type();
    const auto& [next, input_nr] = node_.next_edge(i);
    if (dtype == half) {  // the engine casts it, unless a leaf's gradient is to be of another dtype
      return next->input_metadata(input_nr).grad_dtype() == half ? half : at::ScalarType::Undefined;
    }
    const bool is_cast = as<ToCopyBackward0>(next.get());  // which makes the same of it, to whatever dtype
    const bool is_upsampled = as<UpsampleNearest1DBackward0>(next.get()) || as<UpsampleNearest2DBackward0>(next.get()) ||
                              as<UpsampleNearest3DBackward0>(next.get());
    const bool is_known = (is_cast || is_upsampled) && dtype == at::kFloat && !is_hooked(*next) &&
                          passes_unnoticed(node_, /*has_saved=*/false, i);
    return !is_known ? at::ScalarType::Undefined : is_cast ? half : at::kFloat;
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
