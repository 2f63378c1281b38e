// Leaves of the graph, and parameters that are freed while it is alive, without their version counting it. A recipe that reads
// one needs a copy, made while it still has its value.
//
// FSDP2, and FSDP1, whose parameters are views of a flat one, free a module's parameters after its forward pass, until the
// backward pass reaches it. So a parameter's value is private to what saved it, which reads it where it is there again.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include "value.h"

namespace fastact::recipes {

// Whether FSDP2 has sharded some module, and whether FSDP1 may have.
struct Sharding {
  bool has_fsdp2, may_have_fsdp1;
};

void set_sharding(Sharding given);
Sharding sharding();

// Since an op read a leaf, an optimizer may have written to it, and some don't count that in its version. So a leaf isn't
// trusted once a backward pass of any thread has unpacked a tensor, until this thread saves the next. The hooks call these.
void note_unpacking();
void note_saving();

// The sequence number of this thread's next op, as a scope begins.
uint64_t begin_scope();

// Whether an op, by its sequence number, ran in another thread, before `begins`, or before the last backward pass: then the
// leaves that it read aren't trusted.
bool is_of_earlier_pass(uint64_t sequence, uint64_t thread, uint64_t begins = 0);

// Whether an edge leads to a leaf of the graph.
bool is_leaf(const torch::autograd::Edge& edge);

// Whether a leaf that is no parameter, and was written to, shares its version with another tensor: what it was detached from,
// or a view. An op that wrote to one since has written to all.
bool is_alias(const at::Tensor& leaf);

// Whether sharded training frees it between passes. The first takes the leaf for a parameter, the second asks.
bool is_sharded(const at::Tensor& parameter);
bool is_sharded_parameter(const at::Tensor& leaf);

// A copy of a norm's weight or bias that FSDP2 frees; null for what is large, or freed already.
py::object copy_if_small(const at::Tensor& parameter);

}  // namespace fastact::recipes
