// The numbers that ops add, as 1 in 1 + x. No gradient needs them, so autograd's nodes don't save them: within a scope they are
// noted as the ops are called, once a recipe has lacked one.
#pragma once

#include "python.h"

namespace fastact::recipes {

// For a scope that begins and ends in this thread. `at_once`: from its first op on.
void begin_observing(bool at_once);
void end_observing();

// Whether ops are being observed in this thread, for tests.
bool observes_ops();

// The number that the op which made a node has added or subtracted; null if it was a tensor, or isn't known.
py::object scalar_of(const torch::autograd::Node& node);

}  // namespace fastact::recipes
