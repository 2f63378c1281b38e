"""Copies of a model and of its inputs to run a forward pass on: what that pass writes to their attributes, it writes to the
copies.

A copy goes as deep as pickle goes, and into closures, bound methods and weak references. What can't be pickled (locks, files,
generators), what has a finalizer and what belongs to threads, loggers or process groups is shared.
"""

import dis
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from inspect import getclosurevars
from io import BytesIO, StringIO
from itertools import chain
from sys import getsizeof
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn

from activations_cuda.arguments import wrapped
from activations_cuda.replacements import original_of, subclass

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
    "torch.fx.",
    "torch.jit.",
    "torch.storage.",
)
CONTAINERS = dict, list, set, OrderedDict, defaultdict, deque
# Copies do without what is called at the end of what they refer to.
REFERENCES = {weakref.ref: weakref.ref, weakref.KeyedRef: weakref.ref, weakref.WeakMethod: weakref.WeakMethod}
CACHED = type(lru_cache(len))
HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
MAX_BYTES = 2**24  # of an array, beyond which it is data rather than state
# What hooks call that does more than compute.
EFFECTS = frozenset(
    {
        "print",
        "open",
        "input",
        "breakpoint",
        "exec",
        "eval",
        "setattr",
        "delattr",
        "globals",
        "__import__",
        "save",
        "distributed",
    }
)


def _is_of(kind, packages):
    return f"{kind.__module__}.".startswith(packages)


