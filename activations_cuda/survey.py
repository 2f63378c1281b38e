"""Which layers save which tensors for backward, found out by one forward pass of a copy on fake tensors: no GPU, no memory,
about a second.

A tensor that several layers save is saved once. So an activation's bits replace a tensor only if no other layer saves it;
otherwise they are pure overhead.
"""

import logging
import random
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from inspect import signature, unwrap
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
from torch.overrides import TorchFunctionMode

from activations_cuda import _C, functional
from activations_cuda.copies import ATOMIC, Copier, unwrapped
from activations_cuda.replacements import (
    CHECKPOINT,
    FUNCTIONS,
    MODULE_CALL,
    ORIGINAL_FUNCTIONS,
    caller,
    calls_its_class,
    functions,
    is_patched,
    original_of,
)

log = logging.getLogger("activations_cuda")

FAKES_WONT_DO = DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException


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
    dtype: torch.dtype  # of its input
    convertible: bool  # where conversion reaches it
    is_ours: bool  # the model's own code calls this package's function
    saves: bool = False
    saves_output: bool = False  # beside the bits, if converted
    is_overwritten: bool = False  # its output, by somebody else later


@dataclass(eq=False)
class _Storage:
    """A tensor's memory and who saves it, in order: the module that is running, and the activation call if it is in one."""

    size: int
    savers: list[tuple[nn.Module, _Call | None]] = field(default_factory=list)
    outputs_of: list[_Call] = field(default_factory=list)  # those that would save it if converted


def storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """What a tensor's elements lie in; several for a sparse or a nested one."""
    if tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    elif hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    else:
        return [tensor.untyped_storage()]
    return [storage for part in parts for storage in storages_of(part.detach())]


