// From a value to its tensor.
#pragma once

#include "value.h"

namespace fastact::recipes {

// While a tensor is packed, values are read only to verify recipes. The hooks around the scope then get their tensor back,
// because those that offload asynchronously return each one once.
struct Packing {
  Packing() : outer(current) { current = this; }
  ~Packing() { current = outer; }

  Packing* outer;
  static thread_local Packing* current;
};

// The formulas that this library knows.
struct Formulas {
  py::dict in_place;     // those that write to their first operand, by those that don't: for temporaries
  py::object movements;  // those whose elements are their operands'
  py::object reshape;    // that of views
  // Those that aren't called: a view of (base, offset), a cast, and a mask of its bits, whose sizes, strides and dtype are the
  // recipe's.
  py::object as_strided, cast, unpack_mask;
};

void set_formulas(Formulas given);
const Formulas& formulas();

// Whether it is a cast back to the half type that all its elements came from, by movements alone: nothing is to be cast.
bool is_cast_back(const Value& value);

// Autograd's unpack hook: the tensor again.
PyObject* unpack(PyObject*, PyObject* object);

}  // namespace fastact::recipes
