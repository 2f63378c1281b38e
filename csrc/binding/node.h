// What nodes of autograd's graph need of PyTorch, whose releases differ in how they are held, and of compiled autograd.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace fastact {

// Autograd holds its nodes by c10::intrusive_ptr or, in older releases, by std::shared_ptr.
using NodePointer = decltype(torch::autograd::Edge::function);

template <class AnyNode>
c10::intrusive_ptr<AnyNode> adopt(AnyNode* node, const c10::intrusive_ptr<AnyNode>*) {
  return c10::intrusive_ptr<AnyNode>::unsafe_steal_from_new(node);
}
template <class AnyNode>
std::shared_ptr<AnyNode> adopt(AnyNode* node, const std::shared_ptr<AnyNode>*) {
  return {node, [](AnyNode* it) { deleteNode(it); }};
}

template <class AnyNode>
c10::intrusive_ptr<AnyNode> pointer_to(AnyNode* node, const c10::intrusive_ptr<AnyNode>*) {
  return c10::intrusive_ptr<AnyNode>::unsafe_reclaim_from_nonowning(node);
}
template <class AnyNode>
std::shared_ptr<AnyNode> pointer_to(AnyNode* node, const std::shared_ptr<AnyNode>*) {
  return node->shared_from_this();
}

// A new node's first pointer.
inline NodePointer adopt(torch::autograd::Node* node) {
  return adopt(node, static_cast<NodePointer*>(nullptr));
}

// Another to a node that is held.
inline NodePointer pointer_to(torch::autograd::Node* node) {
  return pointer_to(node, static_cast<NodePointer*>(nullptr));
}

template <class AnyNode>
c10::weak_intrusive_ptr<AnyNode> weak(const c10::intrusive_ptr<AnyNode>& node) {
  return c10::weak_intrusive_ptr<AnyNode>(node);
}
template <class AnyNode>
std::weak_ptr<AnyNode> weak(const std::shared_ptr<AnyNode>& node) {
  return node;
}

using WeakNode = decltype(weak(NodePointer()));

// A node's fields are a struct that lists them once, because compiled autograd asks several things of each:
//
//     template <class Saved>  // SavedVariable in the node, at::Tensor once they are arguments
//     struct Fields {
//       template <class Self, class Visit>
//       static void each(Self& self, const Visit& visit);  // calls visit(self.field) for each
//     };

// A field as an argument.
template <class Field>
const Field& as_argument(const Field& field, const NodePointer&) {
  return field;
}
inline std::vector<c10::SymInt> as_argument(const c10::SymDimVector& strides, const NodePointer&) {
  return {strides.begin(), strides.end()};
}
inline at::Tensor as_argument(const torch::autograd::SavedVariable& saved, const NodePointer& node) {
  return saved.unpack(node);
}

// What a node depends on.
template <class Fields>
void collect(const Fields& fields, torch::dynamo::autograd::CompiledNodeArgs& args) {
  Fields::each(fields, [&](const auto& field) {
    if constexpr (std::is_same_v<std::decay_t<decltype(field)>, torch::autograd::SavedVariable>) {
      args.collect(field, /*is_output=*/true);  // the flag makes no difference here
    } else {
      args.collect(as_argument(field, nullptr));
    }
  });
}

// The fields again from the arguments.
template <class Fields>
Fields from_arguments(const std::vector<c10::IValue>& saved) {
  Fields fields;
  torch::dynamo::autograd::PackedArgs arguments(saved);
  Fields::each(fields, [&](auto& field) {
    auto argument = arguments.unpack<std::decay_t<decltype(as_argument(field, nullptr))>>();
    if constexpr (std::is_same_v<decltype(argument), std::vector<c10::SymInt>>) {
      field.assign(argument.begin(), argument.end());
    } else {
      field = std::move(argument);
    }
  });
  return fields;
}

// Makes function(grads, arguments) a node's backward in compiled autograd's graph.
template <class Fields>
torch::autograd::variable_list call_in_graph(
    torch::autograd::Node& node, Fields& fields, torch::dynamo::autograd::functional_apply_t function,
    const torch::autograd::variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& saved) {
  using namespace torch::dynamo::autograd;
  PackedArgs arguments;
  std::vector<at::TypePtr> types;
  const NodePointer pointer = pointer_to(&node);
  Fields::each(fields, [&](auto& field) {
    saved.before(field);
    std::decay_t<decltype(as_argument(field, pointer))> argument = as_argument(field, pointer);
    types.push_back(IValuePacker<decltype(argument)>::packed_type());
    arguments.pack(argument);
  });
  const auto& compiler = getPyCompilerInterface();
  const auto bound = compiler->bind_function(
      saved.get_py_compiler(), node.name(), std::move(function), types,
      /*is_custom_function=*/true);  // or a second node would find the name taken
  torch::autograd::variable_list result = compiler->call_function(
      saved.get_py_compiler(), "apply_functional", bound, grads, arguments.vec(),
      IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(get_input_metadata(node.next_edges())));
  Fields::each(fields, [&](auto& field) { saved.after(field); });
  return result;
}

// A node of one input, of such fields. Compiled autograd calls Derived::apply_functional(grads, arguments).
template <class Derived, template <class> class Fields>
struct NodeOf : torch::autograd::Node {
  using SavedFields = Fields<torch::autograd::SavedVariable>;

  NodeOf(const at::Tensor& self, SavedFields fields)
      : Node(torch::autograd::collect_next_edges(self)), fields_(std::move(fields)) {}

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    SavedFields::each(fields_, [](auto& field) {
      if constexpr (std::is_same_v<std::decay_t<decltype(field)>, torch::autograd::SavedVariable>) {
        field.reset_data();
      }
    });
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override { collect(fields_, args); }

  torch::autograd::variable_list apply_with_saved(
      const torch::autograd::variable_list& grads, torch::dynamo::autograd::SwapSavedVariables& saved) override {
    return call_in_graph(*this, fields_, Derived::apply_functional, grads, saved);
  }

 protected:
  SavedFields fields_;
};

}  // namespace fastact
