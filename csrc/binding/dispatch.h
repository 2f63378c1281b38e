// How an op reaches its kernel.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/enum_tag.h>

#include <vector>

#include "devices.h"

namespace fastact {

using c10::DispatchKey;
using c10::DispatchKeySet;

// Whether this build has kernels for a device: one for the CPU may run under a torch that has GPUs.
inline bool has_kernels(c10::Device device) {
  return device.is_cpu() || (kHasCuda && device.is_cuda());
}

// Whether the kernels may read the tensor's memory as its strides say: nothing traces it, wraps it or lies between it and its
// elements (a subclass, a functorch transform, a lazy negation).
inline bool is_plain(const at::Tensor& tensor) {
  constexpr auto transparent = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
  const auto keys = tensor.key_set() - transparent;
  return keys == DispatchKeySet(DispatchKey::CPU) || keys == DispatchKeySet(DispatchKey::CUDA);
}

// Whether kernels may read its memory in vectors.
inline bool is_aligned(const at::Tensor& tensor) {
  constexpr size_t vector = 16;
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % vector == 0;
}

// Whether they may read all of it in vectors, in the order of its dimensions.
inline bool is_in_vectors(const at::Tensor& tensor) {
  return is_plain(tensor) && tensor.is_contiguous() && is_aligned(tensor);
}

// The tags of an op that torch.export's run_decompositions is to decompose though it has kernels of its own: the program is to
// run where this library isn't. Ours neither alias nor mutate.
inline std::vector<at::Tag> decomposed() {
  return {at::Tag::maybe_aliasing_or_mutating};
}

// Continues below autograd: for a plain tensor that nobody watches (e.g. a dispatch mode) with kernel(backend), which the
// dispatcher would call next and need not look up again; else with redispatch(keys).
template <class Kernel, class Redispatch>
auto below_autograd(DispatchKeySet keys, const Kernel& kernel, const Redispatch& redispatch) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const auto below = keys & c10::after_ADInplaceOrView_keyset;
  const DispatchKey backend = below.highestPriorityTypeId();
  if (backend == DispatchKey::CPU) {
    return kernel(Cpu());
  }
  if constexpr (kHasCuda) {
    if (backend == DispatchKey::CUDA) {
      return kernel(Cuda());
    }
  }
  return redispatch(below);
}

}  // namespace fastact
