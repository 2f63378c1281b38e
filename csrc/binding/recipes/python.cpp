#include "python.h"

#include <string_view>
#include <typeindex>
#include <unordered_map>

namespace fastact::recipes {
namespace {

const FromPython* known = nullptr;

}  // namespace

const FromPython& from_python() {
  return *known;
}

void set_from_python(const py::kwargs& given) {
  known = new FromPython(given);
}

py::object name_of(const torch::autograd::Node& node) {
  static auto& names = *new std::unordered_map<std::type_index, py::object>();
  const auto found = names.find(typeid(node));
  if (found != names.end()) {
    return found->second;
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