def _keeps_nothing(hook):
    """Whether it is one of torch.nn.utils or transformers, or a function that reads nothing in which it could leave a tensor.

    Others are the user's observers: they log, count and collect, and are not called.
    """
    if type(hook) is not FunctionType:
        return any(_is_of(kind, "torch.nn.utils.") for kind in type(hook).__mro__)
    if _is_of(hook, "transformers.utils.output_capturing."):  # without it there are no hidden states
        return True
    try:
        used = getclosurevars(hook)
    except ValueError:  # a variable has no value yet
        return False
    values = [*used.nonlocals.values(), *used.globals.values()]
    values += [*(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values(), *hook.__code__.co_consts]
    instructions = list(dis.get_instructions(hook))
    names = {instruction.opname for instruction in instructions}
    # Any other variable of that name counts as well.
    reads_module = any(name in _variables(each) for name in hook.__code__.co_varnames[:1] for each in instructions)
    is_pure = EFFECTS.isdisjoint(hook.__code__.co_names) and names.isdisjoint(("STORE_GLOBAL", "IMPORT_NAME"))
    return is_pure and not reads_module and all(map(_is_constant, values))


def _variables(instruction):
    return instruction.argval if type(instruction.argval) is tuple else (instruction.argval,)  # Python 3.13 loads two at once


def _is_constant(value):
    if type(value) is ModuleType:
        name = f"{value.__name__}."
        return name.startswith(("torch.", "math.")) and not name.startswith("torch.distributed.")
    if type(value) is slice:  # Python 3.14 has them among a function's constants
        value = value.start, value.stop, value.step
    return type(value) is not type and (type(value) in ATOMIC or (type(value) is tuple and all(map(_is_constant, value))))


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
    """Whether it is, or everything in it that isn't atomic."""
    if type(key) is tuple:
        return all(type(each) in ATOMIC or _is_hashed_by_identity(each) for each in key)
    hashed = key() if type(key) is weakref.ref else key
    return type(hashed).__hash__ in (object.__hash__, Tensor.__hash__)


def _is_shared(value, kind):
    """Whether it has what a copy must not: an identity that others ask for, a finalizer, threads or processes, much memory."""
    if kind is BuiltinFunctionType and type(value.__self__) in ATOMIC:  # a function, no method of what is copied
        return True
    if kind in (BytesIO, StringIO):  # whose finalizer closes nothing but themselves
        return getsizeof(value) > MAX_BYTES
    if kind is object or issubclass(kind, (type, ModuleType)) or hasattr(kind, "__del__") or _is_of(kind, SHARED):
        return True
    has_size = type(getattr(kind, "nbytes", None)) is GetSetDescriptorType  # an array, by a class written in C
    return (len(value) if kind is bytearray else value.nbytes if has_size else 0) > MAX_BYTES


def _reduced(value):
    """What the pickle protocol makes a copy of: a function, its arguments, a state, a list's items and a dict's."""
    while True:
        function, arguments, *rest = value.__reduce_ex__(4)
        state, items, pairs = (rest + [None] * 3)[:3]
        try:
            return function, arguments, state, list(items or ()), list(pairs or ())
        except RuntimeError as error:
            if "during iteration" not in str(error):  # not of a container that another thread has changed meanwhile
                raise


class _CannotBeCopied(TypeError):
    """Raised for a module, which isn't shared as other objects are."""


class Copier:
    """Called with a value, returns its copy, the same one for the same value.

    As copy.deepcopy, but what can't be copied is shared, and a chain of objects may be long. A converted module's copy has its
    original class again, wrappers call the module within, and of hooks there are only those that may matter to the result.

    Args:
        of_tensor: copies a tensor.
    """

    def __init__(self, of_tensor: Callable[[Tensor], Tensor]) -> None:
        self.of_tensor = of_tensor
        self.copies: dict[int, tuple[Any, Any]] = {}  # by id; with the value itself, or another could get its id
        self.unfilled: list[Callable[[], None]] = []

    def __call__(self, value: Any) -> Any:
        before = len(self.unfilled)
        copy = self._copy(value)
        while len(self.unfilled) > before:
            self.unfilled.pop()()
        return copy

    def _copy(self, value):
        kind = type(value)
        if kind in ATOMIC:
            return value
        if id(value) not in self.copies:
            self.copies[id(value)] = value, value  # until there is a copy
            try:
                self._start(value, kind)
            except (_CannotBeCopied, torch.OutOfMemoryError):  # the model's own tensor is no copy
                raise
            except Exception as error:
                if issubclass(kind, nn.Module):
                    raise _CannotBeCopied(f"expected a model that can be copied, got {kind.__name__} in it: {error}") from error
                self.copies[id(value)] = value, value
        return self.copies[id(value)][1]

    def _items(self, items):
        for key, value in items:
            # Other keys may have a hash of what isn't filled yet.
            yield self._copy(key) if _is_hashed_by_identity(key) else key, self._copy(value)

    def _start(self, value, kind):
        """Remembers the copy of a value; the attributes of one that may contain itself are filled in later."""
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
        elif kind is CACHED:
            copy = lru_cache(**value.cache_parameters())(self._copy(value.__wrapped__))
        elif kind is tuple:
            copy = tuple(map(self._copy, value))
        elif kind in REFERENCES:
            copy = value if value() is None else REFERENCES[kind](self._copy(value()))
        elif kind in (weakref.ProxyType, weakref.CallableProxyType):
            copy = weakref.proxy(self._copy(value.__init__.__self__))
        elif kind is torch.Generator:  # whose state is a tensor
            copy = deepcopy(value)
        elif _is_shared(value, kind):
            copy = value
        else:
            self._reconstruct(value, kind)
            return
        self.copies[id(value)] = value, copy

    def _reconstruct(self, value, kind):
        function, arguments, state, items, pairs = _reduced(value)
        copy = function(*map(self, arguments))
        self.copies[id(value)] = value, copy
        if copy is value:  # there is one of its kind
            return
        if hasattr(kind, "__setstate__") and state is not None:
            copy.__setstate__(self(state))
        elif state is not None:
            self.unfilled.append(lambda: self._fill(copy, state))
        # Past methods of the user's own, which may do more.
        base = next(base for base in (OrderedDict, dict, list, kind) if issubclass(kind, base))
        for item in items:
            base.append(copy, self._copy(item))
        for key, item in self._items(pairs):
            base.__setitem__(copy, key, item)

    def _fill(self, copy, state):
        attributes, slots = state if type(state) is tuple else (state, None)
        if attributes:
            vars(copy).update(self._items(list(attributes.items())))
        for name, value in (slots or {}).items():
            object.__setattr__(copy, name, self._copy(value))

    def _fill_slots(self, copy, value):
        for slot in chain.from_iterable(vars(kind).values() for kind in type(value).__mro__):
            if type(slot) is MemberDescriptorType:
                with suppress(AttributeError, TypeError):  # empty, or C's
                    slot.__set__(copy, self._copy(slot.__get__(value)))

    def _module(self, module, kind):
        own = nn.Module if wrapped(module) is not None else original_of(kind)
        if hasattr(own, "__del__"):  # what it would close is still the module's
            own = subclass(own, {"__del__": lambda self: None})
        copy = object.__new__(own)

        def fill():
            attributes = _containers_of(kind) | vars(module)
            for name in HOOKS:
                kept = ((key, hook) for key, hook in list(attributes.get(name, {}).items()) if _keeps_nothing(hook))
                attributes[name] = OrderedDict(kept)
            self._fill(copy, attributes)
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
            vars(copy).update(self._items(list(vars(function).items())))
            for cell, original in zip(cells, closure, strict=True):
                with suppress(ValueError):  # there is nothing in it yet
                    cell.cell_contents = self._copy(original.cell_contents)

        return copy, fill
