"""What replaces PyTorch's activations: a class for each of its modules, a function for each of its functions, and for any other
module whose code calls those functions, a subclass of its own class whose code calls ours.

Each method that calls one of PyTorch's activation functions is overridden by a copy that calls ours. The copies of one class's
methods are a class right before it in the method resolution order, so super() finds them too. Nothing is intercepted at run
time, and a call costs no more than before.
"""

import copyreg
import dis
import functools
import types
from abc import ABCMeta
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, cast

import torch
from torch import nn
from torch.fx import GraphModule

from activations_cuda import functional, modules

OURS: dict[type, type] = {getattr(nn, name): getattr(modules, name) for name in modules.__all__}
PYTORCHS = {ours: pytorchs for pytorchs, ours in OURS.items()}


def function_of(kind: type) -> str:
    """The function that a class of torch.nn calls: leaky_relu of LeakyReLU."""
    (name,) = (name for name in functional.__all__ if name.replace("_", "") == kind.__name__.lower())
    return name


FUNCTIONS = {kind: function_of(kind) for kind in OURS}


def _if_pytorchs(function):
    """None in the place of somebody's patch."""
    if isinstance(function, types.FunctionType) and function.__globals__["__name__"].startswith("torch."):
        return function
    return function if isinstance(function, (types.BuiltinFunctionType, types.MethodDescriptorType)) else None


# As they are when this package is imported; somebody may patch them later.
PYTORCHS_FUNCTIONS = {
    (owner, attribute): _if_pytorchs(getattr(owner, attribute, None))
    for name in functional.__all__
    for attribute in (name, name + "_")
    for owner in (nn.functional, torch, torch.Tensor)
}


def patched() -> set[str]:
    """The names of those functions that aren't PyTorch's any more: what they compute is somebody's own."""
    found = PYTORCHS_FUNCTIONS.items()
    return {attribute.removesuffix("_") for (owner, attribute), own in found if getattr(owner, attribute, None) is not own}


@cache
def functions(names: frozenset[str]) -> dict[Callable[..., Any], Callable[..., Any]]:
    """What to call in the place of torch.relu, torch.Tensor.relu_, torch.nn.functional.leaky_relu_ and their like."""
    table: dict[Callable[..., Any], Callable[..., Any]] = {}
    for (_, attribute), pytorchs in PYTORCHS_FUNCTIONS.items():
        name = attribute.removesuffix("_")
        if name in names and pytorchs:
            ours = getattr(functional, name)
            if name != attribute:
                table[pytorchs] = partial(ours, inplace=True)
            else:
                table[pytorchs] = ours if isinstance(pytorchs, types.FunctionType) else _or_out(ours, pytorchs)
    return table


def _or_out(ours, pytorchs):
    """Ours, but PyTorch's where it is to write to another tensor, as torch.threshold can."""

    @functools.wraps(ours)
    def function(*args, **kwargs):
        return pytorchs(*args, **kwargs) if "out" in kwargs else ours(*args, **kwargs)

    return function


class CallsOurs(modules.Packed):
    """The common base of these subclasses."""

    _fastact_original: type
    _fastact_names: frozenset[str]

    def __init_subclass__(cls, **kwargs):
        """Hides a hook of the original class, which is for classes of its user's."""

    def _get_name(self):
        names = ", ".join(f"activations_cuda.{name}" for name in sorted(type(self)._fastact_names))
        return f"{type(self)._fastact_original.__name__}[{names}]"

    def __reduce_ex__(self, protocol):
        make, arguments, *rest = super().__reduce_ex__(protocol)
        if rest and isinstance(rest[0], dict):
            rest[0] = dict(rest[0])
            _restore_functions(rest[0])
        kind = type(self)
        if original_of(kind) is kind:  # derived from one of ours
            return make, arguments, *rest
        # Without the class itself: cloudpickle would pickle one of `__main__` whole, with what it refers to.
        own = (original_of(kind) if each is kind else each for each in (make, *arguments))
        return _made, (original_of(kind), kind._fastact_names, *own), *rest

    def __setstate__(self, state):
        super().__setstate__(state)
        _replace_functions(self, _Rebinding(type(self)._fastact_names))


def _made(original, names, make, *arguments):
    """Makes a module of its own class, then one of ours of it."""
    module = make(*arguments)
    if type(module) is original:
        set_class(module, _class_that_calls_ours(original, names))
    return module


HELD = "_fastact_functions"  # the attributes of a module that are functions: as they were, and as they are


def _replace_functions(module, rebind):
    attributes = vars(module)
    held = {name: (value, rebind(value)) for name, value in attributes.items() if rebind(value) is not value}
    if held:
        attributes.update({name: new for name, (_, new) in held.items()}, **{HELD: held})


def _restore_functions(attributes):
    """All but those that were assigned meanwhile."""
    for name, (old, new) in attributes.pop(HELD, {}).items():
        if attributes.get(name) is new:
            attributes[name] = old


