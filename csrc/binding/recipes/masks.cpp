#include "masks.h"

#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>

#include "../../recipes/masks.h"
#include "../devices.h"
#include "../older_torch.h"

namespace fastact::recipes {
namespace {

// Runs a kernel of either device, of bytes of bits.
template <class Kernel>
void parallel(int64_t n, const Kernel& kernel) {
  at::parallel_for(0, (n + 7) / 8, at::internal::GRAIN_SIZE / 8, kernel);
}

}  // namespace

at::Tensor pack_mask(const at::Tensor& mask) {
  const int64_t n = mask.numel();
  at::Tensor bits = empty_bytes(mask, (n + 7) / 8);
  const auto* from = reinterpret_cast<const uint8_t*>(const_data<bool>(mask));
  auto* to = mutable_data<uint8_t>(bits);
#if defined(FASTACT_CUDA)
  if (mask.is_cuda()) {
    Cuda::launch(mask, [&](cudaStream_t stream) { return cuda::pack_mask(from, to, n, stream); });
    return bits;
  }
#endif
  parallel(n, [&](int64_t begin, int64_t end) { cpu::pack_mask(from, to, n, begin, end); });
  return bits;
}

at::Tensor unpack_mask(const at::Tensor& bits, at::IntArrayRef sizes, at::IntArrayRef strides) {
  if (bits.key_set().has(c10::DispatchKey::Python)) {  // fake
    return bits.new_empty_strided(sizes, strides, at::kBool);
  }
  at::Tensor mask = empty_strided(bits, at::kBool, sizes, strides);
  const int64_t n = mask.numel();
  const auto* from = const_data<uint8_t>(bits);
  auto* to = reinterpret_cast<uint8_t*>(mutable_data<bool>(mask));
#if defined(FASTACT_CUDA)
  if (bits.is_cuda()) {
    Cuda::launch(bits, [&](cudaStream_t stream) { return cuda::unpack_mask(from, to, n, stream); });
    return mask;
  }
#endif
  parallel(n, [&](int64_t begin, int64_t end) { cpu::unpack_mask(from, to, n, begin, end); });
  return mask;
}

}  // namespace fastact::recipes
