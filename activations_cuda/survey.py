"""Which layers save which tensors for backward, found out by one forward pass of a copy on fake tensors: no GPU, no memory,
about a second.

A tensor that several layers save is saved once. So an activation's bits replace a tensor only if no other layer saves it;
otherwise they are pure overhead.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from inspect import signature, unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from activations_cuda import _C, functional
from activations_cuda.arguments import unwrapped
from activations_cuda.dry_run import (
    call_on_fakes,
    name_of_ours,
    overload_and_arguments,
    own_storages,
    run_copy,
    running_module,
    saved_tensors,
    storages_of,
)
from activations_cuda.replacements import (
    CHECKPOINT,
    FUNCTIONS,
    MODULE_CALL,
    ORIGINAL_FUNCTIONS,
    callers,
    calls_its_class,
    has_fast_path,
    is_patched,
    original_of,
    replacements_of,
)

log = logging.getLogger("activations_cuda")


@dataclass(frozen=True)
class Decision:
    """Whether the calls of one activation function in one module are converted, and why.

    Attributes:
        module: the module's name in the model.
        kind: the name of its class.
        function: the function that it calls, by the name it has in this package.
        converted: whether its calls are this package's.
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
    packed: int | None  # the bytes of its bits or code if converted; None if the kernels don't take its arguments
    dtype: torch.dtype  # of its input
    convertible: bool  # where conversion reaches it
    is_ours: bool  # the model's own code calls this package's function
    saves: bool = False
    saves_output: bool = False  # beside the code, if converted
    is_overwritten: bool = False  # its output, by somebody else later


@dataclass(eq=False)
class _Storage:
    """A tensor's memory and who saves it, in order: the module that is running, and the activation call if it is in one."""

    size: int
    savers: list[tuple[nn.Module, _Call | None]] = field(default_factory=list)
    outputs_of: list[_Call] = field(default_factory=list)  # those that would save it if converted


class _Watch(TorchFunctionMode):
    """Records every call of an activation function, PyTorch's or this package's, and runs PyTorch's."""

    def __init__(self, running, calls_from_forward):
        super().__init__()
        self.running, self.calls_from_forward = running, calls_from_forward
        self.outputs = []
        self.names = {function: name for name in FUNCTIONS.values() for function in replacements_of(frozenset([name]))}
        self.calls = []
        self.call = None
        self.can_convert = {}  # by a module's identity

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = name_of_ours(func)
        if name:
            original = ORIGINAL_FUNCTIONS.get((nn.functional, name.removesuffix("_")))
            overload, given = overload_and_arguments(func, args, kwargs)
            if original is None or overload != "default" or not hasattr(torch.ops.aten, name):
                output = call_on_fakes(name, overload, given)  # PyTorch has no such function
                return given["self"].copy_(output) if name.endswith("_") else output
            inplace = {"inplace": True} if name.endswith("_") else {}
            func, args, kwargs = original, (given.pop("self"),), given | inplace
        input = args[0] if args else kwargs.get("input")
        if not isinstance(input, Tensor):  # but an object with a rule of its own, or what PyTorch refuses
            return func(*args, **kwargs)
        if _drops_in_place(func, kwargs):
            self._note_overwritten(input)
        if func not in self.names or "out" in kwargs:
            return func(*args, **kwargs)
        call = self.call = self._new_call(self.names[func], args, kwargs, is_ours=bool(name))
        self.calls.append(call)
        try:
            with torch._C.DisableTorchFunction():  # an outer ConvertMode would turn it back into ours
                output = func(*args, **kwargs)
        finally:
            self.call = None
        if call.packed is not None and _C.family[call.function].saves_output:
            self.outputs.append((call, output.detach(), _version(output)))  # whose graph may be freed
        return output

    def _new_call(self, function, args, kwargs, is_ours):
        packed = _packed_bytes(function, args, kwargs)
        module = self.running()
        if not is_ours:
            function = FUNCTIONS.get(original_of(type(module)), function)  # ReLU6 calls hardtanh
        if id(module) not in self.can_convert:
            self.can_convert[id(module)] = can_convert(module)
        convertible = is_ours or (self.can_convert[id(module)] and self.calls_from_forward(module))
        input = args[0] if args else kwargs["input"]
        return _Call(module, function, packed, input.dtype, convertible, is_ours)

    def _note_overwritten(self, input):
        storages = set(map(StorageWeakRef, storages_of(input)))
        for call, output, _ in self.outputs:
            call.is_overwritten |= StorageWeakRef(output.untyped_storage()) in storages


