#include "numbering.h"

#include <algorithm>
#include <unordered_map>

namespace fastact {

std::vector<uint16_t> outputs_of(const Variants& variants, int x) {
  std::vector<uint16_t> outputs;
  for (const Patterns& variant : variants) {
    if (std::find(outputs.begin(), outputs.end(), variant[x]) == outputs.end()) {
      outputs.push_back(variant[x]);
    }
  }
  return outputs;
}

Patterns number(const Variants& variants, const std::vector<uint64_t>& derivatives, int numbers) {
  std::vector<int> inputs_of(kPatterns);  // by output
  for (int x = 0; x < kPatterns; ++x) {
    for (const uint16_t y : outputs_of(variants, x)) {
      ++inputs_of[y];
    }
  }
  const auto is_crowded = [&](uint16_t y) { return inputs_of[y] > numbers; };

  // For crowded outputs: the first number that each derivative got, -1 as long as it has none, and how many more numbers there
  // are than derivatives that wait for one.
  std::unordered_map<uint64_t, int> number_of;
  std::vector<int> spare(kPatterns, numbers);
  const auto with_derivative = [&](uint16_t y, int x) { return derivatives[x] ^ (y + uint64_t{1}) * 0x9e3779b97f4a7c15; };
  for (int x = 0; x < kPatterns; ++x) {
    for (const uint16_t y : outputs_of(variants, x)) {
      if (is_crowded(y) && number_of.try_emplace(with_derivative(y, x), -1).second) {
        --spare[y];
      }
    }
  }

  const int words = (numbers + 63) / 64;
  std::vector<uint64_t> used(static_cast<size_t>(kPatterns) * words);  // bits, by output and number
  std::unordered_map<uint32_t, uint64_t> derivative_of;  // by output and number, where an input has a crowded output
  const auto key = [](uint16_t y, int n) { return static_cast<uint32_t>(y) << 16 | static_cast<uint32_t>(n); };
  const auto is_used = [&](uint16_t y, int n) { return (used[size_t{y} * words + n / 64] >> (n % 64)) & 1; };

  Patterns result(kPatterns);
  for (int x = 0; x < kPatterns; ++x) {
    struct Output {
      uint16_t y;
      bool crowded, has_room;  // for a number that none of its inputs has
    };
    std::vector<Output> outputs;
    int shared = 0;
    bool crowded = false, have_room = true;
    for (const uint16_t y : outputs_of(variants, x)) {
      const int known = is_crowded(y) ? number_of.at(with_derivative(y, x)) : -1;
      const Output output = {y, is_crowded(y), known < 0 || spare[y] > 0};
      outputs.push_back(output);
      crowded |= output.crowded;
      have_room &= output.has_room;
      shared = output.has_room ? shared : known;
    }
    // The first from `start` on that every output may take: a new number, or if it may be shared, one with this derivative.
    const auto find = [&](int start, bool may_share) {
      for (int i = 0; i < numbers; ++i) {
        const int n = (start + i) % numbers;
        const bool fits = std::all_of(outputs.begin(), outputs.end(), [&](const Output& output) {
          if (!is_used(output.y, n)) {
            return output.has_room;
          }
          const auto found = may_share ? derivative_of.find(key(output.y, n)) : derivative_of.end();
          return found != derivative_of.end() && found->second == derivatives[x];
        });
        if (fits) {
          return n;
        }
      }
      return -1;
    };
    int chosen = have_room ? find(0, /*may_share=*/false) : -1;
    if (chosen < 0) {
      chosen = find(shared, /*may_share=*/true);
    }
    if (chosen < 0) {
      return {};
    }
    for (const Output& output : outputs) {
      if (is_used(output.y, chosen)) {
        continue;
      }
      used[size_t{output.y} * words + chosen / 64] |= uint64_t{1} << (chosen % 64);
      if (crowded) {
        derivative_of[key(output.y, chosen)] = derivatives[x];
      }
      if (output.crowded) {
        int& known = number_of.at(with_derivative(output.y, x));
        known < 0 ? known = chosen : --spare[output.y];
      }
    }
    result[x] = static_cast<uint16_t>(chosen);
  }
  return result;
}

}  // namespace fastact
