// The GPU's kernels of the smooth activations: a thread has a group of eight elements, one vector, or in a large tensor two.
#include "../kernels.h"

#include "../../access.cuh"
#include "../../typed.h"
#include "../code.h"

namespace fastact::cuda {
namespace {

static_assert(Vector<uint16_t>::size == kGroup);

// From so many elements on a thread has two groups, and loads both before it looks either up (2^28 bfloat16 elements on an
// H200: encode 308 us against 321 us, scale 408 us against 428 us; three or four groups gain no more, and of 2^14 to 2^20
// elements two take up to 0.6 us longer than one).
constexpr int64_t kLarge = int64_t{1} << 25;

// Writes no code if the table's entries are outputs alone.
template <int bits, Access access, int groups, class Entry>
__global__ void __launch_bounds__(kThreads<uint16_t>)
    encode_kernel(const Entry* table, const uint16_t* x, RowIndex rows, uint16_t* y, uint8_t* code, int64_t n) {
  constexpr bool with_code = sizeof(Entry) > sizeof(uint16_t);
  uint4 bytes[groups];
  bool is_whole[groups];
  load_all<access>(x, n, rows, bytes, is_whole);
  Numbers<bits> numbers;
  const auto look_up = [&](int i, uint16_t element) {
    const Entry entry = __ldg(table + element);
    if constexpr (with_code) {
      numbers.set(i, entry >> 16);
    }
    return static_cast<uint16_t>(entry);
  };
  const auto store_numbers = [&](int64_t first) {
    if constexpr (with_code) {
      numbers.store(code, first / kGroup, groups_of(n));
      numbers = {};
    }
  };
  int k = 0;
#pragma unroll
  for (; k < groups && is_whole[k]; ++k) {
    const int64_t first = first_element<uint16_t, groups>(k);
    auto vector = unpack<uint16_t>(bytes[k]);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      vector.element[i] = look_up(i, vector.element[i]);
    }
    store<access>(y + first, vector);
    store_numbers(first);
  }
  const int64_t first = first_element<uint16_t, groups>(k);
  if (k == groups || first >= n) {
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kGroup && first + i < n; ++i) {
    y[first + i] = look_up(i, x[offset_of<access>(first + i, rows)]);
  }
  store_numbers(first);
}

template <int bits>
__global__ void __launch_bounds__(kThreads<uint16_t>)
    decode_kernel(ByNumber<uint16_t> inputs, const uint16_t* y, const uint8_t* code, uint16_t* x, int64_t n) {
  const int64_t first = first_element<uint16_t>();
  if (first >= n) {
    return;
  }
  const Numbers<bits> numbers(code, first / kGroup, groups_of(n));
  for (int i = 0; i < kGroup && first + i < n; ++i) {
    x[first + i] = inputs.list[inputs.first[y[first + i]] + numbers.get(i)];
  }
}

template <int factors>
struct alignas(factors * sizeof(float)) Factors {
  float factor[factors];
};

// By the read-only path.
template <int factors>
__device__ Factors<factors> load(const Factors<factors>* from) {
  if constexpr (factors == 1) {
    return {__ldg(&from->factor[0])};
  } else {
    const float2 both = __ldg(reinterpret_cast<const float2*>(from));
    return {both.x, both.y};
  }
}

template <int bits, int factors>
__device__ Factors<factors> find(const ByNumber<Factors<factors>>& table, uint16_t y, uint32_t number) {
  if ((1u << bits) <= kDirect || number < kDirect) {
    return load(table.direct + (number << 16 | y));
  }
  return load(table.list + __ldg(table.first + y) + number);
}

template <class scalar_t, int factors>
__device__ scalar_t times(scalar_t grad, const Factors<factors>& slope) {
  float product = static_cast<float>(grad);
#pragma unroll
  for (int i = 0; i < factors; ++i) {
    product *= slope.factor[i];
  }
  return __float_as_uint(slope.factor[0]) == 0x80000000u ? scalar_t(0) : static_cast<scalar_t>(product);
}

// At least one block: left to itself, ptxas saves registers for more blocks and loads later.
template <int bits, int groups, class scalar_t, int factors>
__global__ void __launch_bounds__(kThreads<scalar_t>, 1) scale_kernel(
    ByNumber<Factors<factors>> slopes, const scalar_t* grad, const uint16_t* y, const uint8_t* code, scalar_t* to, int64_t n) {
  uint4 grads[groups], outputs[groups];
  Numbers<bits> numbers[groups];
#pragma unroll
  for (int k = 0; k < groups; ++k) {
    const int64_t first = first_element<scalar_t, groups>(k);
    if (first + kGroup <= n) {
      grads[k] = load<Access::aligned>(grad + first);
      outputs[k] = load<Access::aligned>(y + first);
      numbers[k] = Numbers<bits>(code, first / kGroup, groups_of(n));
    }
  }
  int k = 0;
#pragma unroll
  for (; k < groups && first_element<scalar_t, groups>(k) + kGroup <= n; ++k) {
    auto vector = unpack<scalar_t>(grads[k]);
    const auto output = unpack<uint16_t>(outputs[k]);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      vector.element[i] = times(vector.element[i], find<bits>(slopes, output.element[i], numbers[k].get(i)));
    }
    store<Access::aligned>(to + first_element<scalar_t, groups>(k), vector);
  }
  const int64_t first = first_element<scalar_t, groups>(k);
  if (k == groups || first >= n) {
    return;
  }
  const Numbers<bits> last(code, first / kGroup, groups_of(n));
#pragma unroll 1
  for (int i = 0; first + i < n; ++i) {
    to[first + i] = times(grad[first + i], find<bits>(slopes, y[first + i], last.get(i)));
  }
}

