// Which function of this package made a node's output: a recipe calls it again.
#pragma once

#include <c10/util/SmallVector.h>

#include <string>
#include <utility>
#include <variant>

namespace fastact {

// Named after the op and its overload: hardsigmoid, hardsigmoid_affine.
inline std::string function_name(const char* op, const char* overload) {
  return *overload == '\0' ? op : std::string(op) + "_" + overload;
}

struct Origin {
  const char* op = nullptr;  // none made a gradient
  const char* overload = "";
  c10::SmallVector<std::variant<double, std::string>, 2> parameters;
};

// What such a node is beside a torch::autograd::Node.
struct WithOrigin {
  explicit WithOrigin(Origin origin) : origin(std::move(origin)) {}
  virtual ~WithOrigin() = default;

  const Origin origin;
};

}  // namespace fastact
