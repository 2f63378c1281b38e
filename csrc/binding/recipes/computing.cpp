#include "computing.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../devices.h"
#include "../dtypes.h"
#include "formulas.h"
#include "fusion.h"
#include "leaves.h"
#include "masks.h"
#include "python.h"

namespace fastact::recipes {

// The values that remember their tensor until the end of a backward pass. A callback of the engine owns this: the engine calls
// it when the pass ends, and drops it when that fails; then they forget.
struct Pass {
  explicit Pass(int task) : task(task) {}
  ~Pass() { forget(); }
  void forget();
  int task;
  std::unordered_set<Value*> values;
};

namespace {

auto& passes() {
  static auto& running = *new std::unordered_map<int, Pass*>();
  return running;
}

// Outside of backward passes, what one computation needs several times.
struct Computed {
  static at::Tensor of(Value& value) {
    if (current) {
      return current->get(value);
    }
    Computed computed;
    current = &computed;
    const auto reset = c10::make_scope_exit([] { current = nullptr; });
    return computed.get(value);
  }

 private:
  at::Tensor get(Value& value) {
    const auto found = tensors.find(&value);
    return found != tensors.end() ? found->second : tensors[&value] = value.compute();
  }

  std::unordered_map<Value*, at::Tensor> tensors;
  static thread_local Computed* current;
};

thread_local Computed* Computed::current = nullptr;

// The tensor, or a copy that has these strides, whatever they are.
at::Tensor in_strides(const at::Tensor& tensor, at::IntArrayRef strides) {
  return tensor.strides() == strides ? tensor : copy_of(tensor, tensor.scalar_type(), strides);
}

at::ScalarType half_of(const Value& recipe) {
  const bool is_cast = recipe.formula.is(formulas().cast);
  if (recipe.dtype != at::kFloat || (!is_cast && !facts_of(recipe.formula).is_movement)) {
    return at::ScalarType::Undefined;
  }
  auto result = at::ScalarType::Undefined;
  for (const py::object& each : recipe.operands) {
    if (is_value(each)) {
      Value& operand = value_of(each);  // which a concatenation may cast itself
      const at::ScalarType dtype = is_cast || is_half(operand.dtype_of()) ? operand.dtype_of() : operand.half();
      if (!is_half(dtype) || (result != at::ScalarType::Undefined && result != dtype)) {
        return at::ScalarType::Undefined;
      }
      result = dtype;
    }
  }
  return result;
}

// Calls a formula. `is_new`: nobody else has the result.
at::Tensor call(PyObject* formula, c10::ArrayRef<py::object> operands, c10::ArrayRef<py::object> arguments, bool* is_new) {
  c10::SmallVector<PyObject*, 8> given;
  for (const auto& objects : {operands, arguments}) {
    for (const py::object& each : objects) {
      given.push_back(each.ptr());
    }
  }
  const TorchFunction function(TorchFunction::State::ALL_DISABLED);  // as an op's own forward runs
  const auto result = py::reinterpret_steal<py::object>(PyObject_Vectorcall(formula, given.data(), given.size(), nullptr));
  if (!result) {
    throw py::error_already_set();
  }
  TORCH_CHECK_TYPE(
      THPVariable_Check(result.ptr()), "recompute: expected a tensor of a formula, got ", Py_TYPE(result.ptr())->tp_name);
  *is_new = Py_REFCNT(result.ptr()) == 1;
  return THPVariable_Unpack(result.ptr());
}

// Computes values all of whose elements came from a half type, in that dtype.
class InHalf {
 public:
  explicit InHalf(at::ScalarType half) : half_(half) {}

  at::Tensor of(Value& value) {
    if (is_half(value.dtype_of())) {
      return value.tensor();
    }
    if (value.formula.is(formulas().cast)) {
      return value_of(value.operands[0]).tensor();
    }
    c10::SmallVector<py::object, 8> given;
    for (const py::object& each : value.operands) {
      given.push_back(is_value(each) ? wrapped(of_operand(value_of(each))) : each);
    }
    bool is_new = false;
    return call(value.formula.ptr(), given, value.arguments, &is_new);
  }

