// What stands for a saved tensor: the tensor itself, kept, or a recipe, which computes it from other values.
//
// A value is a Python object, since autograd's hooks give and take those. It is owned by the node that saved it, through the
// result of the hook, and by the recipes that read it: only what a recipe reads may outlive what PyTorch would have kept. It
// doesn't own a node of the graph: that would be a cycle. All of this runs under the GIL, which is its lock.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "../node.h"
#include "weak_tensor.h"

namespace fastact::recipes {

namespace py = pybind11;

constexpr int kMaxDepth = 32;      // of a recipe of recipes, which are computed by recursion
constexpr size_t kMaxRoots = 128;  // of a recipe

// What a formula is given. Not a tuple: the garbage collector goes through each, and the more there are the sooner it starts.
using Objects = c10::SmallVector<py::object, 1>;

// An output of a node.
using Output = std::pair<torch::autograd::Node*, uint32_t>;

// Everything that a formula's bits depend on except the elements. The first is the id of a node's name or, if negative, a
// ConfigurationOf.
using Configuration = c10::SmallVector<int64_t, 32>;

enum class ConfigurationOf : int64_t { kept_tensor = -7, downcast, partial, written_to, mask, view, equal };
static_assert(static_cast<int64_t>(ConfigurationOf::equal) == -1);

struct NormCall;
struct Pass;

// What the hooks around a scope have of a tensor.
struct Outside {
  py::object hooks;                                                 // a pair
  c10::VariableVersion version;                                     // the tensor's version counter, shared with it
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> memory;  // its memory, if it has any
  py::object packed;                                                // what they made of it
  int64_t version_given_back = 0;                                   // its count before they last gave it back
};

struct Value {
  Value() = default;
  Value(const Value&) = delete;
  Value& operator=(const Value&) = delete;
  ~Value();

  bool is_recipe() const { return formula.ptr() != nullptr; }
  at::ScalarType dtype_of() const { return held.defined() ? held.scalar_type() : dtype; }
  std::optional<at::Device> device_of() const { return held.defined() ? std::optional(held.device()) : device; }
  std::optional<at::IntArrayRef> strides_of() const {
    return is_rearranged       ? std::nullopt
           : held.defined()    ? std::optional(held.strides())
           : has_strides       ? std::optional(at::IntArrayRef(strides))
           : strides_of_output ? std::optional(at::IntArrayRef(*strides_of_output))
                               : std::nullopt;
  }
  at::IntArrayRef sizes_of() const { return held.defined() ? held.sizes() : at::IntArrayRef(sizes); }

  // Whether it is this tensor's: of the same version and layout, and nothing that it follows from was written to since.
  bool stands_for(const at::Tensor& tensor) const;
  bool is_current() const;

  // The tensor, for a recipe: computed once in a backward pass if it has several readers. `is_new` is set if nobody else has
  // its memory.
  at::Tensor tensor(bool* is_new = nullptr);
  // As tensor(), for a backward pass. A graph that it makes may save the tensor, so the next pass is given that once more.
  at::Tensor give();
  at::Tensor compute(bool* is_new = nullptr);
  // Raises autograd's error if what it is, or what it replaces, was written to.
  void check_unwritten() const;
  // Whether it is, or follows from, what the hooks around a scope have, which they may give back in one backward pass only.
  bool follows_from_outside() const;
  bool must_be_computed_once() const { return readers > 1 && follows_from_outside(); }
  // The half type that all elements of a float32 recipe came from, by movements alone, or undefined.
  at::ScalarType half();
  bool has_given(const at::Tensor& tensor) const { return given_ && given_->is(tensor); }
  void leave_registry();
  // Takes the place of the tensor that it holds as another recipe of its layout.
  void become(const Value& recipe, const at::Tensor& tensor, const py::object& source);
  // Holds what it has computed from now on, in place of what that follows from.
  void hold(const at::Tensor& computed);
  // Takes over the version, sizes and strides of the tensor that it stands for.
  void take_layout_of(const at::Tensor& tensor);
  void set_layout(at::ScalarType dtype, at::Device device, at::IntArrayRef sizes, at::IntArrayRef strides);
  bool remembers() const { return remembered_.defined(); }
  // Whether what is held, remembered or given shares its memory.
  bool has_memory_of(const at::Tensor& tensor) const {
    return (held.defined() && held.is_alias_of(tensor)) || (remembers() && remembered_.is_alias_of(tensor)) ||
           (given_ && given_->memory() == tensor.storage().unsafeGetStorageImpl());
  }

  int64_t version = 0;
  int readers = 0;    // hooks' results and recipes
  py::object source;  // the name of the node, or none
  // The layout, unless a tensor is held. `has_strides` is false where any strides will do: for a tensor that nobody has saved,
  // and where the hooks outside needn't restore them.
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::optional<at::Device> device;
  at::DimVector sizes, strides;
  bool has_strides = false;
  // The strides of the op's output, for a recipe that replaces no tensor, if a node has saved that output or a clone of it.
  // By pointer, since few have it, and a value is to be small (add_value_type).
  std::unique_ptr<const at::DimVector> strides_of_output;
  int64_t configuration_id = -1;

