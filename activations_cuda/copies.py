"""Copies of a model and of its inputs to run a forward pass on: what that pass writes to their attributes, it writes to the
copies.

A copy goes as deep as Python goes. Containers, plain objects, closures and bound methods are copied; what is implemented in C
(locks, files, sockets), what has a finalizer and what belongs to threads, loggers or process groups is shared.
"""

import dis
import random
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy as shallow_copy
from copy import deepcopy
from enum import Enum
from functools import lru_cache, partial
from itertools import chain
from types import BuiltinFunctionType, CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from activations_cuda.replacements import original_of, subclass

__all__ = ["Copier", "moved_by_wrapper", "unwrapped"]

BUILTIN = type(None), type(...), bool, int, float, complex, str, bytes, type, ModuleType
ATOMIC = frozenset(BUILTIN) | {torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size}
SHARED = (
    "activations_cuda.",
    "asyncio.",
    "concurrent.",
    "logging.",
    "multiprocessing.",
    "queue.",
    "threading.",
    "torch._",
    "torch.distributed.",
    "torch.jit.",
)
RANDOM = random.Random, torch.Generator  # whose state a forward pass changes
CONTAINERS = dict, list, set, OrderedDict, defaultdict, deque
WEAK_CONTAINERS = weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet
CACHED = type(lru_cache(len))
# What hooks call that does more than compute.
EFFECTS = frozenset({"print", "open", "input", "breakpoint", "exec", "eval", "setattr", "delattr"})


PARALLEL = nn.DataParallel, nn.parallel.DistributedDataParallel


def wrapped(module: nn.Module) -> nn.Module | None:
    """The module that torch.compile or a parallel wrapper holds."""
    if issubclass(type(module), PARALLEL):
        return module._modules["module"]
    compiled = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", ())  # another thread may be importing it
    return module._modules["_orig_mod"] if issubclass(type(module), compiled) else None


def unwrapped(model: nn.Module) -> nn.Module:
    while (inner := wrapped(model)) is not None:
        model = inner
    return model


def moved_by_wrapper(model: nn.Module, inputs: Any) -> Any:
    """The inputs on the device to which a parallel wrapper moves them."""
    while not issubclass(type(model), PARALLEL):
        inner = wrapped(model)
        if inner is None:
            return inputs
        model = inner
    device_ids: Any = model.device_ids
    if not device_ids:  # on the CPU
        return inputs
    return tree_map_only(Tensor, lambda tensor: tensor if tensor.is_meta else tensor.to(device_ids[0]), inputs)


def _listed(values: Callable[[], Iterable[Any]]) -> list[Any]:
    while True:
        try:
            return list(values())
        except RuntimeError:  # another thread has changed it meanwhile
            continue


def _is_of(kind, packages):
    return f"{kind.__module__}.".startswith(packages)