def _version(tensor):
    return None if tensor.is_inference() else tensor._version


def _drops_in_place(func, kwargs):
    """Whether it is a dropout in place, which writes to its input in training, though not in eval mode or with p=0."""
    name = getattr(func, "__name__", "")
    return "dropout" in name and (name.endswith("_") or kwargs.get("inplace", False))


def calls_from_forward(module: nn.Module) -> bool:
    """Whether it is its forward that calls here, not a hook of it, a module that it doesn't register, or a checkpoint."""
    forward = getattr(unwrap(type(module).forward), "__code__", None)
    frame = next(callers(forward, MODULE_CALL, CHECKPOINT), None)
    if frame is None or frame.f_code is not forward:
        return False
    frame = next(callers(MODULE_CALL, CHECKPOINT), None)
    return frame is not None and frame.f_code is MODULE_CALL and frame.f_locals["self"] is module


def _takes_fast_path(module):
    return has_fast_path(module) and not any(parameter.requires_grad for parameter in nn.Module.parameters(module))


def can_convert(module: nn.Module) -> bool:
    """Whether another class for the module changes what it computes with, and nothing else."""
    original = original_of(type(module))
    if original in FUNCTIONS:
        return not is_patched(FUNCTIONS[original]) and calls_its_class(module)
    if has_fast_path(module) or any(map(_takes_fast_path, nn.Module.modules(module))):
        return False
    return calls_its_class(module) and not isinstance(module, torch.fx.GraphModule)  # whose class is made from its graph


def _packed_bytes(name, args, kwargs):
    """The bytes of the bits or code that this package's function saves for such arguments, or None where it falls back to
    PyTorch's op.
    """
    arguments = signature(getattr(functional, name)).bind(*args, **kwargs)
    arguments.apply_defaults()
    input, *parameters = (value for key, value in arguments.arguments.items() if key != "inplace" and value is not None)
    if not isinstance(input, FakeTensor) and type(input) not in (Tensor, nn.Parameter):
        return None
    if input.is_nested or input.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(input):
        return None
    op = getattr(torch.ops.fastact, _C.family[name].packed_op)
    try:
        _, packed = op(torch.empty_like(input, device="meta"), *parameters)
    except (NotImplementedError, ValueError):
        return None
    return packed.numel()