template <int bits, class scalar_t, int factors>
__global__ void __launch_bounds__(kThreads<scalar_t>) scale_walk_kernel(
    ByNumber<Factors<factors>> slopes, const scalar_t* grad, const __grid_constant__ WalkIndex walk, const uint16_t* y,
    const uint8_t* code, scalar_t* to, int64_t n) {
  const int64_t first = first_element<scalar_t>();
  if (first >= n) {
    return;
  }
  int64_t offset, place, rest;
  walk.find(first, &offset, &place, &rest);
#pragma unroll 1
  for (int i = 0; i < kGroup && first + i < n; ++i) {
    const Numbers<bits> numbers(code, place / kGroup, groups_of(n));
    to[first + i] = times(grad[offset], find<bits>(slopes, y[place], numbers.get(place % kGroup)));
    walk.next(first + i + 1, &offset, &place, &rest);
  }
}

// Calls launch(Constant) with the number of a thread's groups.
template <class Launch>
void with_groups(int64_t n, const Launch& launch) {
  n < kLarge ? launch(Constant<1>()) : launch(Constant<2>());
}

template <int bits, class Entry>
Error encode(const Entry* table, const uint16_t* x, Rows rows, uint16_t* y, uint8_t* code, int64_t n, Stream stream) {
  with_access(x, rows, y, [&](auto access) {
    const auto launch = [&](auto groups) {
      encode_kernel<bits, access.value, groups.value>
          <<<blocks<uint16_t, groups.value>(n), kThreads<uint16_t>, 0, stream>>>(table, x, RowIndex(rows, n), y, code, n);
    };
    if constexpr (access.value == Access::aligned) {
      with_groups(n, launch);
    } else {
      launch(Constant<1>());
    }
  });
  return cudaGetLastError();
}

}  // namespace

Error look_up(const uint16_t* outputs, const uint16_t* x, Rows rows, uint16_t* y, int64_t n, Stream stream) {
  return encode<5>(outputs, x, rows, y, nullptr, n, stream);
}

Error encode(
    const uint32_t* entries, const uint16_t* x, Rows rows, uint16_t* y, uint8_t* code, int bits, int64_t n, Stream stream) {
  return with_bits(bits, [&](auto bits_) { return encode<bits_.value>(entries, x, rows, y, code, n, stream); });
}

Error decode(
    ByNumber<uint16_t> inputs, const uint16_t* y, const uint8_t* code, int bits, uint16_t* x, int64_t n, Stream stream) {
  with_bits(bits, [&](auto bits_) {
    decode_kernel<bits_.value><<<blocks<uint16_t>(n), kThreads<uint16_t>, 0, stream>>>(inputs, y, code, x, n);
  });
  return cudaGetLastError();
}

namespace {

// Calls launch(Constant) with a code's number of bits: one of two in either dtype. (The kernel that no code needs, of 10 bits
// in bfloat16, is the one for which ptxas would spill registers on sm_90.)
template <class scalar_t, class Launch>
void with_bits_of(int bits, const Launch& launch) {
  constexpr CodeBits of_dtype = code_bits(std::is_same_v<scalar_t, c10::Half>);
  bits == of_dtype.fewer ? launch(Constant<of_dtype.fewer>()) : launch(Constant<of_dtype.more>());
}

// Calls launch(slopes) with the table of as many factors as an input has.
template <class Launch>
void with_factors(ByNumber<float> slopes, int factors, const Launch& launch) {
  const auto as = [&](auto constant) {
    using Entry = const Factors<constant.value>*;
    launch(
        ByNumber<Factors<constant.value>>{
            slopes.first, reinterpret_cast<Entry>(slopes.list), reinterpret_cast<Entry>(slopes.direct)});
  };
  factors == 1 ? as(Constant<1>()) : as(Constant<2>());
}

}  // namespace

Error scale(
    Dtype dtype, ByNumber<float> slopes, int factors, const void* grad, const uint16_t* y, const uint8_t* code, int bits,
    void* to, int64_t n, Stream stream) {
  if (!is_aligned(grad) || !is_aligned(y)) {
    Walk walk;
    walk.dims = 1;
    walk.size[0] = n;
    walk.grad[0] = walk.mask[0] = 1;
    return scale(dtype, slopes, factors, grad, walk, y, code, bits, to, n, stream);
  }
  with_half_type(dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    with_factors(slopes, factors, [&](auto table) {
      with_bits_of<scalar_t>(bits, [&](auto bits_) {
        const auto launch = [&](auto groups) {
          scale_kernel<bits_.value, groups.value><<<blocks<scalar_t, groups.value>(n), kThreads<scalar_t>, 0, stream>>>(
              table, static_cast<const scalar_t*>(grad), y, code, static_cast<scalar_t*>(to), n);
        };
        with_groups(n, launch);
      });
    });
  });
  return cudaGetLastError();
}

Error scale(
    Dtype dtype, ByNumber<float> slopes, int factors, const void* grad, const Walk& walk, const uint16_t* y,
    const uint8_t* code, int bits, void* to, int64_t n, Stream stream) {
  with_half_type(dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    with_factors(slopes, factors, [&](auto table) {
      with_bits_of<scalar_t>(bits, [&](auto bits_) {
        scale_walk_kernel<bits_.value><<<blocks<scalar_t>(n), kThreads<scalar_t>, 0, stream>>>(
            table, static_cast<const scalar_t*>(grad), WalkIndex(walk, n), y, code, static_cast<scalar_t*>(to), n);
      });
    });
  });
  return cudaGetLastError();
}

}  // namespace fastact::cuda
