"""Which layers save which tensors for backward, found out by one forward pass on fake tensors: no GPU, no memory, about a
second.

A tensor that several layers save is saved once. So an activation's bits replace a tensor only if no other layer saves it;
otherwise they are pure overhead.
"""

import gc
import logging
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from inspect import signature, unwrap
from itertools import chain
from operator import is_
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from activations_cuda import _C, functional
from activations_cuda.replacements import FUNCTIONS, PYTORCHS_FUNCTIONS, functions, original_of, reaches, replace, set_class

log = logging.getLogger("activations_cuda")

FAKES_WONT_DO = DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException
FUNCTOOLS_CACHE = type(cache(len))


@dataclass(frozen=True)
class Decision:
    """Whether the calls of one activation function in one module are converted, and why.

    Attributes:
        module: the module's name in the model.
        kind: the name of its class.
        function: the function that it calls, by the name it has in this package.
        converted: whether its calls save bits.
        reason: why, in words.
    """

    module: str
    kind: str
    function: str
    converted: bool
    reason: str


@dataclass(eq=False)
class _Call:
    """One call of an activation function."""

    module: nn.Module
    function: str
    bits: int | None  # how many bytes of bits it would save if converted; None if the kernels don't take its arguments
    is_ours: bool  # this package's function was called
    saves: bool = False
    saves_output: bool = False  # beside the bits, if converted
    is_overwritten: bool = False  # its output, by somebody else later


@dataclass(eq=False)
class _Storage:
    """A tensor's memory and who saves it, in order: the module that is running, and the activation call if it is in one."""

    size: int
    savers: list[tuple[nn.Module, _Call | None]] = field(default_factory=list)
    outputs_of: list[_Call] = field(default_factory=list)  # those that would save it if converted


@contextmanager
def saved_storages(owner: Callable[[], Any], but: tuple[Tensor, ...] = ()) -> Iterator[dict[StorageWeakRef, _Storage]]:
    """Yields a dict that collects what autograd saves, but for some tensors, and what owner() returns each time."""
    left_out = {StorageWeakRef(tensor.untyped_storage()) for tensor in but}
    storages: dict[StorageWeakRef, _Storage] = {}

    def pack(tensor):
        key = StorageWeakRef(tensor.untyped_storage())
        if key not in left_out:
            storages.setdefault(key, _Storage(tensor.untyped_storage().nbytes())).savers.append(owner())
        return tensor.detach()  # an output itself would keep its own graph alive

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield storages


def _named(func):
    """The name of one of this package's ops, such as relu6_; an empty one for any other function."""
    return func._schema.name.removeprefix("fastact::") if getattr(func, "namespace", None) == "fastact" else ""


class _Watch(TorchFunctionMode):
    """Records every call of an activation function, PyTorch's or this package's, and runs PyTorch's."""

    def __init__(self, modules):
        super().__init__()
        self.modules = modules
        self.reaches = cache(reaches)
        self.outputs = []
        self.names = {}
        for name in FUNCTIONS.values():
            self.names |= dict.fromkeys(functions(frozenset([name])), name)
        self.calls = []
        self.call = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = _named(func)
        if name:
            pytorchs = PYTORCHS_FUNCTIONS.get((nn.functional, name.removesuffix("_")))
            if pytorchs is None or func._overloadname != "default" or not hasattr(torch.ops.aten, name):
                return _packed(func, name, args, kwargs)  # PyTorch has no such function
            func, kwargs = pytorchs, kwargs | ({"inplace": True} if name.endswith("_") else {})
        if _drops_in_place(func, kwargs):
            self._note_overwritten(args[0] if args else kwargs["input"])
        if func not in self.names or "out" in kwargs:
            return func(*args, **kwargs)
        function = self.names[func]
        self.call = _Call(self._caller(function, bool(name)), function, _bits(function, args, kwargs), is_ours=bool(name))
        self.calls.append(self.call)
        try:
            with torch._C.DisableTorchFunction():  # an outer ConvertMode would turn it back into ours
                output = func(*args, **kwargs)
        finally:
            self.call = None
        if _C.family[function].saves_output and isinstance(output, Tensor):
            self.outputs.append((self.calls[-1], output, output._version))
        return output

    def _note_overwritten(self, input):
        storage = StorageWeakRef(input.untyped_storage())
        for call, output, _ in self.outputs:
            if StorageWeakRef(output.untyped_storage()) == storage:
                call.is_overwritten = True

    def _caller(self, function, is_ours):
        """The module whose method calls: one that is called by its forward, past its hooks, too.

        A function of ours may have come to it from a module further out, whose conversion decides: that one counts.
        """
        frame, callers = sys._getframe(), []
        while frame := frame.f_back:
            code = frame.f_code
            first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            if isinstance(first, nn.Module) and first in self.modules and _is_method(code, type(first)):
                if not is_ours or self.reaches(first, frozenset([function])):
                    return first
                callers.append(first)
        return next(iter([*callers, *self.modules]))  # the model itself, in a thread of its own