 private:
  at::Tensor of_operand(Value& operand) {
    if (operand.must_be_computed_once()) {
      return operand.tensor().to(half_);
    }
    if (operand.readers < 2) {
      return of(operand);
    }
    at::Tensor& known = known_[&operand];
    if (!known.defined()) {
      known = of(operand);
    }
    return known;
  }

  const at::ScalarType half_;
  std::unordered_map<Value*, at::Tensor> known_;  // what has several readers: movements of movements meet it again and again
};

}  // namespace

thread_local Packing* Packing::current = nullptr;

void Pass::forget() {
  if (task < 0) {  // the callback has run, maybe just before the interpreter ends
    return;
  }
  const py::gil_scoped_acquire gil;
  passes().erase(std::exchange(task, -1));
  std::vector<at::Tensor> remembered;  // which may own values themselves: freed once none of them refers to this
  for (Value* value : std::exchange(values, {})) {
    value->pass_ = nullptr;
    remembered.push_back(std::exchange(value->remembered_, at::Tensor()));
  }
}

Value::~Value() {
  if (pass_) {
    pass_->values.erase(this);
  }
}

at::Tensor Value::tensor(bool* is_new) {
  at::Tensor result = find_or_compute(is_new);
  // Hooks that have no copy give back the tensor itself. What they give to its own saver is their business.
  if (outside && outside->memory && result.has_storage() &&
      outside->memory->_unsafe_get_target() == result.storage().unsafeGetStorageImpl()) {
    check_version(outside->version_given_back, &result);
  }
  return result;
}

at::Tensor Value::find_or_compute(bool* is_new) {
  if (held.defined()) {
    TORCH_CHECK(
        held.numel() == 0 || !held.has_storage() || held.storage().nbytes() > 0, "recompute: expected a tensor of shape ",
        held.sizes(), ", which a recipe reads, to be there, got one whose memory was freed");
    return compute();
  }
  if (given_) {
    if (at::Tensor again = given_->tensor(); again.defined() && !is_capturing(again.device())) {
      return again;
    }
  }
  if (readers < 2) {
    return compute_in_version(is_new);
  }
  const int task = torch::autograd::get_current_graph_task_id();
  if (task < 0) {
    return Computed::of(*this);
  }
  // Somebody's backward may have written to it.
  if (remembered_.defined() && remembered_stream_ == stream_number(remembered_) &&
      remembered_version_ == version_of(remembered_)) {
    return remembered_;
  }
  return remember(task, compute_in_version());
}

at::Tensor Value::remember(int task, at::Tensor tensor) {
  Pass*& running = passes()[task];
  if (!running) {
    const auto pass = std::make_shared<Pass>(task);
    running = pass.get();
    torch::autograd::Engine::get_default_engine().queue_callback([pass] { pass->forget(); });
  }
  if (pass_ && pass_ != running) {
    pass_->values.erase(this);
  }
  pass_ = running;
  pass_->values.insert(this);
  remembered_ = tensor;
  remembered_stream_ = stream_number(tensor);
  remembered_version_ = version_of(tensor);
  return tensor;
}

at::Tensor Value::compute_in_version(bool* is_new) {
  bool is_computed = false;
  at::Tensor result = compute(&is_computed);
  if (is_computed && version_of(result) != version) {
    torch::autograd::impl::set_version_counter(result, c10::VariableVersion(static_cast<uint32_t>(version)));
  }
  if (is_new) {
    *is_new = is_computed;
  }
  return result;
}

at::Tensor Value::compute(bool* is_new) {
  if (held.defined()) {
    check_unwritten();
    if (held.is_cuda() && stream_number(held) != stream) {
      held.record_stream(current_stream(held.device()));
    }
    return held;
  }
  if (outside) {
    const py::object result = fetch();
    const at::Tensor& tensor = THPVariable_Unpack(result.ptr());
    return has_strides ? in_strides(tensor, strides) : tensor;
  }
  return compute_recipe(is_new);
}

at::Tensor Value::compute_recipe(bool* is_new) {
  const auto wanted = strides_of();
  if (formula.is(formulas().same) && value_of(operands[0]).readers > 1) {
    const at::Tensor anothers = value_of(operands[0]).tensor();
    return wanted ? in_strides(anothers, *wanted) : anothers;
  }
  if (auto fused = compute_fused(*this)) {
    if (is_new) {
      *is_new = true;
    }
    return *std::move(fused);
  }
  const bool is_back = is_cast_back(*this);
  if (is_back || (!formula.is(formulas().cast) && half() != at::ScalarType::Undefined)) {
    const at::Tensor tensor = is_back ? in_half(value_of(operands[0])) : in_half(*this).to(at::kFloat);
    return wanted ? in_strides(tensor, *wanted) : tensor;
  }
  if (formula.is(formulas().as_strided)) {
    const at::Tensor base = value_of(operands[0]).tensor();
    return base.as_strided(sizes, strides, base.storage_offset() + PyLong_AsLongLong(arguments[0].ptr()));
  }
  if (formula.is(formulas().unpack_mask)) {
    return unpack_mask(value_of(operands[0]).tensor(), sizes, strides);
  }
  bool is_computed = false;
  at::Tensor tensor;
  if (formula.is(formulas().cast)) {
    const at::Tensor operand = value_of(operands[0]).tensor();
    tensor = operand.to(dtype);
    is_computed = !tensor.is_same(operand);
  } else {
    tensor = apply(&is_computed);
    if (tensor.scalar_type() != dtype) {  // the op was in place, and the other operand is wider: it rounded its result
      tensor = tensor.to(dtype);
      is_computed = true;
    }
  }
  const at::Tensor strided = wanted ? in_strides(tensor, *wanted) : tensor;
  if (is_new) {
    *is_new = (is_computed || !strided.is_same(tensor)) && strided.storage().use_count() == 1;
  }
  return strided;
}

at::ScalarType Value::half() {
  if (!is_recipe()) {  // yet
    return at::ScalarType::Undefined;
  }
  if (!half_) {
    half_ = half_of(*this);
  }
  return *half_;
}

py::object Value::fetch() {
  const TorchFunction function(TorchFunction::State::ENABLED);  // as autograd calls hooks
  const auto hooks = py::reinterpret_borrow<py::tuple>(outside->hooks);
  py::object result;
  outside->version_given_back = outside->version.current_version();  // before the hooks write to its memory, as some do
  try {
    result = hooks[1](outside->packed);
    if (Packing::current && THPVariable_Check(result.ptr())) {
      outside->packed = hooks[0](result);
    }
  } catch (py::error_already_set& error) {
    if (!Packing::current || !error.matches(PyExc_Exception)) {
      throw;
    }
    py::raise_from(
        error, from_python().nothing_yet.ptr(),
        "recompute: expected the hooks on saved tensors around the scope to give a tensor back, got an error");
    throw py::error_already_set();
  }
  TORCH_CHECK_TYPE(
      THPVariable_Check(result.ptr()), "recompute: expected a tensor of an unpack hook, got ", Py_TYPE(result.ptr())->tp_name);
  return result;
}

at::Tensor Value::apply(bool* is_new) {
  c10::SmallVector<py::object, 8> given;
  bool may_write = false;
  for (size_t i = 0; i < operands.size(); ++i) {
    if (!is_value(operands[i])) {
      given.push_back(operands[i]);
      continue;
    }
    bool is_its_own = false;
    at::Tensor operand = value_of(operands[i]).tensor(&is_its_own);
    const bool is_first = i == 0 && is_its_own && operand.sizes() == at::IntArrayRef(sizes);
    may_write = (is_first || may_write) && operand.scalar_type() == dtype;
    given.push_back(wrapped(operand));
  }
  const py::object& in_place = facts_of(formula).in_place;
  return call(may_write && in_place ? in_place.ptr() : formula.ptr(), given, arguments, is_new);
}

bool is_cast_back(const Value& value) {
  if (!is_half(value.dtype) || !value.is_recipe() || !value.formula.is(formulas().cast) || !is_value(value.operands[0])) {
    return false;
  }
  Value& wide = value_of(value.operands[0]);
  return wide.half() == value.dtype && !wide.must_be_computed_once();
}

at::Tensor in_half(Value& value) {
  return InHalf(value.half()).of(value);
}

}  // namespace fastact::recipes
