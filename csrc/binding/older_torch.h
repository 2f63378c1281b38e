// Parts of PyTorch's API that some supported releases lack.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <vector>

#include "../torch_version.h"

namespace fastact {

// Since 2.1 reading is told from writing, and a lazy clone stays one while it is read.
template <class T>
const T* const_data(const at::Tensor& tensor) {
#if FASTACT_TORCH_VERSION >= 201
  return tensor.const_data_ptr<T>();
#else
  return tensor.data_ptr<T>();
#endif
}

template <class T>
T* mutable_data(const at::Tensor& tensor) {
#if FASTACT_TORCH_VERSION >= 201
  return tensor.mutable_data_ptr<T>();
#else
  return tensor.data_ptr<T>();
#endif
}

// The same whatever the dtype.
inline const void* const_data(const at::Tensor& tensor) {
#if FASTACT_TORCH_VERSION >= 201
  return tensor.const_data_ptr();
#else
  return tensor.data_ptr();
#endif
}

// Since 2.3 there are nested tensors that are a subclass of strided ones.
inline bool is_jagged(const at::Tensor& tensor) {
#if FASTACT_TORCH_VERSION >= 203
  return tensor.layout() == at::Layout::Jagged;
#else
  return false;
#endif
}

// Whether calls are traced rather than run: by torch.compile, torch.export or compiled autograd, or on fake tensors.
inline bool is_traced() {
  using c10::impl::TorchDispatchModeTLS;
#if FASTACT_TORCH_VERSION >= 202
  using Key = c10::impl::TorchDispatchModeKey;
  return TorchDispatchModeTLS::get_mode(Key::FAKE).has_value() || TorchDispatchModeTLS::get_mode(Key::PROXY).has_value() ||
         TorchDispatchModeTLS::get_mode(Key::FUNCTIONAL).has_value();
#else
  return TorchDispatchModeTLS::stack_len() > 0;
#endif
}

// The tags of an op that torch.export's run_decompositions is to decompose though it has kernels of its own: the program is to
// run where this library isn't. Ours neither alias nor mutate. Since 2.6.
inline std::vector<at::Tag> decomposed() {
#if FASTACT_TORCH_VERSION >= 206
  return {at::Tag::maybe_aliasing_or_mutating};
#else
  return {};
#endif
}

}  // namespace fastact