def _keeps_nothing(hook):
    """Whether it is one of torch.nn.utils or transformers, or a function that has no variable to leave a tensor in.

    Others are the user's observers: they log, count and collect, and are not called.
    """
    if type(hook) is not FunctionType:
        return any(_is_of(kind, "torch.nn.utils.") for kind in type(hook).__mro__)
    if _is_of(hook, "transformers.utils.output_capturing."):  # without it there are no hidden states
        return True
    variables = [hook.__globals__.get(name) for name in hook.__code__.co_names]
    variables += hook.__closure__ or ()
    variables += [*(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values(), *hook.__code__.co_consts]
    names = {instruction.opname for instruction in dis.get_instructions(hook)}
    is_pure = EFFECTS.isdisjoint(hook.__code__.co_names) and names.isdisjoint(("STORE_GLOBAL", "IMPORT_NAME"))
    return is_pure and all(map(_is_constant, variables))


def _is_constant(value):
    if type(value) is CellType:
        try:
            return _is_constant(value.cell_contents)
        except ValueError:  # empty so far
            return False
    if type(value) is ModuleType:
        return f"{value.__name__}.".startswith(("torch.", "math."))
    return type(value) is not type and (type(value) in ATOMIC or (type(value) is tuple and all(map(_is_constant, value))))


def _keep_open(self):
    """In place of a finalizer: what it would close is still the module's."""


def _empty(kind):
    """An instance without contents; raises TypeError for most classes of C's."""
    return (kind if kind is SimpleNamespace else object).__new__(kind)


def _containers_of(kind):
    """The containers and tensors among a class's attributes, which its code may write to."""
    kinds = (each for each in reversed(kind.__mro__) if not _is_of(each, ("torch.", "builtins.")))
    attributes = (item for each in kinds for item in vars(each).items())
    return {
        name: value for name, value in dict(attributes).items() if type(value) in CONTAINERS or issubclass(type(value), Tensor)
    }


def _has_values(function):
    """Whether a function has what it may write to: variables of others, or defaults."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return bool(function.__closure__) or any(type(each) not in ATOMIC for each in defaults)


def _is_hashed_by_identity(key):
    """Whether a key is, or everything in it that isn't atomic."""
    if type(key) is tuple:
        return any(map(_is_hashed_by_identity, key)) and all(
            type(each) in ATOMIC or _is_hashed_by_identity(each) for each in key
        )
    return issubclass(type(key), (Tensor, nn.Module))


class Copier:
    """Called with a value, returns its copy, the same one for the same value.

    A converted module's copy has its original class again, wrappers call the module within, and of hooks there are only those
    that may matter to the result.

    Args:
        of_tensor: copies a tensor.
    """

    def __init__(self, of_tensor: Callable[[Tensor], Tensor]) -> None:
        self.of_tensor = of_tensor
        self.copies: dict[int, tuple[Any, Any]] = {}  # by id; with the value itself, or another could get its id
        self.unfilled: list[Callable[[], None]] = []

    def __call__(self, value: Any) -> Any:
        result = self._copy(value)
        while self.unfilled:
            self.unfilled.pop()()
        return result

    def _copy(self, value):
        kind = type(value)
        if kind in ATOMIC:
            return value
        if id(value) not in self.copies:
            try:
                self._start(value, kind)
            except torch.cuda.OutOfMemoryError:  # the model's own tensor is no copy
                raise
            except Exception as error:
                if issubclass(kind, nn.Module):
                    raise TypeError(f"expected a model that can be copied, got {kind.__name__} in it: {error}") from error
                self.copies[id(value)] = value, value  # no copy can be made of it
        return self.copies[id(value)][1]

    def _all(self, values):
        return [value if type(value) in ATOMIC else self._copy(value) for value in values]

    def _start(self, value, kind):
        """Remembers the copy of a value; one that may contain itself is filled later."""
        if issubclass(kind, Tensor):
            copy = self.of_tensor(value)
        elif issubclass(kind, nn.Module) and not issubclass(kind, torch.jit.ScriptModule):
            copy, fill = self._module(value, kind)
            self.unfilled.append(fill)
        elif kind is FunctionType and _has_values(value) and not (value.__module__ or "").startswith("torch."):
            copy, fill = self._function(value)
            self.unfilled.append(fill)
        elif kind is MethodType:
            copy = MethodType(self._copy(value.__func__), self._copy(value.__self__))
        elif kind is BuiltinFunctionType:  # a method, as list.append, or a function of a module
            owner = self._copy(value.__self__)
            copy = value if owner is value.__self__ else getattr(owner, value.__name__)
        elif kind is CACHED:
            copy = lru_cache(**value.cache_parameters())(self._copy(value.__wrapped__))
        elif kind is partial:
            copy = partial(self._copy(value.func), *self._all(value.args), **dict(self._items(value.keywords)))
        elif issubclass(kind, (tuple, frozenset)):
            base = tuple if issubclass(kind, tuple) else frozenset
            before = list(base.__iter__(value))
            after = self._all(before)
            if all(a is b for a, b in zip(before, after, strict=True)):
                copy = value
            elif hasattr(kind, "n_sequence_fields"):  # as torch.return_types.max
                copy = kind(after)
            else:
                copy = base.__new__(kind, after)
        elif base := next((base for base in (OrderedDict, dict, list, set, deque) if issubclass(kind, base)), None):
            copy = base.__new__(kind)
            if base is deque:
                deque.__init__(copy, (), value.maxlen)
            if issubclass(kind, defaultdict):
                defaultdict.__init__(copy, value.default_factory)
            self.unfilled += (lambda: self._fill(copy, value, base), lambda: self._fill_object(copy, value))
        elif kind in (weakref.ref, weakref.WeakMethod):
            copy = value if value() is None else kind(self._copy(value()))
        elif kind in (weakref.ProxyType, weakref.CallableProxyType):
            copy = weakref.proxy(self._copy(value.__init__.__self__))
        elif kind in WEAK_CONTAINERS:
            copy = kind()
            self.unfilled.append(lambda: self._fill_weakly(copy, value))
        elif issubclass(kind, RANDOM) or _is_of(kind, ("numpy.", "itertools.", "array.")) or kind is bytearray:
            copy = deepcopy(value)
        elif kind.__module__ == "builtins" and hasattr(kind, "__next__"):
            make, arguments, *place = value.__reduce__()
            copy = iter(self._all(list(shallow_copy(value)))) if place else make(*self._all(arguments))
        elif issubclass(kind, (type, Enum, FunctionType)) or kind is object or hasattr(kind, "__del__") or _is_of(kind, SHARED):
            copy = value
        else:
            copy = _empty(kind)
            self.unfilled.append(lambda: self._fill_object(copy, value))
        self.copies[id(value)] = value, copy

    def _items(self, values, base=dict):
        items = _listed(lambda: base.items(values))
        return zip(self._keys(key for key, _ in items), self._all(value for _, value in items), strict=True)

    def _keys(self, keys):
        """Others may have a hash of what isn't filled yet."""
        return [self._copy(key) if _is_hashed_by_identity(key) else key for key in keys]

    def _fill_weakly(self, copy, value):
        if isinstance(value, weakref.WeakSet):
            for item in _listed(lambda: value):
                copy.add(self._copy(item))
        else:
            for key, item in _listed(value.items):
                copy[self._copy(key)] = self._copy(item)

    def _fill(self, copy, value, base):
        if issubclass(base, dict):
            for key, item in self._items(value, base):
                base.__setitem__(copy, key, item)
        elif base is set:
            set.update(copy, self._keys(_listed(lambda: set.__iter__(value))))
        else:
            base.extend(copy, self._all(_listed(lambda: base.__iter__(value))))

    def _fill_object(self, copy, value):
        with suppress(AttributeError):
            attributes = object.__getattribute__(value, "__dict__")
            vars(copy).update(self._items(attributes))
        self._fill_slots(copy, value)

    def _fill_slots(self, copy, value):
        for slot in chain.from_iterable(vars(kind).values() for kind in type(value).__mro__):
            if type(slot) is MemberDescriptorType:
                with suppress(AttributeError, TypeError):  # empty, or C's
                    slot.__set__(copy, self._copy(slot.__get__(value)))

    def _module(self, module, kind):
        own = nn.Module if wrapped(module) is not None else original_of(kind)
        copy = object.__new__(subclass(own, {"__del__": _keep_open}) if hasattr(own, "__del__") else own)

        def fill():
            attributes = _containers_of(kind) | vars(module)
            for name in ("_forward_hooks", "_forward_pre_hooks"):
                kept = ((key, hook) for key, hook in _listed(attributes.get(name, {}).items) if _keeps_nothing(hook))
                attributes[name] = OrderedDict(kept)
            vars(copy).update(self._items(attributes))
            self._fill_slots(copy, module)
            vars(copy)["_compiled_call_impl"] = None
            if (inner := wrapped(module)) is not None:
                vars(copy)["forward"] = self._copy(inner)

        return copy, fill

    def _function(self, function):
        closure = function.__closure__ or ()
        cells = tuple(CellType() for _ in closure)
        copy = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells)

        def fill():
            copy.__defaults__, copy.__kwdefaults__ = self._copy(function.__defaults__), self._copy(function.__kwdefaults__)
            vars(copy).update(self._items(vars(function)))
            for cell, original in zip(cells, closure, strict=True):
                try:
                    cell.cell_contents = self._copy(original.cell_contents)
                except ValueError:  # there is nothing in it yet
                    continue

        return copy, fill