def original_of(kind: type) -> type:
    """The class that a module had before it was replaced. What others have derived from a replacement is theirs."""
    return vars(kind).get("_fastact_original") or PYTORCHS.get(kind, kind)


def is_replaced(module: nn.Module) -> bool:
    return original_of(type(module)) is not type(module)


def set_class(module: nn.Module, kind: type) -> None:
    """Past a `__setattr__` of the module's own, which may forbid it."""
    object.__setattr__(module, "__class__", kind)


def restore(module: nn.Module) -> None:
    """Make a module what it was before `replace`."""
    if is_replaced(module):
        _restore_functions(vars(module))
        set_class(module, original_of(type(module)))


def reaches(module: nn.Module, names: frozenset[str]) -> bool:
    """Whether what a module calls by itself, replaced or not, leads to PyTorch's functions of these names."""
    original = original_of(type(module))
    if original in OURS:
        return FUNCTIONS[original] in names
    if not names or isinstance(module, GraphModule):  # whose class is made from its graph
        return False
    rebind = _Rebinding(names)
    values = [*vars(module).values(), *(old for old, _ in vars(module).get(HELD, {}).values())]
    return bool(_copies(original, names)) or any(rebind(value) is not value for value in values)


def replace(module: nn.Module, names: Iterable[str]) -> bool:
    """Make a module call this package's functions of these names, and PyTorch's for all others. Return whether it calls any."""
    restore(module)
    names, original = frozenset(names) - patched(), cast(Any, type(module))
    if not reaches(module, names):
        return False
    if original in OURS:
        set_class(module, OURS[original])
    else:
        set_class(module, _class_that_calls_ours(original, names))
        _replace_functions(module, _Rebinding(names))
    return True


KNOWN = "_fastact_known"


class _Known:
    """What was found out about a class, for each set of names. It is kept in the class and freed with it."""

    def __init__(self):
        self.copies = {}
        self.classes = {}

    def __reduce__(self):
        return _Known, ()  # cloudpickle pickles a class with all that is in it


def _known(original):
    if KNOWN not in vars(original):
        type.__setattr__(original, KNOWN, _Known())  # past a metaclass of the user's
    return vars(original)[KNOWN]


def _members(original):
    kinds = original.__mro__[: original.__mro__.index(nn.Module)]
    return {(kind, name): member for kind in kinds for name, member in vars(kind).items() if name != KNOWN}


def _copies(original, names):
    """For each class that `original` derives from, itself included, a class of copies of those methods that call ours.

    They are the same ones until a member of the class, or a global or a closure's variable that its code looks up, is assigned
    anew.
    """
    members = _members(original)
    before, found, result = _known(original).copies.get(names, ({}, [], None))
    if (
        result is None
        or before.keys() != members.keys()
        or any(before[key] is not members[key] for key in members)
        or any(_if_followed(look_up()) is not value for look_up, value in found)
    ):
        rebind = _Rebinding(names)
        methods: defaultdict[type, dict[str, Any]] = defaultdict(dict)
        for (kind, name), member in members.items():
            if (copy := rebind(member)) is not member:
                methods[kind][name] = copy if hasattr(member, "__get__") else staticmethod(copy)  # torch.relu binds no self
        result = {kind: type(kind.__name__, (), copies) for kind, copies in methods.items()}
        _known(original).copies[names] = members, rebind.looked_up, result
    return result


def _class_that_calls_ours(original, names):
    copies = _copies(original, names)
    kind = _known(original).classes.get(names)
    if kind is None or vars(kind)["_fastact_copies"] is not copies:
        facts = {
            "_fastact_original": original,
            "_fastact_names": names,
            "_fastact_copies": copies,
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
        }
        meta = _metaclass(type(original))
        # Past a user's metaclass, which may check or register the classes that it makes. ABCMeta keeps state for each class.
        new = ABCMeta.__new__ if issubclass(meta, ABCMeta) else type.__new__
        kind = new(meta, original.__name__, (CallsOurs, original), facts)
        _known(original).classes[names] = kind
    return kind


@cache
def _metaclass(original):
    class Meta(original):
        def mro(cls):
            copies = vars(cls).get("_fastact_copies", {})
            return [each for kind in super().mro() for each in (copies.get(kind), kind) if each is not None]

    # Copying and loading create the class again: it isn't an attribute of any Python module.
    copyreg.pickle(Meta, _reduce)
    return Meta


def _reduce(kind):
    facts = vars(kind)
    if "_fastact_original" not in facts:  # derived from one of ours
        return kind.__qualname__
    return _class_that_calls_ours, (facts["_fastact_original"], facts["_fastact_names"])


class _Namespace(types.ModuleType):
    """A module of PyTorch's with some attributes replaced."""

    def __init__(self, original, replaced):
        super().__init__(original.__name__, original.__doc__)
        self.__dict__.update(replaced, __getattr__=partial(getattr, original))