class Survey:
    """What a model's modules save for backward with PyTorch's activations, and with some of them converted.

    Args:
        model: the model; it is left as it is.
        args, kwargs: the arguments of its forward pass. Tensors may be on any device, meta included. If the pass depends on
            their values, it runs on copies of them, and of the parameters and buffers.
        functions: those whose calls may be converted.
        recompute: whether the pass is to run within a scope of recompute(). There smooth activations save what PyTorch's do.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        functions: frozenset[str],
        recompute: bool = False,
    ) -> None:
        model = unwrapped(model)
        self.names = {module: name for name, module in nn.Module.named_modules(model)}
        self.considered = functions
        run_copy(model, args, kwargs, self._watch)
        self.decide(recompute)

    def decide(self, recompute: bool) -> None:
        """Choose what is converted, within a scope of recompute() or not."""
        self.recomputes = recompute
        units = {unit for call in self.calls if (unit := self._unit(call))}
        self.recomputed = {unit for unit in units if recompute and _C.family[unit[1]].saves_output}
        self.chosen = self._choose(units - self.recomputed)
        self.converted = self.chosen | self.recomputed

    def _watch(self, copier, model, args, kwargs):
        """Runs a copy's forward pass and records who saves what."""
        running = running_module(copier, self.names)
        watch = _Watch(running, lambda module: calls_from_forward(copier(module)))

        with saved_tensors(lambda: (running(), watch.call)) as saved, watch:
            output = model(*args, **kwargs)
        storages: dict[StorageWeakRef, _Storage] = {}
        own = own_storages(model)
        for tensor, (module, call) in saved():
            if call is not None:
                call.saves = True
            for storage in storages_of(tensor):
                if (key := StorageWeakRef(storage)) not in own:
                    storages.setdefault(key, _Storage(storage.nbytes())).savers.append((module, call))
        for call, tensor, version in watch.outputs:
            call.saves_output = True
            call.is_overwritten |= _version(tensor) != version
            dense = torch.empty_like(tensor, device="meta")
            # A copy is saved of what isn't dense, as some views in place.
            tensor = tensor if tensor.stride() == dense.stride() else dense
            storage = tensor.untyped_storage()
            storages.setdefault(StorageWeakRef(storage), _Storage(storage.nbytes())).outputs_of.append(call)
        del output  # until here it holds all that is counted
        copier.copies.clear()
        self.storages = list(storages.values())
        self.calls = watch.calls

    def _unit(self, call):
        """All calls of one function in one module are converted together."""
        is_meant = call.is_ours or (call.convertible and call.function in self.considered)
        # In a scope a smooth activation needs no code, and so no half type.
        is_recorded = self.recomputes and call.dtype is torch.float32 and _C.family[call.function].saves_output
        return (call.module, call.function) if is_meant and (is_recorded or call.packed is not None) else None

    def _choose(self, chosen):
        """The units whose conversion lowers what is saved: all, less those that gain nothing, until every one gains."""
        own = {self._unit(call) for call in self.calls if call.is_ours} & chosen
        chosen -= {self._unit(call) for call in self.calls if call.is_overwritten} - own
        while without := {unit for unit, gain in self._gains(chosen).items() if gain <= 0} - own:
            chosen -= without
        return chosen if self.saved(chosen).total() < self.saved(own).total() else own

    def converts(self) -> dict[nn.Module, frozenset[str]]:
        """The functions of PyTorch's that each module is to have replaced."""
        functions = defaultdict(set)
        for call in self.calls:
            if not call.is_ours and self._unit(call) in self.converted:
                functions[call.module].add(call.function)
        return {module: frozenset(each) for module, each in functions.items()}

    def _gains(self, chosen):
        """How many bytes less are saved because of each unit, given that all the others are converted too."""
        gains = dict.fromkeys(chosen, 0)
        for call in self.calls:
            if call.saves and self._unit(call) in chosen:
                gains[self._unit(call)] -= call.packed
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
                saved[call.module] += call.packed
        return saved

    def decisions(self) -> tuple[Decision, ...]:
        """One for each function that a module calls and for each module of the family, in the model's order."""
        calls: defaultdict[nn.Module, defaultdict[str, list[_Call]]] = defaultdict(lambda: defaultdict(list))
        for call in self.calls:
            calls[call.module][call.function].append(call)
        gains = self._gains(self.chosen)
        result = []
        for module, name in self.names.items():
            original = original_of(type(module))
            functions = list(calls[module])
            if not functions and original in FUNCTIONS and FUNCTIONS[original] in self.considered:
                functions = [FUNCTIONS[original]]
            for function in functions:
                unit = module, function
                reason = self._reason(unit, calls[module][function], gains)
                result.append(Decision(name, original.__name__, function, unit in self.converted, reason))
        return tuple(result)

    def _reason(self, unit, calls, gains):
        if unit in self.chosen:
            gain = gains[unit]
            return f"saves {gain / 2**20:.1f} MiB less" if gain >= 2**20 else f"saves {gain / 2**10:.1f} KiB less"
        if unit in self.recomputed:
            return "its output is recomputed"
        if not calls:
            return "not called"
        if not any(call.saves for call in calls):
            return "saves nothing for backward"
        if unit[1] not in self.considered:
            return "not asked for"
        if not any(call.convertible for call in calls):
            return "called where it can't be replaced"
        if not any(map(self._unit, calls)):
            if _C.family[unit[1]].saves_output and not any(call.dtype.itemsize == 2 for call in calls):
                under_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
                why = "it gets another dtype here" if under_autocast else "call convert under the torch.autocast you train with"
                return f"saves less in bfloat16 and float16 only: {why}"
            return "only PyTorch's op takes these arguments"
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
    return lines or ["no activation is called"]
