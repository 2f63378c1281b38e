// A tensor's identity: its memory, its version and its stream; and a weak reference to one.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>

namespace fastact::recipes {

// Tensor::_version(), without the virtual call: each recipe asks for those of all that it follows from. 0 of inference tensors,
// which hooks around the scope may give back.
inline int64_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

// The number of the current stream on a tensor's device.
int64_t stream_number(const at::Tensor& tensor);

// Whether two tensors are the same elements of the same memory.
bool is_same_memory(const at::Tensor& tensor, const at::Tensor& other);

// Whether they count the writes to the same tensor and its views.
bool is_same_counter(const c10::VariableVersion& counter, const c10::VariableVersion& other);

// A tensor that others may or may not have any longer. It refers to the memory, since a tensor with weak references can't be
// swapped; but to a tensor that Python implements, as fake ones, itself.
class WeakTensor {
 public:
  explicit WeakTensor(const at::Tensor& tensor);

  // Undefined if nobody has its memory, if it was written to or resized, or on another stream.
  at::Tensor tensor() const;
  bool is(const at::Tensor& other) const;
  // A key, which no other memory has while this is alive.
  const c10::StorageImpl* memory() const { return memory_._unsafe_get_target(); }

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> memory_;
  size_t bytes_;
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> python_tensor_;
  c10::VariableVersion counter_;
  int64_t version_, stream_, offset_;
  c10::DispatchKeySet keys_;
  caffe2::TypeMeta dtype_;
  at::DimVector sizes_, strides_;
};

}  // namespace fastact::recipes