  // What is kept: a tensor, or what the hooks around the scope have of it. A value that is no recipe has exactly one of them.
  at::Tensor held;
  bool is_copy = false;              // of the output that it stands for, which somebody else may have, too
  bool is_rearranged = false;        // a copy, whose strides may not be those of the tensor that ops have read
  std::unique_ptr<Outside> outside;  // or null; by pointer, since few have it
  int64_t stream = 0;
  bool is_partial = false;  // has what its readers need of the tensor, and nothing follows from it (partial.h)
  bool is_private = false;  // a parameter that only what saved it may read
  py::object copy;          // what recipes read in its place (leaves.h, calls.h), or null
  std::shared_ptr<const NormCall> norm_call;  // that saved it, or null

  // What a recipe is: formula(*operands, *arguments). Operands are values, numbers or None.
  py::object formula;
  Objects operands, arguments;
  std::vector<py::object> roots;                 // the kept values that it follows from in the end
  std::optional<c10::VariableVersion> replaced;  // the version counter of the tensor that it replaces, shared with it
  bool fuses = true;                             // whether it may be part of a program, see lowering.h
  uint64_t sequence = 0, thread = 0;             // of its node: the first counts up in each thread
  int depth = 0;
  int max_writes = 0;  // the highest version that its own ops explain: beyond it, somebody else has written to the tensor

 private:
  friend struct Pass;
  friend void note(const py::object& value, const NodePointer& node, uint32_t output_nr);
  friend py::object noted(const NodePointer& node, uint32_t output_nr);

  // `tensor`: whose version is found; null where only its version is left.
  void check_version(int64_t found, const at::Tensor* tensor = nullptr) const;
  at::Tensor find_or_compute(bool* is_new);
  at::Tensor remember(int task, at::Tensor tensor);
  at::Tensor compute_recipe(bool* is_new);
  // What is new has the version of the tensor that it stands for.
  at::Tensor compute_in_version(bool* is_new = nullptr);
  // What the hooks outside give back.
  py::object fetch();
  // The formula of the operands. `is_new`: nobody else has the result.
  at::Tensor apply(bool* is_new);

  std::optional<at::ScalarType> half_;  // once it is known
  at::Tensor remembered_;
  int64_t remembered_stream_ = 0, remembered_version_ = 0;
  Pass* pass_ = nullptr;
  std::unique_ptr<const WeakTensor> given_;

  Output output_ = {nullptr, 0};  // whose value it was noted to be
  std::optional<WeakNode> node_;
};

// A new value, and what is behind one. `is_value` says whether an object is one at all.
py::object make_value();
Value& value_of(py::handle object);
bool is_value(py::handle object);

py::tuple tuple_of(const Objects& objects);
Objects objects_of(const py::tuple& tuple);

// A kept value. `source` is the name of the node; `hooks` are those around the scope, if they are to have the tensor.
py::object keep(const at::Tensor& tensor, const py::object& source = py::none(), const py::object& hooks = py::none());

// Set where these hooks raise in it: that error is the user's, not this library's.
extern thread_local bool hooks_outside_have_raised;

void append(Configuration& configuration, at::IntArrayRef others);
void append(Configuration& configuration, at::ScalarType dtype, c10::Device device);
// Equal configurations have one id.
int64_t id_of(const Configuration& configuration);
// The id of a value's configuration.
int64_t configuration_id_of(Value& value);

// From a node's output to its value, if it is alive. A registry of addresses, each with a weak reference to its node, since
// addresses are used again.
void note(const py::object& value, const NodePointer& node, uint32_t output_nr);
py::object noted(const NodePointer& node, uint32_t output_nr);

// Outputs that don't follow from what is noted, so that a residual stream that nobody has saved isn't searched to its beginning
// by each of its readers. They are those of one scope and its rules, and are forgotten when one of them is noted, since others
// may follow from it.
class DeadEnds {
 public:
  using Key = std::pair<int64_t, const PyObject*>;

  void begin_derivation(Key scope_and_rules);
  void add(const NodePointer& node, uint32_t output_nr);
  bool contains(const NodePointer& node, uint32_t output_nr) const;
  void forget_if_among(const Output& output);
  void forget() { outputs_.clear(); }

 private:
  Key scope_and_rules_ = {-1, nullptr};
  std::map<Output, WeakNode> outputs_;
};

DeadEnds& dead_ends();

// From a tensor that no node has made, as a mask, to the value that gave it to a backward pass, or null.
py::object given(const at::Tensor& tensor);

// The equal recipe of a node shortly before this one's, or null: then this one is added, for later ones to find.
py::object equal_or_add(Value& recipe, const torch::autograd::Node& node);

void add_value_type(py::module_& module);

}  // namespace fastact::recipes