def _drops_in_place(func, kwargs):
    """Whether it is a dropout in place, which writes to its input in training, though not in eval mode or with p=0."""
    name = getattr(func, "__name__", "")
    return "dropout" in name and (name.endswith("_") or kwargs.get("inplace", False))


def _is_method(code, kind):
    """Whether it is a method's code, and not a function's whose first argument happens to be a module."""
    method = unwrap(getattr(kind, code.co_name, None))
    return code.co_varnames[0] == "self" or getattr(method, "__code__", None) is code


def _bits(name, args, kwargs):
    """How many bytes of bits this package's function saves for such arguments, or None if it leaves them to PyTorch's op."""
    arguments = signature(getattr(functional, name)).bind(*args, **kwargs)
    arguments.apply_defaults()
    input, *parameters = (value for key, value in arguments.arguments.items() if key != "inplace" and value is not None)
    if not isinstance(input, FakeTensor) and type(input) not in (Tensor, nn.Parameter):
        return None
    if input.is_nested or input.layout is not torch.strided:
        return None
    op = getattr(torch.ops.fastact, _C.family[name].packed_op)
    try:
        _, bits = op(torch.empty_like(input, device="meta"), *parameters)
    except (NotImplementedError, ValueError):
        return None
    return bits.numel()


def _packed(func, name, args, kwargs):
    """Makes one of this package's ops save on fake tensors what it saves on real ones."""
    packet = getattr(torch.ops.fastact, name.removesuffix("_") + "_with_mask", None)
    if packet is not None:
        with suppress(NotImplementedError, ValueError):  # dtypes and parameters that are left to PyTorch's op
            output, _ = getattr(packet, func._overloadname)(*args, **kwargs)
            return args[0].copy_(output) if name.endswith("_") else output
    return func(*args, **kwargs)


def _unwrapped(model):
    """The model itself, without torch.compile's or a parallel wrapper around it."""
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    return model.module if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) else model


@dataclass(eq=False)
class _Container:
    """A dict, list, set or deque and what is in it."""

    values: Any
    kind: Any  # whose methods are called, not those of a subclass, which may do more

    def __post_init__(self):
        self.before = self.contents()

    def contents(self):
        """Keys and values in turn, if it is a dict."""
        if issubclass(self.kind, dict):
            return list(chain.from_iterable(self.kind.items(self.values)))
        return list(self.kind.__iter__(self.values))

    def fill(self, contents):
        now = self.contents()
        if len(now) == len(contents) and all(map(is_, now, contents)):
            return  # or another thread could find an empty one
        self.kind.clear(self.values)
        if issubclass(self.kind, dict):
            for key, value in zip(contents[::2], contents[1::2], strict=True):
                self.kind.__setitem__(self.values, key, value)
        elif issubclass(self.kind, set):
            self.kind.update(self.values, contents)
        else:
            self.kind.extend(self.values, contents)


