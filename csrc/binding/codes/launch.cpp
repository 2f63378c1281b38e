#include "launch.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>

#include <utility>

#include "../../codes/code.h"
#include "../../codes/kernels.h"
#include "../devices.h"
#include "../dtypes.h"
#include "../strides.h"

namespace fastact {
namespace {

template <class T>
ByNumber<T> by_number(const Tables& tables, const Tensor& list, const Tensor& direct) {
  return {
      static_cast<const uint32_t*>(tables.first.const_data_ptr()), static_cast<const T*>(list.const_data_ptr()),
      direct.defined() ? static_cast<const T*>(direct.const_data_ptr()) : nullptr};
}

const uint16_t* patterns(const Tensor& tensor) {
  return static_cast<const uint16_t*>(tensor.const_data_ptr());
}

uint16_t* mutable_patterns(const Tensor& tensor) {
  return static_cast<uint16_t*>(tensor.data_ptr());
}

Tensor empty_code(const Tensor& like, int bits) {
  return empty_bytes(like, code_bytes(like.numel(), bits));
}

// Writes output and code where they are dense.
void encode_into(const Tables& tables, const Tensor& self, const Tensor& output, const Tensor& code) {
  if (output.numel() == 0) {
    return;
  }
  if (kHasCuda && self.is_cuda()) {
    const Source source = source_of(self, output);
    const uint16_t* x = patterns(source.tensor);
    uint16_t* y = mutable_patterns(output);
    Cuda::launch(output, [&](cuda::Stream stream) {
      return code.defined() ? cuda::encode(
                                  static_cast<const uint32_t*>(tables.entries.const_data_ptr()), x, source.rows, y,
                                  code.mutable_data_ptr<uint8_t>(), tables.bits, output.numel(), stream)
                            : cuda::look_up(patterns(tables.outputs), x, source.rows, y, output.numel(), stream);
    });
    return;
  }
  const Tensor dense = agree(self.sizes(), self.strides(), output.strides()) ? self : at::empty_like(output).copy_(self);
  const uint16_t *numbers = patterns(tables.entries), *x = patterns(dense);
  auto* bytes = code.mutable_data_ptr<uint8_t>();
  Cpu::launch(dense.numel(), kGroup, [&](int64_t begin, int64_t end) {
    cpu::encode(numbers, x, bytes, tables.bits, dense.numel(), begin, end);
  });
}

}  // namespace

std::tuple<Tensor, Tensor> encode(const Smooth& activation, const Tables& tables, const Tensor& self, bool with_code) {
  Tensor output = self.is_cuda() ? empty(self, elementwise_format(self)) : activation.forward(self);
  Tensor code = with_code ? empty_code(output, tables.bits) : Tensor();
  encode_into(tables, self, output, code);
  return {std::move(output), std::move(code)};
}

std::tuple<Tensor, Tensor> encode_inplace(const Smooth& activation, const Tables& tables, Tensor& self) {
  if (self.is_cuda() && self.is_non_overlapping_and_dense()) {
    Tensor code = empty_code(self, tables.bits);
    encode_into(tables, self, self, code);
    return {self, std::move(code)};
  }
  auto result = encode(activation, tables, self, /*with_code=*/true);
  Tensor& output = std::get<0>(result);
  self.copy_(output);
  if (agree(self.sizes(), self.strides(), output.strides())) {
    output = self;
  }
  return result;
}

void look_up_inplace(const Tables& tables, Tensor& self) {
  encode_into(tables, self, self, /*code=*/Tensor());
}

namespace {

// The kernels read a code word by word, and a hook on what is saved may return a slice of something.
Tensor aligned(const Tensor& code) {
  return reinterpret_cast<uintptr_t>(code.const_data_ptr()) % sizeof(uint64_t) == 0 ? code : code.clone();
}

// A copy with these strides, because PyTorch's CPU ops compute a non-contiguous tensor differently. What is expanded stays
// expanded.
Tensor laid_out(const Tensor& self, at::IntArrayRef strides) {
  Tensor once = self;
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (strides[dim] == 0 && self.numel() > 0) {
      once = once.narrow(dim, 0, 1);
    }
  }
  return at::empty_strided(once.sizes(), strides, self.options()).copy_(once).expand(self.sizes());
}

}  // namespace

Tensor decode(const Tables& tables, const Tensor& output, const Tensor& saved_code, at::IntArrayRef strides) {
  const Tensor code = aligned(saved_code);
  if (output.strides() != strides) {
    return laid_out(decode(tables, output, code, output.strides()), strides);
  }
  const Tensor input = at::empty_like(output);
  if (output.numel() == 0) {
    return input;
  }
  const auto inputs = by_number<uint16_t>(tables, tables.inputs, Tensor());
  const uint16_t* y = patterns(output);
  const auto* bytes = code.const_data_ptr<uint8_t>();
  uint16_t* x = mutable_patterns(input);
  if (kHasCuda && output.is_cuda()) {
    Cuda::launch(
        output, [&](cuda::Stream stream) { return cuda::decode(inputs, y, bytes, tables.bits, x, output.numel(), stream); });
    return input;
  }
  Cpu::launch(output.numel(), kGroup, [&](int64_t begin, int64_t end) {
    cpu::decode(inputs, y, bytes, tables.bits, x, output.numel(), begin, end);
  });
  return input;
}

namespace {

template <class scalar_t>
void scale(const Tables& tables, const Tensor& grad, const Tensor& output, const Tensor& code, const Tensor& result) {
  const auto slopes = by_number<float>(tables, tables.slopes, tables.direct);
  const auto* from = grad.const_data_ptr<scalar_t>();
  const auto* bytes = code.const_data_ptr<uint8_t>();
  auto* to = result.mutable_data_ptr<scalar_t>();
  const bool in_order =
      agree(output.sizes(), grad.strides(), output.strides()) && agree(output.sizes(), result.strides(), output.strides());
  Cuda::launch(output, [&](cuda::Stream stream) {
    return in_order ? cuda::scale(
                          dtype_of<scalar_t>, slopes, tables.factors, from, patterns(output), bytes, tables.bits, to,
                          output.numel(), stream)
                    : cuda::scale(
                          dtype_of<scalar_t>, slopes, tables.factors, from, walk_of(grad, output.strides(), result),
                          patterns(output), bytes, tables.bits, to, output.numel(), stream);
  });
}

}  // namespace

Tensor backward(
    const Smooth& activation, const Tables& tables, const Tensor& grad, const Tensor& output, const Tensor& saved_code,
    at::IntArrayRef input_strides) {
  const Tensor code = aligned(saved_code);
  if (kHasCuda && output.is_cuda()) {
    const bool alike = grad.strides() == input_strides;
    const Tensor result = alike ? empty(grad, elementwise_format(grad))
                                : empty_strided(grad, elementwise_strides(grad.sizes(), grad.strides(), input_strides));
    if (result.numel() > 0) {
      AT_DISPATCH_REDUCED_FLOATING_TYPES(
          output.scalar_type(), "code_backward", [&] { scale<scalar_t>(tables, grad, output, code, result); });
    }
    return result;
  }
  return activation.backward(grad, decode(tables, output, code, input_strides));
}

}  // namespace fastact
