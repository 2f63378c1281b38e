// What formulas and kernels are verified by.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <optional>

#include "../devices.h"
#include "../identical.h"

namespace fastact::recipes {

// Whether each pair is identical, or undefined in both.
bool are_identical(at::TensorList tensors, at::TensorList others);

// Numbers of either sign, from 1/8 to 2 in magnitude, that look random: float32 or of a half type.
at::Tensor some_numbers(at::IntArrayRef sizes, at::TensorOptions options, int64_t seed);

// 2^18 numbers of every magnitude, NaN among them, in one of two orders; of a half type, all there are.
enum class Order { first, second };
at::Tensor all_numbers(at::TensorOptions options, Order order);

// Whether a kernel gives the ops' bits, by all that decides it beside the numbers.
template <class Key>
class Verdicts {
 public:
  // What trial(), which waits for the device, returned when this was first asked; false where it can't be called now, or fails.
  template <class Trial>
  bool find(const Key& key, at::Device device, const Trial& trial) {
    constexpr int most_failures = 3;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (const auto& known = verdicts_[key].verdict) {
        return *known;
      }
    }
    if (is_capturing(device)) {
      return false;
    }
    std::optional<bool> found;
    try {
      found = trial();
    } catch (const c10::Error&) {  // later there may be room, or it may wait; but each attempt empties the allocator's cache
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    Verdict& verdict = verdicts_[key];
    if (!found && ++verdict.failures == most_failures) {
      found = false;
    }
    if (found) {
      verdict.verdict = found;
    }
    return found.value_or(false);
  }

 private:
  struct Verdict {
    std::optional<bool> verdict;
    int failures = 0;
  };

  std::mutex mutex_;
  std::map<Key, Verdict> verdicts_;
};

}  // namespace fastact::recipes