# Objects of these modules are not looked into: nothing of the model is in them, or other threads change them meanwhile.
OPAQUE = (
    "activations_cuda.",
    "asyncio.",
    "concurrent.",
    "logging.",
    "multiprocessing.",
    "queue.",
    "threading.",
    "torch._",
    "torch.distributed.",
)


def _containers(*roots):
    """The containers among these values, among the attributes of plain objects there, and in each other."""
    seen: dict[int, Any] = {}
    found = []
    left = list(roots)
    while left:
        value = left.pop()
        kind = type(value)
        if id(value) in seen or issubclass(kind, (Tensor, type, ModuleType)):
            continue
        seen[id(value)] = value
        base = next((base for base in (OrderedDict, dict, list, set, deque) if issubclass(kind, base)), None)
        if base:
            found.append(_Container(value, base))
            left += found[-1].before
        elif issubclass(kind, tuple):
            left += value
        if not f"{kind.__module__}.".startswith(OPAQUE) and type(getattr(value, "__dict__", None)) is dict:
            left.append(vars(value))
    return found


def _attributes(model):
    """The attributes of a model's modules and of their classes."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    of_kinds = (vars(kind).values() for kind in kinds if not (kind.__module__ or "").startswith("torch."))
    return [*map(vars, model.modules()), *chain.from_iterable(of_kinds)]


@contextmanager
def _unchanged(model, inputs):
    """Restores the classes of the model's modules and what a forward pass may leave fake tensors in."""
    classes = {module: type(module) for module in model.modules()}
    held = _containers(inputs, *_attributes(model))
    try:
        yield
    finally:
        for module, kind in classes.items():
            if type(module) is not kind:
                set_class(module, kind)
        for each in held:
            each.fill(each.before)


def _hold_fakes(values, depth=4):
    """Whether there is a fake tensor among them, or in what they refer to."""
    values = [value for value in values if not issubclass(type(value), (type, ModuleType, FunctionType))]
    return FakeTensor in map(type, values) or (depth > 0 and bool(values) and _hold_fakes(gc.get_referents(*values), depth - 1))


@contextmanager
def _no_fake_cached():
    """Clears each cache of functools with fake tensors in it; transformers' DETR, BEiT and DINOv3 have such for positions."""
    try:
        yield
    finally:
        for each in gc.get_objects():
            if type(each) is FUNCTOOLS_CACHE and _hold_fakes(gc.get_referents(each)):
                each.cache_clear()


@contextmanager
def _randomness_unchanged(tensors):
    """Whatever random numbers a forward pass takes, Python's and numpy's among them."""
    state = random.getstate()
    of_numpy = sys.modules.get("numpy.random")
    numpys_state = of_numpy and of_numpy.get_state()
    devices = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(state)
            if of_numpy:
                of_numpy.set_state(numpys_state)


def _copy(tensor):
    new = tensor.detach().clone()
    if type(new) is Tensor:
        new.__class__ = type(tensor)  # Parameter, or a subclass of it
        vars(new).update(vars(tensor))
    elif isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, tensor.requires_grad)
    return new.requires_grad_(tensor.requires_grad)


def _uncompiled():
    """Parts of a model that torch.compile compiles run eagerly. Where Dynamo isn't imported, there are none."""
    has_stance = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
    return torch.compiler.set_stance("force_eager") if has_stance else nullcontext()


@contextmanager
def _running_module(model):
    """Yields a function that returns the module of `model` whose forward is running."""
    known = set(model.modules())
    running = [model]

    def enter(module, _):
        running.append(module if module in known else running[-1])

    def leave(module, *_):
        running.pop()

    with register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True):
        yield lambda: running[-1]


