#include "masks.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <iterator>
#include <unordered_map>

#include "../../mask.h"
#include "../../recipes/masks.h"
#include "../devices.h"
#include "../dispatch.h"
#include "derivation.h"
#include "formulas.h"

namespace fastact::recipes {
namespace {

// A mask that was packed: weak references to its memory, since a tensor with weak references can't be swapped, to its value and
// to the hook.
struct PackedMask {
  c10::weak_intrusive_ptr<c10::StorageImpl> memory;
  py::weakref value, hook;
};

// By the addresses of their memory. Those of masks that are gone are erased whenever there are twice as many.
struct PackedMasks {
  std::unordered_map<const c10::StorageImpl*, PackedMask> masks;
  size_t many = 64;

  void forget_dead() {
    for (auto each = masks.begin(); each != masks.end();) {
      each = each->second.memory.expired() ? masks.erase(each) : std::next(each);
    }
    many = std::max<size_t>(64, 2 * masks.size());
  }
};

auto& packed() {
  static auto& masks = *new PackedMasks();
  return masks;
}

}  // namespace

at::Tensor pack_mask(const at::Tensor& mask) {
  const int64_t n = mask.numel();
  at::Tensor bits = empty_bytes(mask, mask_bytes(n));
  const auto* from = reinterpret_cast<const uint8_t*>(mask.const_data_ptr<bool>());
  auto* to = bits.mutable_data_ptr<uint8_t>();
  if (kHasCuda && mask.is_cuda()) {
    Cuda::launch(mask, [&](cuda::Stream stream) { return cuda::pack_mask(from, to, n, stream); });
    return bits;
  }
  Cpu::launch(n, kMaskBits, [&](int64_t begin, int64_t end) { cpu::pack_mask(from, to, begin, end); });
  return bits;
}

at::Tensor unpack_mask(const at::Tensor& bits, at::IntArrayRef sizes, at::IntArrayRef strides) {
  if (bits.key_set().has(c10::DispatchKey::Python)) {  // fake
    return bits.new_empty_strided(sizes, strides, at::kBool);
  }
  at::Tensor mask = empty_strided(bits, at::kBool, sizes, strides);
  const int64_t n = mask.numel();
  const auto* from = bits.const_data_ptr<uint8_t>();
  auto* to = reinterpret_cast<uint8_t*>(mask.mutable_data_ptr<bool>());
  if (kHasCuda && bits.is_cuda()) {
    Cuda::launch(bits, [&](cuda::Stream stream) { return cuda::unpack_mask(from, to, n, stream); });
    return mask;
  }
  Cpu::launch(n, kMaskBits, [&](int64_t begin, int64_t end) { cpu::unpack_mask(from, to, begin, end); });
  return mask;
}

py::object value_of_mask(py::handle hook, const py::object& outer, const at::Tensor& tensor, const at::Tensor& owner) {
  const int64_t numel = owner.numel();
  const bool is_whole = numel == static_cast<int64_t>(owner.storage().nbytes()) && owner.is_non_overlapping_and_dense();
  if (owner.scalar_type() != at::kBool || numel == 0 || numel > 2 * tensor.numel() || !is_whole ||
      !has_kernels(owner.device())) {
    return {};
  }
  if (!is_dry_run(hook) && reinterpret_cast<uintptr_t>(owner.const_data_ptr()) % sizeof(uint64_t) != 0) {
    return {};  // somebody else's memory
  }
  const c10::VariableVersion& counter = torch::autograd::impl::version_counter(owner);
  auto& [masks, many] = packed();
  const auto found = masks.find(owner.storage().unsafeGetStorageImpl());
  py::object value = py::none();
  if (found != masks.end() && !found->second.memory.expired()) {
    value = found->second.value();
    if (!value.is_none() && !is_same_counter(*value_of(value).replaced, counter)) {
      return {};  // another tensor of the same memory, which may have been written to: its version doesn't tell
    }
    if (!value.is_none() && !value_of(value).stands_for(owner)) {
      value = py::none();
    }
    // An earlier scope's user may hold the mask itself: then bits would come on top.
    if (!found->second.hook().is(hook) && (value.is_none() || !outer.is_none() || value_of(value).follows_from_outside())) {
      return {};
    }
  }
  if (value.is_none()) {
    const at::NoGradGuard no_grad;
    const at::Tensor bits = is_dry_run(hook) ? owner.new_empty({mask_bytes(numel)}, at::kByte) : pack_mask(owner);
    const py::object kept = keep(bits, py::none(), outer);
    value = recipe_of(ConfigurationOf::mask, NAME("bits"), formulas().unpack_mask, kept, {}, owner);
    if (!outer.is_none()) {
      ++value_of(kept).readers;  // programs read the bits past the mask, and the hooks outside may give them back only once
    }
    value_of(value).replaced = counter;
    if (masks.size() >= many) {
      packed().forget_dead();
    }
    masks.insert_or_assign(
        owner.storage().unsafeGetStorageImpl(),
        PackedMask{owner.storage().getWeakStorageImpl(), py::weakref(value), py::weakref(hook)});
  }
  return owner.is_same(tensor) ? value : view_of(value, tensor, owner);
}

size_t packed_masks() {
  packed().forget_dead();
  return packed().masks.size();
}

}  // namespace fastact::recipes
