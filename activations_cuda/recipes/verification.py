"""Trust but verify: a recipe is used where it has once given what PyTorch's ops gave, all of it, to the bit.

Which formula an op has depends on device, dtype, layout and sizes. So each of these *configurations* is tried at its first use.
The tensor at hand would prove little of a normalization: with a weight of one and a bias of zero, as all have them at first,
many formulas agree, and half types hide most differences. So its formula is chosen by trials with other numbers. And a tensor
of zeros, as behind a gate that begins closed, proves nothing, nor does a norm's if all of it is the bias: what gave it is
compared again at its next use.
"""

import logging
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from activations_cuda import _C
from activations_cuda.recipes.step import NothingYet

log = logging.getLogger("activations_cuda")

Formula = Callable[..., Tensor]

ELEMENTS_TRIED = 2**22  # of each formula, at least, but in no more than MAX_TRIALS
MAX_TRIALS = 64
# While several formulas are left: few elements of a small tensor in a half type show a difference.
MAX_ELEMENTS_TRIED = 2**24
MAX_TRIALS_TO_DECIDE = 1024
ELEMENTS_COMPARED = 2**24  # at once
# Comparisons that prove nothing, each of which waits for the device, before the tensor is saved instead, or a norm's trials are
# taken for proof.
MAX_UNPROVEN = 1000


