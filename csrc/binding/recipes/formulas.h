// What is known of formulas (activations_cuda/recipes/formulas.py).
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <vector>

#include "../../recipes/program.h"
#include "value.h"

namespace fastact::recipes {

// How the dimensions of an operand belong to the output's: as in broadcasting, or one for each channel, or for each group of
// channels in each sample, or for each half of the last dimension. A table has none of them.
enum class Place { broadcast, channels, groups, halves, table };

// A reference of a formula's instruction: to an operand of the formula, to an argument, or a number. The number also stands for
// an operand that is None.
struct FormulaReference {
  int operand = -1, argument = -1;
  Place place = Place::broadcast;
  float number = 0;
};

struct FormulaInstruction {
  Opcode opcode;
  bool is_rounded;  // as the last one is
  std::vector<FormulaReference> references;
};

// See Facts in recipes/formulas.py.
struct Facts {
  py::object formula, in_place;  // the latter may be null
  std::optional<std::vector<FormulaInstruction>> program;
  bool is_tabulated = false, is_movement = false, is_view = false;
  py::object varies;  // True, False or a function of the formula's arguments

  // Whether on the CPU its bits depend on the layout.
  bool varies_with(const Objects& arguments) const;
};

// The facts of a formula; for most there are none.
const Facts& facts_of(const py::object& formula);
void set_facts(const py::dict& facts);  // of these formulas; what is known of others stays

// The formulas that this library itself makes recipes of.
struct Formulas {
  explicit Formulas(const py::kwargs& given)
      : reshape(given["reshape"]),
        expand(given["expand"]),
        transpose(given["transpose"]),
        permute(given["permute"]),
        same(given["same"]),
        multiply(given["multiply"]),
        power(given["power"]),
        dropout(given["dropout"]),
        negative(given["negative"]),
        cat(given["cat"]),
        slice(given["slice"]),
        split(given["split"]),
        cast(given["cast"]) {}

  py::object reshape, expand, transpose, permute, same, multiply, power, dropout, negative, cat, slice, split;
  // Those that aren't called: a cast, a view of (base, offset), and a mask of its bits, whose sizes, strides and dtype are the
  // recipe's.
  py::object cast;
  py::str as_strided{"as_strided"}, unpack_mask{"unpack_mask"};
};

// Set when activations_cuda.recipes is imported.
const Formulas& formulas();
void set_formulas(const py::kwargs& given);

Opcode opcode_of(const std::string& name);

// The names of the kernels' instructions.
py::tuple opcodes();

}  // namespace fastact::recipes
