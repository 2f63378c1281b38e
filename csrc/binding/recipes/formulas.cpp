#include "formulas.h"

#include <c10/util/Exception.h>

#include <iterator>
#include <unordered_map>
#include <utility>

namespace fastact::recipes {
namespace {

const Formulas* known_formulas = nullptr;

auto& known_facts() {
  static auto& facts = *new std::unordered_map<PyObject*, Facts>();
  return facts;
}

FormulaReference reference_of(py::handle given) {
  FormulaReference reference;
  if (PyFloat_Check(given.ptr())) {
    reference.number = py::cast<float>(given);
    return reference;
  }
  const py::tuple fields = py::reinterpret_borrow<py::tuple>(given);
  if (fields.size() == 1) {
    reference.argument = py::cast<int>(fields[0]);
    return reference;
  }
  const auto place = py::cast<std::string>(fields[1]);
  reference.operand = py::cast<int>(fields[0]);
  reference.place = place == "channels" ? Place::channels : place == "groups" ? Place::groups : Place::broadcast;
  TORCH_CHECK_VALUE(
      reference.place != Place::broadcast || place == "broadcast",
      "recompute: expected an operand's place to be broadcast, channels or groups, got ", place);
  reference.number = py::cast<float>(fields[2]);
  return reference;
}

std::vector<FormulaInstruction> program_of(py::handle given) {
  std::vector<FormulaInstruction> program;
  for (const py::handle each : py::reinterpret_borrow<py::tuple>(given)) {
    const auto fields = py::reinterpret_borrow<py::tuple>(each);
    const auto name = py::cast<std::string>(fields[0]);
    FormulaInstruction instruction = {opcode_of(name), py::cast<bool>(fields[1]), {}};
    for (const py::handle reference : py::reinterpret_borrow<py::tuple>(fields[2])) {
      instruction.references.push_back(reference_of(reference));
    }
    const auto expected = static_cast<size_t>(references_of(instruction.opcode));
    TORCH_CHECK_VALUE(
        instruction.references.size() == expected, "recompute: expected ", expected, " references of the instruction ", name,
        ", got ", instruction.references.size());
    program.push_back(std::move(instruction));
  }
  return program;
}

}  // namespace

const Facts& facts_of(const py::object& formula) {
  static const auto& none = *new Facts();
  const auto found = known_facts().find(formula.ptr());
  return found == known_facts().end() ? none : found->second;
}

bool Facts::varies_with(const Objects& arguments) const {
  return varies && (PyCallable_Check(varies.ptr()) ? varies(*tuple_of(arguments)) : varies).ptr() == Py_True;
}

void set_facts(const py::dict& facts) {
  for (const auto& [formula, each] : facts) {
    Facts known = {py::reinterpret_borrow<py::object>(formula)};
    if (const py::object in_place = each.attr("in_place"); !in_place.is_none()) {
      known.in_place = in_place;
    }
    if (const py::object program = each.attr("program"); !program.is_none()) {
      known.program = program_of(program);
    }
    known.is_tabulated = py::cast<bool>(each.attr("is_tabulated"));
    known.is_movement = py::cast<bool>(each.attr("is_movement"));
    known.is_view = py::cast<bool>(each.attr("is_view"));
    known.varies = each.attr("varies");
    known_facts()[formula.ptr()] = std::move(known);
  }
}

const Formulas& formulas() {
  return *known_formulas;
}

void set_formulas(const py::kwargs& given) {
  known_formulas = new Formulas(given);
}

Opcode opcode_of(const std::string& name) {
#define INSTRUCTION(opcode, references) \
  if (name == #opcode) {                \
    return Opcode::opcode;              \
  }
  FASTACT_INSTRUCTIONS(INSTRUCTION)
#undef INSTRUCTION
  TORCH_CHECK_VALUE(false, "recompute: expected an instruction of recipes/program.h, got ", name);
}

py::tuple opcodes() {
#define INSTRUCTION(opcode, references) py::str(#opcode),
  const py::str names[] = {FASTACT_INSTRUCTIONS(INSTRUCTION)};
#undef INSTRUCTION
  return py::tuple(py::cast(std::vector<py::object>(std::begin(names), std::end(names))));
}

}  // namespace fastact::recipes