@contextmanager
def saved_tensors(owner: Callable[[], Any]) -> Iterator[Callable[[], Iterator[tuple[Tensor, Any]]]]:
    """Yields a function that gives what autograd has saved and still holds, each with what owner() returned then."""
    saved = []

    def pack(tensor):
        tensor = tensor.detach()  # because an output keeps its own graph alive
        saved.append((weakref.ref(tensor), owner()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: ((tensor, owner) for reference, owner in saved if (tensor := reference()) is not None)


def name_of_ours(func: Any) -> str:
    """The name of one of this package's ops, such as relu6_; an empty one for any other function."""
    return func._schema.name.removeprefix("fastact::") if getattr(func, "namespace", None) == "fastact" else ""


def call_on_fakes(func: Any, args: Any, kwargs: Any) -> Any:
    """One of this package's ops, out of place, such that it saves of fake tensors what it saves of real ones."""
    name = name_of_ours(func).removesuffix("_")
    with_mask = getattr(torch.ops.fastact, name + "_with_mask", None)
    if with_mask is not None:
        with suppress(NotImplementedError, ValueError):  # dtypes and parameters that are left to PyTorch's op
            return getattr(with_mask, func._overloadname)(*args, **kwargs)[0]
    return getattr(getattr(torch.ops.fastact, name), func._overloadname)(*args, **kwargs)


class _Watch(TorchFunctionMode):
    """Records every call of an activation function, PyTorch's or this package's, and runs PyTorch's."""

    def __init__(self, running, calls_from_forward):
        super().__init__()
        self.running, self.calls_from_forward = running, calls_from_forward
        self.outputs = []
        self.names = {}
        for name in FUNCTIONS.values():
            self.names |= dict.fromkeys(functions(frozenset([name])), name)
        self.calls = []
        self.call = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = name_of_ours(func)
        if name:
            original = ORIGINAL_FUNCTIONS.get((nn.functional, name.removesuffix("_")))
            if original is None or func._overloadname != "default" or not hasattr(torch.ops.aten, name):
                output = call_on_fakes(func, args, kwargs)  # PyTorch has no such function
                return args[0].copy_(output) if name.endswith("_") else output
            func, kwargs = original, kwargs | ({"inplace": True} if name.endswith("_") else {})
        if _drops_in_place(func, kwargs):
            self._note_overwritten(args[0] if args else kwargs["input"])
        if func not in self.names or "out" in kwargs:
            return func(*args, **kwargs)
        self.call = self._new_call(self.names[func], args, kwargs, is_ours=bool(name))
        self.calls.append(self.call)
        try:
            with torch._C.DisableTorchFunction():  # an outer ConvertMode would turn it back into ours
                output = func(*args, **kwargs)
        finally:
            self.call = None
        if _C.family[self.calls[-1].function].saves_output and isinstance(output, Tensor):
            self.outputs.append((self.calls[-1], output.detach(), output._version))  # whose graph may be freed
        return output

    def _new_call(self, function, args, kwargs, is_ours):
        bits = _bits(function, args, kwargs)
        module = self.running()
        if not is_ours:
            function = FUNCTIONS.get(original_of(type(module)), function)  # ReLU6 calls hardtanh
        convertible = is_ours or (can_convert(module) and self.calls_from_forward(module))
        input = args[0] if args else kwargs["input"]
        return _Call(module, function, bits, input.dtype, convertible, is_ours)

    def _note_overwritten(self, input):
        storage = StorageWeakRef(input.untyped_storage())
        for call, output, _ in self.outputs:
            if StorageWeakRef(output.untyped_storage()) == storage:
                call.is_overwritten = True


def _drops_in_place(func, kwargs):
    """Whether it is a dropout in place, which writes to its input in training, though not in eval mode or with p=0."""
    name = getattr(func, "__name__", "")
    return "dropout" in name and (name.endswith("_") or kwargs.get("inplace", False))


def calls_from_forward(module: nn.Module) -> bool:
    """Whether it is its forward that calls here, not a hook of it, a module that it doesn't register, or a checkpoint."""
    forward = getattr(unwrap(type(module).forward), "__code__", None)
    frame = caller(forward, MODULE_CALL, CHECKPOINT)
    if frame is None or frame.f_code is not forward:
        return False
    frame = caller(MODULE_CALL, CHECKPOINT)
    return frame is not None and frame.f_code is MODULE_CALL and frame.f_locals["self"] is module


def can_convert(module: nn.Module) -> bool:
    """Whether another class for the module changes what it computes with."""
    original = original_of(type(module))
    if original in FUNCTIONS and is_patched(FUNCTIONS[original]):
        return False
    return calls_its_class(module) and not isinstance(module, torch.fx.GraphModule)  # whose class is made from its graph


def _bits(name, args, kwargs):
    """How many bytes of bits this package's function saves for such arguments, or None if it leaves them to PyTorch's op."""
    arguments = signature(getattr(functional, name)).bind(*args, **kwargs)
    arguments.apply_defaults()
    input, *parameters = (value for key, value in arguments.arguments.items() if key != "inplace" and value is not None)
    if not isinstance(input, FakeTensor) and type(input) not in (Tensor, nn.Parameter):
        return None
    if input.is_nested or input.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(input):
        return None
    op = getattr(torch.ops.fastact, _C.family[name].packed_op)
    try:
        _, bits = op(torch.empty_like(input, device="meta"), *parameters)
    except (NotImplementedError, ValueError):
        return None
    return bits.numel()


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


def _clone(tensor):
    new = tensor.detach().clone()
    if type(new) is Tensor:
        new.__class__ = type(tensor)  # Parameter, or a subclass of it
        vars(new).update(vars(tensor))
    elif isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, tensor.requires_grad)
    return _with_gradient(new, tensor)


def _with_gradient(new, tensor):
    """As a leaf, or as the result of an op, which may be written to in place."""
    new.requires_grad_(tensor.requires_grad)
    if tensor.is_leaf:
        return new
    with torch.enable_grad():
        return new.clone()


def _uncompiled():
    """Parts of a model that torch.compile compiles run eagerly. Where Dynamo isn't imported, there are none."""
    has_stance = "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance")
    return torch.compiler.set_stance("force_eager") if has_stance else nullcontext()


def _fakes(device):
    """A function that makes fake tensors like others, and the mode that they belong to."""
    # The mode isn't entered, so what a model creates, such as positions, is real: it may stay in a cache.
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor):
        if tensor.layout is not torch.strided or tensor.is_nested:
            return tensor
        place = device if tensor.is_meta else tensor.device
        with mode:
            # A DTensor's size is that of the whole: what is sharded is surveyed as it would be on one device.
            new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=place)
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, tensor.requires_grad)
        new = _with_gradient(new, tensor)
        vars(new).update((name, value) for name, value in vars(tensor).items() if type(value) in ATOMIC)
        return new

    return fake, mode


@contextmanager
def _without_reports_of_fakes():
    """PyTorch logs the traceback of what can't be done with fake tensors, after which real ones are tried."""

    def mute(record):
        return threading.get_ident() != thread

    thread, logger = threading.get_ident(), logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(mute)
    try:
        yield
    finally:
        logger.removeFilter(mute)


def _run(run, copier, model, args, kwargs):
    with _randomness_unchanged([*model.parameters(), *model.buffers()]), _uncompiled(), torch.enable_grad():
        run(copier, model, args, kwargs)


