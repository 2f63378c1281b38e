#include "tables.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <pthread.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "../../codes/code.h"
#include "../../codes/kernels.h"
#include "../devices.h"
#include "../dtypes.h"
#include "../identical.h"
#include "launch.h"
#include "numbering.h"

namespace fastact {
namespace {

// Runs ATen's ops as they are: nobody watches, traces or differentiates them.
class Unwatched {
  static c10::impl::LocalDispatchKeySet keys() {
    c10::impl::PODLocalDispatchKeySet keys{};
    keys.set_included(c10::DispatchKeySet(c10::DispatchKey::BackendSelect));
    keys.set_excluded(c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
    return keys;
  }
  c10::impl::ForceDispatchKeyGuard guard_{keys()};
};

Tensor all_inputs(at::ScalarType dtype, at::Device device) {
  return at::arange(kPatterns, at::dtype(at::kInt).device(device)).to(at::kShort).view(dtype);
}

template <class T>
Tensor to_tensor(const std::vector<T>& values, at::ScalarType dtype, at::Device device) {
  const Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::dtype(dtype));
  std::memcpy(tensor.data_ptr(), values.data(), values.size() * sizeof(T));
  return tensor.to(device);
}

template <class T>
std::vector<T> to_vector(const Tensor& tensor) {
  const Tensor here = tensor.cpu().contiguous();
  const auto* values = static_cast<const T*>(here.data_ptr());
  return std::vector<T>(values, values + here.numel());
}

Patterns with_one_nan(const Tensor& tensor) {
  return to_vector<uint16_t>(at::where(
      tensor.isnan(), at::scalar_tensor(int16_t{kNaN}, at::dtype(at::kShort).device(tensor.device())),
      tensor.view(at::kShort)));
}

// Gradients to compare with: special values and some of every magnitude.
Tensor some_gradients(at::ScalarType dtype, at::Device device, int count) {
  const Tensor all = all_inputs(dtype, device);
  const Tensor infinity = at::full({1}, INFINITY, all.options());
  return at::cat(
      {all.slice(0, 0, kPatterns, kPatterns / count + 1), all.slice(0, 0, 3), all.slice(0, 0x8000, 0x8003),
       all.slice(0, 0x3c00, 0x3c01), infinity, -infinity});
}

// Layouts in which PyTorch may compute the same elements differently: its CPU ops compute by oneDNN what is contiguous, where
// that is enabled and has the op, in vectors what is dense but permuted, and one by one what lies apart.
using Layout = Tensor (*)(const Tensor&);

Tensor contiguous(const Tensor& self) {
  return self.contiguous();
}
Tensor permuted(const Tensor& self) {
  return self.reshape({-1, 256}).t().contiguous().t();
}
Tensor apart(const Tensor& self) {
  return at::stack({self, self}, -1).select(-1, 0);
}

std::vector<Layout> layouts(at::Device device) {
  return device.is_cpu() ? std::vector<Layout>{contiguous, permuted, apart} : std::vector<Layout>{contiguous};
}

// What distinguishes the inputs of one output, in each layout: the derivative, but for those so small that they leave nothing
// of any finite gradient, and some gradients, since PyTorch's CPU ops compute in a dtype of 16 bits otherwise than in float32.
std::vector<uint64_t> derivatives(const Smooth& activation, const Tensor& x) {
  const at::ScalarType dtype = x.scalar_type();
  std::vector<uint64_t> result(kPatterns);
  const auto add = [&](const auto& values) {
    for (size_t i = 0; i < values.size(); ++i) {
      uint64_t& of_input = result[i % kPatterns];
      of_input = (of_input ^ values[i]) * 0x9e3779b97f4a7c15;  // a hash
      of_input ^= of_input >> 29;
    }
  };
  const Tensor wide = x.to(at::kFloat), ones = at::ones_like(wide);
  const Tensor grads = some_gradients(dtype, x.device(), 8);
  const Tensor inputs = x.expand({grads.size(0), kPatterns});
  const Tensor gradients = grads.unsqueeze(1).expand_as(inputs);
  for (const Layout layout : layouts(x.device())) {
    const Tensor slope = activation.backward(layout(ones), layout(wide));
    const Tensor vanishes = (slope * largest(dtype)).to(dtype).eq(0).logical_and(slope.ne(0));
    const Tensor tiny = at::full_like(slope, 1e-45f).copysign(slope);
    add(to_vector<uint32_t>(at::where(vanishes, tiny, at::where(slope.isnan(), at::full_like(slope, NAN), slope))));
    add(with_one_nan(activation.backward(layout(gradients), layout(inputs))));
  }
  return result;
}

std::unique_ptr<Tables> make_tables(const Smooth& activation, at::ScalarType dtype, at::Device device) {
  const Tensor x = all_inputs(dtype, device);
  const Tensor wide = x.to(at::kFloat);
  Variants variants;
  for (const Layout layout : layouts(device)) {
    variants.push_back(with_one_nan(activation.forward(layout(x))));
  }
  const int bits = activation.of(dtype).bits;
  const CodeBits of_dtype = code_bits(dtype == at::kHalf);
  TORCH_INTERNAL_ASSERT(
      bits == of_dtype.fewer || bits == of_dtype.more, activation.name, ": no kernel has codes of ", bits, " bits in ", dtype);
  const Patterns numbers = number(variants, derivatives(activation, x), 1 << bits);
  if (numbers.empty()) {
    return nullptr;
  }

  std::vector<uint32_t> size(kPatterns), first(kPatterns);
  for (int i = 0; i < kPatterns; ++i) {
    for (const uint16_t y : outputs_of(variants, i)) {
      size[y] = std::max<uint32_t>(size[y], numbers[i] + 1);
    }
  }
  for (int y = 1; y < kPatterns; ++y) {
    first[y] = first[y - 1] + size[y - 1];
  }
  Patterns inputs(first.back() + (1 << bits));  // no code reads past it, whoever made that
  for (const uint16_t nan : to_vector<uint16_t>(x.masked_select(x.isnan()))) {
    first[nan] = first[kNaN];
  }
  for (int i = kPatterns - 1; i >= 0; --i) {
    for (const uint16_t y : outputs_of(variants, i)) {
      inputs[first[y] + numbers[i]] = static_cast<uint16_t>(i);
    }
  }

  auto tables = std::make_unique<Tables>();
  tables->bits = bits;
  tables->first = to_tensor(first, at::kInt, device);
  tables->inputs = to_tensor(inputs, at::kShort, device);
  if (device.is_cpu()) {
    tables->entries = to_tensor(numbers, at::kShort, device);
    return tables;
  }
  const Patterns& outputs = variants.front();
  std::vector<uint32_t> entries(kPatterns);
  for (int i = 0; i < kPatterns; ++i) {
    entries[i] = uint32_t{numbers[i]} << 16 | outputs[i];
  }
  tables->entries = to_tensor(entries, at::kInt, device);
  tables->outputs = to_tensor(outputs, at::kShort, device);

  std::vector<Tensor> factors = activation.factors(wide);
  const Tensor selects_zero = activation.backward(at::full_like(x, NAN), x).eq(0);
  factors[0] = at::where(selects_zero, at::full_like(wide, -0.0f), factors[0]);
  tables->factors = static_cast<int>(factors.size());
  const Tensor by_input = at::stack(factors, 1);
  tables->derivative = (factors.size() == 1 ? at::stack({factors[0], at::ones_like(wide)}, 1) : by_input).contiguous();
  const Tensor listed = tables->inputs.to(at::kLong).bitwise_and(0xffff);
  tables->slopes = by_input.index_select(0, listed).contiguous();

  const Tensor entry = tables->entries.to(at::kLong).bitwise_and(int64_t{0xffffffff});
  const Tensor is_direct = entry.lt(int64_t{kDirect} << 16).nonzero().squeeze(1);
  tables->direct = at::zeros({int64_t{kDirect} << 16, tables->factors}, wide.options());
  tables->direct.index_copy_(0, entry.index_select(0, is_direct), by_input.index_select(0, is_direct));
  return tables;
}

bool agrees_with_pytorch(const Smooth& activation, const Tables& tables, at::ScalarType dtype, at::Device device) {
  const Tensor grads = some_gradients(dtype, device, device.is_cpu() ? 8 : 64);
  const Tensor x = all_inputs(dtype, device).unsqueeze(0).expand({grads.size(0), kPatterns}).contiguous();
  const Tensor grad = grads.unsqueeze(1).expand_as(x).contiguous();
  const auto [output, code] = encode(activation, tables, x, /*with_code=*/true);
  return is_identical(output, activation.forward(x)) &&
         is_identical(backward(activation, tables, grad, output, code, x.strides()), activation.backward(grad, x));
}

// Whether PyTorch can be asked for all that it may compute. Not without oneDNN, which may be enabled later.
bool shows_all_variants(at::Device device) {
  return !device.is_cpu() || at::globalContext().userEnabledMkldnn();
}

// Held while tables are made. A process that forks may leave the thread that holds it behind.
std::mutex making;
[[maybe_unused]] const int released_after_fork = pthread_atfork(nullptr, nullptr, [] { new (&making) std::mutex; });

}  // namespace

const Tables* tables_for(const Smooth& activation, const Tensor& self) {
  const at::ScalarType dtype = self.scalar_type();
  const at::Device device = self.device();
  TablesSlot& slot = activation.slot(dtype, device);
  if (!slot.is_filled.load(std::memory_order_acquire)) {
    if (is_capturing(device) || !shows_all_variants(device)) {
      return nullptr;
    }
    const std::lock_guard<std::mutex> lock(making);
    if (!slot.is_filled.load(std::memory_order_relaxed)) {
      const c10::InferenceMode no_inference(false);  // its tensors have no version, and these stay
      const Unwatched guard;
      const c10::OptionalDeviceGuard on_device(device);
      auto tables = make_tables(activation, dtype, device);
      if (tables && !agrees_with_pytorch(activation, *tables, dtype, device)) {
        tables.reset();
      }
      if (!tables) {
        TORCH_WARN(
            "activations_cuda ", FASTACT_VERSION, ": the gradient of torch ", TORCH_VERSION, "'s ", activation.name, " in ",
            dtype, " on ", device, " isn't what its kernels compute, falling back to PyTorch's op");
      }
      synchronize(device);  // other streams read the tables from now on
      slot.tables = tables.release();
      slot.is_filled.store(true, std::memory_order_release);
    }
  }
  return slot.tables;
}

}  // namespace fastact
