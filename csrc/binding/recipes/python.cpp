#include "python.h"

#include <string_view>
#include <typeindex>
#include <unordered_map>

namespace fastact::recipes {
namespace {

const Callbacks* known_callbacks = nullptr;

}  // namespace

const Callbacks& callbacks() {
  return *known_callbacks;
}

void set_callbacks(const py::kwargs& given) {
  known_callbacks = new Callbacks(given);
}

py::object name_of(const torch::autograd::Node& node) {
  static auto& names = *new std::unordered_map<std::type_index, py::object>();
  const auto known = names.find(typeid(node));
  if (known != names.end()) {
    return known->second;
  }
  py::object name = py::str(node.name());
  if (std::string_view(typeid(node).name()).find("PyNode") == std::string_view::npos) {  // one class for all of Python's
    names.emplace(typeid(node), name);
  }
  return name;
}

bool is_cast(const torch::autograd::Node& node) {
  return name_of(node).equal(py::handle(NAME("ToCopyBackward0")));
}

bool is_clone(const torch::autograd::Node& node) {
  return name_of(node).equal(py::handle(NAME("CloneBackward0")));
}

}  // namespace fastact::recipes