def run_copy(model: nn.Module, args: Any, kwargs: Any, run: Callable[..., None]) -> None:
    """Call run(copier, model, args, kwargs) with copies on fake tensors or, if the model depends on values, on real ones."""
    state = [*model.parameters(), *model.buffers()]
    # A model on the meta device counts as one on the CPU, or on a GPU under CUDA's autocast: with meta tensors autocast
    # would change nothing, and attention, for example, would save more.
    default = torch.device("cuda" if torch.is_autocast_enabled() else "cpu")
    device = next((tensor.device for tensor in state if not tensor.is_meta), default)
    fake, mode = _fakes(device)
    is_there = device.type != "cuda" or torch.cuda.is_available()
    copier = Copier(fake)
    try:
        with torch.inference_mode(False), _without_reports_of_fakes():
            copies = copier((model, args, kwargs))
            with nullcontext() if is_there else mode:
                _run(run, copier, *copies)
    except Exception as error:
        if "saved tensor hooks" in str(error):
            raise RuntimeError(
                "the model's forward pass calls a transform of torch.func, in which PyTorch has no hooks on saved tensors: it "
                "can't be surveyed; convert(model) needs no inputs"
            ) from error
        if any(tensor.is_meta for tensor, _ in copier.copies.values() if isinstance(tensor, Tensor)):
            if not isinstance(error, FAKES_WONT_DO):
                raise
            raise RuntimeError(
                f"the model's forward pass depends on the values of its tensors ({error}): expected a model and example "
                "inputs with values, got some on the meta device"
            ) from error
        try:
            with torch.inference_mode(False):
                copier = Copier(_clone)
                _run(run, copier, *copier((model, args, kwargs)))
        except torch.cuda.OutOfMemoryError:  # most likely the model doesn't take these inputs
            raise error  # noqa: B904 (it has both)


def running_module(copier: Copier, modules: Collection[nn.Module]) -> Callable[[], nn.Module]:
    """A function that returns the module whose copy is running; outside of all, the first, which is the model."""
    originals = {id(copier(module)): module for module in modules}

    def running():
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code is MODULE_CALL and (module := originals.get(id(frame.f_locals["self"]))) is not None:
                return module
            frame = frame.f_back
        return next(iter(modules))

    return running


class Survey:
    """What a model's modules save for backward with PyTorch's activations, and with some of them converted.

    Args:
        model: the model; it is left as it is.
        args, kwargs: the arguments of its forward pass. Tensors may be on any device, meta included. If the pass depends on
            their values, it runs on copies of them, and of the parameters and buffers.
        names: the functions whose calls may be converted.
        recompute: whether the pass is to run within a scope of recompute(). There smooth activations save what PyTorch's do.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        names: frozenset[str],
        recompute: bool = False,
    ) -> None:
        model = unwrapped(model)
        self.names = {module: name for name, module in model.named_modules()}
        self.considered = names
        self.recomputes = recompute
        run_copy(model, args, kwargs, self._watch)
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
        own = {StorageWeakRef(part) for each in (*model.parameters(), *model.buffers()) for part in storages_of(each)}
        for tensor, (module, call) in saved():
            if call is not None:
                call.saves = True
            for storage in storages_of(tensor):
                if (key := StorageWeakRef(storage)) not in own:
                    storages.setdefault(key, _Storage(storage.nbytes())).savers.append((module, call))
        for call, tensor, version in watch.outputs:
            storage = tensor.untyped_storage()
            call.saves_output = True
            call.is_overwritten |= tensor._version != version
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
        return (call.module, call.function) if is_meant and (is_recorded or call.bits is not None) else None

    def _choose(self, chosen):
        """The units whose conversion lowers what is saved: all, less those that gain nothing, until every one gains."""
        as_it_comes = {self._unit(call) for call in self.calls if call.is_ours} & chosen
        chosen -= {self._unit(call) for call in self.calls if call.is_overwritten} - as_it_comes
        while without := {unit for unit, gain in self._gains(chosen).items() if gain <= 0} - as_it_comes:
            chosen -= without
        return chosen if self.saved(chosen).total() < self.saved(as_it_comes).total() else as_it_comes

    def converts(self) -> dict[nn.Module, frozenset[str]]:
        """The functions of PyTorch's that each module is to have replaced."""
        names = defaultdict(set)
        for call in self.calls:
            if not call.is_ours and self._unit(call) in self.converted:
                names[call.module].add(call.function)
        return {module: frozenset(functions) for module, functions in names.items()}

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
                return "saves less in bfloat16 and float16 only: train, and call convert, under torch.autocast"
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
    return lines or ["no activation of the family"]