class Survey:
    """What a model's modules save for backward with PyTorch's activations, and with some of them converted.

    Args:
        model: the model; it is left as it is.
        args, kwargs: the arguments of its forward pass. Tensors may be on any device, meta included. If the pass depends on
            their values, it runs on copies of them, and of the parameters and buffers.
        names: the functions whose calls may be converted.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: frozenset[str]) -> None:
        model = _unwrapped(model)
        self.names = {module: name for name, module in model.named_modules()}
        with _unchanged(model, (args, kwargs)):
            self.candidates = {module for module in self.names if replace(module, names)}
            self._run(model, args, kwargs)
        self.considered = names
        self.chosen = self._choose()

    def _run(self, model, args, kwargs):
        state = dict(model.named_parameters()) | dict(model.named_buffers())
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        try:
            with (
                _unchanged(model, (args, kwargs)),
                _no_fake_cached(),
                torch.inference_mode(False),
                FakeTensorMode(allow_non_fake_inputs=True) as fake_mode,
            ):
                # A model on the meta device counts as one on the CPU, or on a GPU under CUDA's autocast: with meta tensors
                # autocast would change nothing, and attention, for example, would save more.
                default = torch.device("cuda" if torch.is_autocast_enabled() else "cpu")
                device = next((tensor.device for tensor in state.values() if not tensor.is_meta), default)

                @cache  # an input that is passed twice is one
                def fake_like(tensor):
                    place = device if tensor.is_meta else tensor.device
                    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=place)
                    return fake.requires_grad_(tensor.requires_grad)

                fakes = {name: fake_like(t) if t.is_meta else fake_mode.from_tensor(t) for name, t in state.items()}
                self._watch(model, fakes, *tree_map_only(Tensor, fake_like, (args, kwargs)))
        except Exception as error:
            if any(tensor.is_meta for tensor in (*state.values(), *inputs)):
                if not isinstance(error, FAKES_WONT_DO):
                    raise
                raise RuntimeError(
                    f"the model's forward pass depends on the values of its tensors ({error}): expected a model and example "
                    "inputs with values, got some on the meta device"
                ) from error
            with torch.inference_mode(False):
                copy = cache(_copy)
                copies = {name: _copy(tensor) for name, tensor in state.items()}
                inputs = tree_map_only(Tensor, copy, (args, kwargs))
                for each in _containers(inputs):  # in objects that are inputs
                    each.fill([copy(value) if isinstance(value, Tensor) else value for value in each.before])
                self._watch(model, copies, *inputs)

    def _watch(self, model, state, args, kwargs):
        """Runs the forward pass and records who saves what."""
        with ExitStack() as stack:
            stack.enter_context(_randomness_unchanged(state.values()))
            stack.enter_context(_uncompiled())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            running = stack.enter_context(_running_module(model))
            watch = _Watch(self.names)

            def owner():
                if watch.call is not None:
                    watch.call.saves = True
                return running(), watch.call

            saved = stack.enter_context(saved_storages(owner, but=tuple(state.values())))
            stack.enter_context(watch)
            stack.callback(watch.outputs.clear)  # their graphs hold `owner`, and so these
            output = torch.func.functional_call(model, state, args, kwargs)
            for call, tensor, version in watch.outputs:
                storage = tensor.untyped_storage()
                call.saves_output = True
                call.is_overwritten |= tensor._version != version
                saved.setdefault(StorageWeakRef(storage), _Storage(storage.nbytes())).outputs_of.append(call)
        del output  # until here it holds all that was counted
        self.storages = list(saved.values())
        self.calls = watch.calls

    def _unit(self, call):
        """All calls of one function in one module are converted together."""
        return (call.module, call.function) if call.is_ours and call.bits is not None else None

    def _choose(self):
        """The units whose conversion lowers what is saved: all, less those that gain nothing, until every one gains."""
        chosen = {unit for call in self.calls if (unit := self._unit(call))}
        as_it_comes = {unit for unit in chosen if unit[0] not in self.candidates}  # the model's own code calls ours
        chosen -= {self._unit(call) for call in self.calls if call.is_overwritten} - as_it_comes
        while without := {unit for unit, gain in self._gains(chosen).items() if gain <= 0} - as_it_comes:
            chosen -= without
        return chosen if self.saved(chosen).total() < self.saved(as_it_comes).total() else as_it_comes

    def _gains(self, chosen):
        """How many bytes less are saved because of each unit, given that all the others are converted too."""
        gains = dict.fromkeys(chosen, 0)
        for call in self.calls:
            if call.saves and self._unit(call) in chosen:
                gains[self._unit(call)] -= call.bits
        for storage in self.storages:
            is_saved = bool(self._savers(storage, chosen))
            calls = [*(call for _, call in storage.savers if call), *storage.outputs_of]
            for unit in {self._unit(call) for call in calls} & chosen:
                gains[unit] += storage.size * (bool(self._savers(storage, chosen - {unit})) - is_saved)
        return gains

    def _savers(self, storage, chosen):
        """The modules that save it once these units are converted."""
        unconverted = [module for module, call in storage.savers if call is None or self._unit(call) not in chosen]
        return unconverted + [call.module for call in storage.outputs_of if call.saves and self._unit(call) in chosen]

    def saved(self, chosen: Collection[tuple[nn.Module, str]]) -> Counter[nn.Module]:
        """The bytes that each module saves once these units are converted; a shared tensor counts for the first module."""
        saved: Counter[nn.Module] = Counter()
        for storage in self.storages:
            if savers := self._savers(storage, chosen):
                saved[savers[0]] += storage.size
        for call in self.calls:
            if call.saves and self._unit(call) in chosen:
                saved[call.module] += call.bits
        return saved

    def decisions(self) -> tuple[Decision, ...]:
        """One for each function that a module calls and for each module of the family, in the model's order."""
        calls: defaultdict[tuple[nn.Module, str], list[_Call]] = defaultdict(list)
        for call in self.calls:
            calls[call.module, call.function].append(call)
        gains = self._gains(self.chosen)
        result = []
        for module, name in self.names.items():
            original = original_of(type(module))
            functions = [function for owner, function in calls if owner is module]
            if not functions and original in FUNCTIONS and FUNCTIONS[original] in self.considered:
                functions = [FUNCTIONS[original]]
            for function in functions:
                unit = module, function
                reason = self._reason(unit, calls[unit], gains)
                result.append(Decision(name, original.__name__, function, unit in self.chosen, reason))
        return tuple(result)

    def _reason(self, unit, calls, gains):
        if unit in self.chosen:
            return f"saves {gains[unit] / 2**20:.1f} MiB less"
        if not calls:
            return "not called"
        if not any(call.saves for call in calls):
            return "saves nothing for backward"
        if unit[1] not in self.considered:
            return "not asked for"
        if not any(map(self._unit, calls)):
            return (
                "called where it can't be replaced"
                if not any(call.is_ours for call in calls)
                else "only PyTorch's op takes these arguments"
            )
        if any(call.is_overwritten for call in calls):
            return "its output is written to in place"
        if any(call.saves_output for call in calls):
            return "another layer saves its input, or no other layer saves its output"
        return "another layer saves the same tensor"


def summary(decisions: Iterable[Decision]) -> list[str]:
    """The decisions in words, one line for those that are alike."""
    groups: Counter[tuple[bool, str, str, str]] = Counter()
    for decision in decisions:
        reason = "" if decision.converted else decision.reason
        groups[not decision.converted, decision.kind, decision.function, reason] += 1
    lines = []
    for (left_alone, kind, function, reason), count in sorted(groups.items()):
        what = f"{count} {kind}" + (f" ({function})" if kind.lower() != function.replace("_", "") else "")
        lines.append(f"{what} left alone: {reason}" if left_alone else f"{what} converted")
    return lines or ["no activation of the family"]