@cache
def _namespaces(names):
    """For torch, torch.nn and torch.nn.functional, a substitute with our functions and the attributes that lead to those."""
    table = functions(names)

    def replaced(module):
        return {name: table[own] for (owner, name), own in PYTORCHS_FUNCTIONS.items() if owner is module and own in table}

    in_functional, in_torch = replaced(nn.functional), replaced(torch)
    of_functional = _Namespace(nn.functional, in_functional)
    of_nn = _Namespace(nn, {"functional": of_functional})
    of_torch = _Namespace(torch, {**in_torch, "nn": of_nn})
    return {
        nn.functional: (of_functional, in_functional.keys()),
        nn: (of_nn, in_functional.keys()),
        torch: (of_torch, in_functional.keys() | in_torch.keys()),
    }


# What may lead to one of these functions.
FOLLOWED = (
    staticmethod,
    classmethod,
    partial,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
)


def _if_followed(value):
    """A variable's value if `_Rebinding` follows it, else None: a tensor that is remembered would stay in memory."""
    return value if isinstance(value, (types.ModuleType, *FOLLOWED)) else None


class _Rebinding:
    """Called with what code refers to, returns its replacement, or itself if it leads to none of these functions."""

    def __init__(self, names):
        self.suffix = "_".join(("", "activations_cuda", *sorted(names)))
        # A user's subclass may inherit these. ReLU6 defines none of its own.
        kinds = [kind for kind, name in FUNCTIONS.items() if name in names and "forward" in vars(kind)]
        forwards = {kind.forward: OURS[kind].forward for kind in kinds}
        self.replacements = {**functions(names), **forwards}
        self.namespaces = _namespaces(names)
        self.looked_up = []  # variables: how to look it up, and the value if it was followed

    def __call__(self, value):
        if not isinstance(value, FOLLOWED):
            return value
        if isinstance(value, (staticmethod, classmethod)):
            function = self(value.__func__)
            return value if function is value.__func__ else type(value)(function)
        if value not in self.replacements:
            self.replacements[value] = value  # for a function that leads to itself
            self.replacements[value] = self.rebound(value)
        return self.replacements[value]

    def rebound(self, value):
        if isinstance(value, partial):
            function = self(value.func)
            return value if function is value.func else partial(function, *value.args, **value.keywords)
        if isinstance(value, types.FunctionType) and not (value.__module__ or "").startswith(("torch.", "activations_cuda.")):
            return self.copy(value)
        return value

    def copy(self, function):
        scope = function.__globals__
        replaced = {}
        looked_up, attributes = _names_of(function.__code__)
        for name in looked_up - attributes:  # renaming a name of both would break the attribute
            self.looked_up.append((partial(scope.get, name), _if_followed(scope.get(name))))
            if name in scope and (new := self.in_scope(scope[name], attributes)) is not scope[name]:
                replaced[name] = new
        closure = tuple(map(self.cell, function.__closure__ or ()))
        defaults = tuple(map(self, function.__defaults__ or ()))
        kwdefaults = {name: self(value) for name, value in (function.__kwdefaults__ or {}).items()} or None
        same = _same(closure, function.__closure__) and _same(defaults, function.__defaults__)
        if not replaced and same and _same((kwdefaults or {}).values(), (function.__kwdefaults__ or {}).values()):
            return function
        # The replacements get new names beside the old ones, so the copy shares its globals with the original: whatever else it
        # looks up stays live.
        code = _renamed(function.__code__, {name: name + self.suffix for name in replaced})
        scope.update({name + self.suffix: new for name, new in replaced.items()})
        result = types.FunctionType(code, scope, function.__name__, defaults or None, closure or None)
        result.__kwdefaults__ = kwdefaults
        result.__dict__.update(function.__dict__)
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(function, name):
                setattr(result, name, getattr(function, name))
        return result

    def in_scope(self, value, attributes):
        if isinstance(value, types.ModuleType) and value in self.namespaces:
            namespace, names = self.namespaces[value]
            return value if names.isdisjoint(attributes) else namespace
        return self(value)

    def cell(self, cell):
        value = _contents(cell)
        self.looked_up.append((partial(_contents, cell), _if_followed(value)))
        new = self(value)
        return cell if new is value else types.CellType(new)


def _contents(cell):
    """None if there is nothing in it yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _same(values, others):
    return all(value is other for value, other in zip(values, others or (), strict=True))


def _codes(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _names_of(code):
    """The names that a function's code looks up as globals, and all other names it uses: attributes, imports, assignments."""
    looked_up, others = set(), set()
    for each in _codes(code):
        for instruction in dis.get_instructions(each):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                looked_up.add(instruction.argval)
            elif instruction.opcode in dis.hasname:
                others.add(instruction.argval)
    return looked_up, others


def _renamed(code, names):
    return code.replace(
        co_names=tuple(names.get(name, name) for name in code.co_names),
        co_consts=tuple(_renamed(c, names) if isinstance(c, types.CodeType) else c for c in code.co_consts),
    )
