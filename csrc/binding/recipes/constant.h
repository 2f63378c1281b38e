// What programs read that is the same in each: made once for each device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <unordered_map>

#include "../devices.h"

namespace fastact::recipes {

// All of it is called with the GIL.
class Constant {
 public:
  explicit Constant(at::Tensor (*make)()) : make_(make) {}

  // Undefined while that device captures a graph, whose memory is its own, if it has none yet.
  at::Tensor on(at::Device device) {
    const auto found = known_.find(device);
    if (found != known_.end()) {
      return found->second;
    }
    if (is_capturing(device)) {
      return {};
    }
    // Without modes of the user's, which might change what stays. The copy waits for the device.
    const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::python_ks);
    return known_[device] = make_().to(device);
  }

 private:
  at::Tensor (*make_)();
  std::unordered_map<at::Device, at::Tensor> known_;
};

}  // namespace fastact::recipes
