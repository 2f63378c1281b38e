// What nodes of autograd's graph need of PyTorch, whose releases differ in how they are held, and of compiled autograd.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "../torch_version.h"

#if FASTACT_COMPILED_AUTOGRAD
#include <torch/csrc/dynamo/compiled_autograd.h>
#endif

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

// A reference that doesn't own a node, and whether the node still is.
using WeakNode = decltype(weak(NodePointer()));
inline bool is_alive(const WeakNode& node) {
  return !node.expired();
}

#if FASTACT_COMPILED_AUTOGRAD
// Makes function(grads, arguments) a node's backward in compiled autograd's graph. The arguments have these types.
inline torch::autograd::variable_list call_in_graph(
    const torch::autograd::Node& node, torch::dynamo::autograd::functional_apply_t function,
    const torch::autograd::variable_list& grads, const torch::dynamo::autograd::PackedArgs& arguments,
    const std::vector<at::TypePtr>& types, torch::dynamo::autograd::SwapSavedVariables& saved) {
  using namespace torch::dynamo::autograd;
  const auto& compiler = getPyCompilerInterface();
  const auto bound = compiler->bind_function(
      saved.get_py_compiler(), node.name(), std::move(function), types,
      /*is_custom_function=*/true);  // or a second node would find the name taken
  return compiler->call_function(
      saved.get_py_compiler(), "apply_functional", bound, grads, arguments.vec(),
      IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(get_input_metadata(node.next_edges())));
}
#endif

}  // namespace fastact
