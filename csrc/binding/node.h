// What nodes of autograd's graph need of PyTorch, whose releases differ in how they are held.
#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>

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

}  // namespace fastact