@dataclass(eq=False)
class Candidates:
    """Formulas of a normalization's output, given (input, weight, bias, *statistics, *arguments), the cheapest first.

    Attributes:
        formulas: one of which is to fit.
        op: PyTorch's own, given (input, weight, bias, statistics, *arguments); returns the output and its own statistics. Of
            those given it reads only the dtypes.
        closest: of (input, *statistics), the normalized element closest to 0 for each of the weight, in float64.
        on_cpu: the formulas there, if they are others. In small tensors of a half type several may agree but for infinities.
    """

    formulas: tuple[Formula, ...]
    op: Callable[..., tuple[Tensor, ...]]
    closest: Callable[..., Tensor]
    on_cpu: tuple[Formula, ...] | None = None

    def __call__(self, input: Tensor, weight: Tensor | None, bias: Tensor | None, *others: Any) -> Tensor:
        """The output by PyTorch's own op, for dry runs, which choose no formula."""
        statistics, arguments = _split(others)
        return self.op(input, weight, bias, statistics, *arguments)[0]

    def choose(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None, *others: Any
    ) -> tuple[Formula, bool] | tuple[None, None]:
        """The formula that fits, and whether this package's kernel is to compute it, which is tried first."""
        statistics, arguments = _split(others)
        for fuses in (True, False):  # the kernel is faster, and needs no temporaries
            formula = self._choose(input, weight, bias, statistics, arguments, fuses)
            if formula is not None:
                return formula, fuses
        return None, None

    def _choose(self, input, weight, bias, statistics, arguments, fuses):
        """The first formula that fits in every trial."""
        generator = torch.Generator(input.device).manual_seed(0)
        memory, input = _memory_like(input)
        _draw(memory, generator)
        formulas = list(self.on_cpu if self.on_cpu and input.is_cpu else self.formulas)
        size = max(1, input.numel())
        enough = max(4, min(MAX_TRIALS, ELEMENTS_TRIED // size))
        product: Any = None
        if bias is not None:
            _, *found = self.op(input, weight, bias, statistics, *arguments)
            product = self.closest(input, *found[: len(statistics)], *arguments)
            _, bias = _memory_like(bias)
        if weight is not None:
            _, weight = _memory_like(weight)
        for trial in range(max(enough, min(MAX_TRIALS_TO_DECIDE, MAX_ELEMENTS_TRIED // size))):
            # PyTorch's own op, which fits, has no program.
            if not formulas or (trial >= enough and (len(formulas) < 2 or not fuses)):
                break
            if bias is None and trial > 0:  # which could cancel the product, so the input must show what differs
                _draw(memory, generator, trial)
            if weight is not None:
                weight.normal_(generator=generator)
            if bias is not None:
                # Where summands cancel out, or are next to nothing, their rounding is what is left: half types show it too.
                if trial % 2:
                    bias.normal_(std=2.0 ** -(trial % 24), generator=generator)
                else:
                    bias.copy_((product if weight is None else product * weight).neg())
            output, *found = self.op(input, weight, bias, statistics, *arguments)
            operands = input, weight, bias, *found[: len(statistics)]
            formulas = [formula for formula in formulas if _fits(formula, fuses, operands, arguments, output)]
            del output  # before the next trial allocates its own
        return formulas[0] if formulas else None


def _split(others):
    """Statistics, which are tensors, and arguments."""
    count = sum(isinstance(each, Tensor) for each in others)
    return others[:count], others[count:]


def _draw(memory, generator, trial=0):
    """Numbers around 1, since of centered ones some formulas would make the same; from trial to trial closer to it, or zeros of
    both signs."""
    memory.normal_(mean=1.0, std=2.0 ** -(trial % 8), generator=generator)
    if trial % 8 == 3:  # within the fewest trials that there are
        memory.sub_(1.0).sign_().mul_(0.0)


def _memory_like(tensor):
    """Memory that is as aligned, and a tensor in it that has the same strides."""
    offset = tensor.storage_offset() % 16
    size = 1 + offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.new_empty(max(0, size))
    return memory, memory.as_strided(tensor.shape, tensor.stride(), offset)


def _tells(tensor):
    """Whether a comparison with it proves a formula: of zeros, or of NaN, many give the same."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    if tensor.element_size() == 1:
        tensor = tensor.float()
    least, most = tensor.aminmax()
    if not (most - least).isfinite():
        least, most = tensor.nan_to_num(0.0, 0.0, 0.0).aminmax()
    return bool(least != most) if tensor.numel() > 1 else bool(least != 0)


def _computed(formula, fuses, operands, arguments, like):
    """By the formula itself or by this package's kernel, which may have no program for it: then None."""
    if not fuses:
        return formula(*operands, *arguments)
    return _C.recipes.fused(_C.recipes.recipe(like, formula, tuple(operands), arguments))


def _fits(formula, fuses, operands, arguments, output):
    try:
        found = _computed(formula, fuses, operands, arguments, output)
        return found is not None and is_identical(found, output)
    except RuntimeError as error:  # an op that isn't for this device or dtype
        if _says_nothing_of_formula(error) or is_of_handler(error):
            raise
        log.debug("recompute: %s: %s", formula.__name__, error)
        return False


def _says_nothing_of_formula(error: RuntimeError) -> bool:
    """Whether stack ran out, or memory, for which the CPU has no class of error: that says nothing of the formula."""
    return isinstance(error, (torch.OutOfMemoryError, RecursionError)) or "alloc" in str(error).lower()


def is_of_handler(error: BaseException) -> bool:
    """Whether a signal's handler has raised it: one runs in the midst of whatever Python code the main thread is running."""
    handlers = [handler for handler in map(signal.getsignal, signal.valid_signals()) if callable(handler)]
    functions = (getattr(handler, "func", handler) for handler in handlers)  # of a partial
    codes = {getattr(function, "__code__", getattr(type(function).__call__, "__code__", None)) for function in functions}
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in codes:
        trace = trace.tb_next
    return trace is not None


def is_identical(a: Tensor, b: Tensor) -> bool:
    """To the bit: signs of zeros count. A NaN is a NaN: of their payloads PyTorch's own ops preserve some."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.is_floating_point():
        return torch.equal(a, b)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    # In parts, whose masks are memory in the first step, when it may be short.
    a, b = torch.atleast_1d(a), torch.atleast_1d(b)
    dim = max(range(a.dim()), key=a.size)
    length = max(1, ELEMENTS_COMPARED * a.size(dim) // max(1, a.numel()))
    for x, y in zip(a.split(length, dim), b.split(length, dim), strict=True):
        same = x.view(integer), y.view(integer)
        if not (torch.equal(*same) or ((same[0] == same[1]) | (x.isnan() & y.isnan())).all()):
            return False
    return True


# By configuration, until a comparison proves something.
_unproven: Counter[int] = Counter()
_chosen_by_trials: dict[int, tuple[Formula, bool] | tuple[None, None]] = {}


class _Verified(threading.local):
    """How many recipes this thread has verified since it was last reported, and in how many seconds."""

    count = 0
    seconds = 0.0


_verified = _Verified()


def report() -> None:
    """Log what first uses have cost, if there were any."""
    if _verified.count:
        log.info("recompute: verified %d recipes at their first use, in %.1f s", _verified.count, _verified.seconds)
        _verified.count, _verified.seconds = 0, 0.0


def verify(recipe: Any, untried: Sequence[tuple[Any, Formula | Candidates]], tensor: Tensor) -> bool:
    """Choose formulas for the recipes that haven't been tried, of which `recipe` is the last, and compare with its tensor."""
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return False  # comparing waits for the device
    start, firsts = time.perf_counter(), sum(each.configuration_id not in _unproven for each, _ in untried)
    try:
        with _C.recipes.Computing():
            return _verify(recipe, untried, tensor)
    except NothingYet:
        return False  # the hooks around the scope may have it at its next use
    except RuntimeError as error:  # a formula that isn't for this device or dtype
        if is_of_handler(error):
            raise
        if _says_nothing_of_formula(error):
            return False  # there may be room at its next use
        log.debug("recompute: %s: %s", recipe.source, error)
        return _refuse(recipe, tensor)
    finally:
        _verified.count += firsts
        _verified.seconds += time.perf_counter() - start


def _verify(recipe, untried, tensor):
    for each, formula in untried:
        if isinstance(formula, Candidates):
            found = _chosen_by_trials.get(each.configuration_id)
            if found is None:
                found = _chosen_by_trials[each.configuration_id] = formula.choose(*_tensors(each.operands), *each.arguments)
            each.formula, each.fuses = found
            if each.formula is None:
                return _refuse(each, tensor)
    if not is_identical(recipe.compute(), tensor):
        for each, _ in untried:
            each.fuses = False
        if not is_identical(recipe.compute(), tensor):
            return _refuse(recipe, tensor)
    norms = [each for each, formula in untried if isinstance(formula, Candidates)]
    is_proof = _tells(tensor) and all(map(_is_more_than_bias, norms))
    for each, formula in untried:
        _unproven[each.configuration_id] += 1
        is_overdue = _unproven[each.configuration_id] > MAX_UNPROVEN
        if is_proof or (is_overdue and isinstance(formula, Candidates)):
            _settle(each, each.formula, each.fuses)
        elif is_overdue:
            return _refuse(each, tensor)
    return True


def _tensors(operands):
    """A generator, so that what is computed here is freed before its recipe is."""
    return (each.tensor() if isinstance(each, _C.recipes.Value) else each for each in operands)


def _is_more_than_bias(norm):
    """Whether a norm's output depends on its formula: with a weight of 0, or an input that is its own mean, it doesn't."""
    input, weight, *others = _tensors(norm.operands)
    output = norm.compute()
    if weight is None:
        return _tells(output)
    operands = input, torch.zeros_like(weight), *others
    bias = _computed(norm.formula, norm.fuses, operands, norm.arguments, output)
    return bias is None or not torch.equal(output, bias)


def _settle(recipe, formula, fuses=False):
    _unproven.pop(recipe.configuration_id, None)
    _chosen_by_trials.pop(recipe.configuration_id, None)
    _C.recipes.choose(recipe.configuration_id, formula, fuses)


def forget_choices() -> None:
    """As if no recipe had been verified, for tests."""
    _unproven.clear()
    _chosen_by_trials.clear()
    _C.recipes.forget_choices()


def _refuse(recipe, tensor):
    log.debug("recompute: %s: no formula fits, shape %s, %s: saved", recipe.source, list(tensor.shape), tensor.dtype)
    _settle(recipe, None)
    return False
