#include "weak_tensor.h"

#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <utility>

#include "../devices.h"

namespace fastact::recipes {

int64_t stream_number(const at::Tensor& tensor) {
  const bool has_streams = tensor.is_cuda() && !tensor.key_set().has(c10::DispatchKey::Python);
  return has_streams ? current_stream(tensor.device()).id() : 0;
}

bool is_same_memory(const at::Tensor& tensor, const at::Tensor& other) {
  return tensor.is_alias_of(other) && tensor.dtype() == other.dtype() && tensor.storage_offset() == other.storage_offset() &&
         tensor.sizes() == other.sizes() && tensor.strides() == other.strides();
}

bool is_same_counter(const c10::VariableVersion& counter, const c10::VariableVersion& other) {
  static_assert(sizeof(counter) == sizeof(void*));  // a pointer, which it shows to nobody
  return std::memcmp(&counter, &other, sizeof(counter)) == 0;
}

WeakTensor::WeakTensor(const at::Tensor& tensor)
    : memory_(tensor.storage().getWeakStorageImpl()),
      bytes_(tensor.storage().nbytes()),
      python_tensor_(
          tensor.key_set().has(c10::DispatchKey::Python) ? tensor.getIntrusivePtr() : at::Tensor().getIntrusivePtr()),
      counter_(torch::autograd::impl::version_counter(tensor)),
      version_(version_of(tensor)),
      stream_(stream_number(tensor)),
      offset_(tensor.storage_offset()),
      keys_(tensor.key_set()),
      dtype_(tensor.dtype()),
      sizes_(tensor.sizes()),
      strides_(tensor.strides()) {}

at::Tensor WeakTensor::tensor() const {
  auto memory = memory_.lock();
  if (!memory || memory->nbytes() != bytes_ || counter_.current_version() != version_) {
    return {};
  }
  if (keys_.has(c10::DispatchKey::Python)) {
    return at::Tensor(python_tensor_.lock());
  }
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(memory)), keys_, dtype_);
  result.unsafeGetTensorImpl()->set_sizes_and_strides(sizes_, strides_, offset_);
  torch::autograd::impl::set_version_counter(result, counter_);
  return stream_number(result) == stream_ ? result : at::Tensor();
}

bool WeakTensor::is(const at::Tensor& other) const {
  const at::Tensor result = tensor();
  return result.defined() && is_same_memory(result, other) &&
         is_same_counter(counter_, torch::autograd::impl::version_counter(other));
}

}  // namespace fastact::recipes
