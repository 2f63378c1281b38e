"""What takes the place of PyTorch's activations: a class for each of its modules, and for any other module whose code calls
their functions, a subclass of its own class whose forward runs under a function mode.

The mode knows this package's functions and is meant for the forward's own calls alone: what another module's forward calls, or
a checkpointed function, which runs again without the mode, stays PyTorch's. Nothing of the user's is rewritten.
"""

import copyreg
import functools
import sys
import types
from abc import ABCMeta
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import cache, partial
from inspect import Parameter, getattr_static, signature, unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from activations_cuda import functional, modules
from activations_cuda.recipes.scope import Options, recompute

OURS: dict[type, type] = {getattr(nn, name): getattr(modules, name) for name in modules.__all__}
ORIGINALS = {ours: original for original, ours in OURS.items()}


# The function that a class of torch.nn calls: leaky_relu of LeakyReLU.
FUNCTIONS = {kind: name for kind in OURS for name in functional.__all__ if name.replace("_", "") == kind.__name__.lower()}


def _unless_patched(function):
    """None in place of somebody's patch."""
    if isinstance(function, types.FunctionType) and function.__globals__["__name__"].startswith("torch."):
        return function
    return function if isinstance(function, (types.BuiltinFunctionType, types.MethodDescriptorType)) else None


# As they are when this package is imported; somebody may patch them later.
ORIGINAL_FUNCTIONS = {
    (owner, attribute): _unless_patched(getattr(owner, attribute, None))
    for name in functional.__all__
    for attribute in (name, name + "_")
    for owner in (nn.functional, torch, torch.Tensor)
}


def is_patched(name: str) -> bool:
    """Whether torch.nn.functional's function isn't PyTorch's any more: what its module computes is somebody's own."""
    return getattr(nn.functional, name) is not ORIGINAL_FUNCTIONS[nn.functional, name]


@cache
def replacements_of(names: frozenset[str]) -> dict[Callable[..., Any], Callable[..., Any]]:
    """What to call in place of torch.relu, torch.Tensor.relu_, torch.nn.functional.leaky_relu_ and their like."""
    table: dict[Callable[..., Any], Callable[..., Any]] = {}
    for (_, attribute), original in ORIGINAL_FUNCTIONS.items():
        name = attribute.removesuffix("_")
        if name in names and original:
            ours = getattr(functional, name)
            table[original] = ours if name == attribute else partial(ours, inplace=True)
    return table


def _has_tensors_rule(kind):
    return getattr(kind.__torch_function__, "__func__", None) is Tensor.__torch_function__.__func__


class FunctionMode(TorchFunctionMode):
    """Calls this package's functions of these names in place of PyTorch's."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self.functions = replacements_of(names)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        ours = self.functions.get(func)
        # torch.threshold can write to another tensor, and torch.relu's input has other names; a subclass may have a rule of its
        # own, and torch.fx traces with no tensor.
        is_ours = ours is not None and "out" not in kwargs and (args or "input" in kwargs)
        if not is_ours or not all(map(_has_tensors_rule, types)):
            return func(*args, **kwargs)
        return ours(*args, **kwargs) if self.is_meant() else func(*args, **kwargs)

    def is_meant(self):
        return True


MODULE_CALL = unwrap(nn.Module._call_impl).__code__  # somebody may have wrapped it before
CHECKPOINT = unwrap(checkpoint).__code__


def callers(*codes: types.CodeType | None) -> Iterator[types.FrameType]:
    """The frames that run one of these, the innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame:
        if frame.f_code in codes:
            yield frame
        frame = frame.f_back


class _ForwardMode(FunctionMode):
    def is_meant(self):
        if is_dynamo_compiling():  # a part of the forward
            return False
        frame = next(callers(FORWARD, MODULE_CALL, CHECKPOINT), None)
        return frame is not None and frame.f_code is FORWARD and frame.f_locals.get("mode") is self


# The methods of a converted class, in its own dict: with a second base the layout of its instances would change, and a module's
# `__class__` couldn't be set.


def _repr(self):
    kind = self._fastact_class
    names = [*sorted(kind._fastact_names), *(["recompute"] if kind._fastact_options else [])]
    # Of _get_name() alone, which stays the class's own: transformers' Trainer knows a language model by it.
    text, name = super(kind, self).__repr__(), self._get_name()
    return text.replace(name, f"{name}[{', '.join(f'activations_cuda.{each}' for each in names)}]", 1)


def _reduce_ex(self, protocol):
    ours, kind = self._fastact_class, type(self)
    registered = copyreg.dispatch_table.get(original_of(kind))
    reduced = registered(self) if registered else super(ours, self).__reduce_ex__(protocol)
    if kind is not ours or isinstance(reduced, str):  # derived from one of ours; the name of a global
        return reduced
    make, arguments, *rest = reduced
    # Without the class itself, which no Python module holds.
    own = _with_original(kind, (make, *arguments))
    return _made, (original_of(kind), (kind._fastact_names, kind._fastact_options), *own), *rest


def _with_original(kind, value):
    """A value that a module is made again from, with the original of its class."""
    if type(value) is tuple:
        return tuple(_with_original(kind, each) for each in value)
    if isinstance(value, types.MethodType) and value.__self__ is kind:
        return getattr(original_of(kind), value.__name__)
    return original_of(kind) if value is kind else value


def _made(original, what, make, *arguments):
    """Makes a module of its own class, then one of ours of it."""
    module = make(*arguments)
    if type(module) is original:
        set_class(module, _converted_class(original, *what))
    return module


def has_fast_path(module: nn.Module) -> bool:
    """Whether it runs other kernels where nothing needs a gradient, unless there is a function mode."""
    kinds = nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer
    return isinstance(module, kinds) and not module.training


def _forward(self, *args, **kwargs):
    ours = getattr(type(self), "_fastact_class", None)
    if ours is None:  # reverted, while somebody has this method
        return type(self).forward(self, *args, **kwargs)
    forward = super(ours, self).forward
    # Without a gradient nothing is saved, and PyTorch's fast paths for inference step aside where there is a mode.
    if not torch.is_grad_enabled() or is_dynamo_compiling() or functional.is_exporting() or torch.jit.is_tracing():
        return forward(*args, **kwargs)
    mode_or_none = nullcontext() if has_fast_path(self) else ours._fastact_mode
    with ours._fastact_scope, mode_or_none as mode:  # noqa: F841, which is_meant looks for
        return forward(*args, **kwargs)


FORWARD = _forward.__code__


def _signature(original):
    """That of a method in place of its forward, which may be a static one, a class's or any callable."""
    found, forward = signature(original.forward), getattr_static(original, "forward")
    if isinstance(forward, (staticmethod, classmethod)) or not hasattr(type(forward), "__get__"):
        return found.replace(parameters=[Parameter("self", Parameter.POSITIONAL_ONLY), *found.parameters.values()])
    return found


def _converted_class(original, names, options):
    """The subclass of `original` for these names. Only its instances hold it."""
    for kind in type.__subclasses__(original):
        if (vars(kind).get("_fastact_names"), vars(kind).get("_fastact_options")) == (names, options):
            return kind
    if hasattr(original, "_fastact_class"):
        raise TypeError(
            f"convert: expected a class that isn't derived from a converted one, got {original.__name__}: convert once, before "
            "fully_shard and whatever else derives classes"
        )
    forward = functools.update_wrapper(types.FunctionType(FORWARD, globals(), "forward"), original.forward, updated=())
    with suppress(Exception):  # for what doesn't look behind a wrapper
        forward.__signature__ = _signature(original)
    kind = subclass(
        original,
        {
            "_fastact_original": original,
            "_fastact_names": names,
            "_fastact_options": options,
            "_fastact_mode": _ForwardMode(names) if names else nullcontext(),
            "_fastact_scope": recompute(**options._asdict()) if options else nullcontext(),
            "__prepare_scriptable__": modules.Activation.__prepare_scriptable__,
            "__reduce_ex__": _reduce_ex,
            "__repr__": _repr,
            "forward": forward,
        },
    )
    type.__setattr__(kind, "_fastact_class", kind)  # past a user's metaclass
    return kind


class _Unregistered(nn.Module):
    """In front of a class whose hook is meant only for the user's own subclasses."""

    def __init_subclass__(cls, **kwargs):
        pass


def subclass(original: type, members: dict[str, Any]) -> type:
    """A class derived from another, named as that."""
    named = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    hook = getattr(original.__init_subclass__, "__func__", None)
    bases = (original,) if hook is None or hook.__module__ == "typing" else (_Unregistered, original)
    # Past a user's metaclass, which may check or register the classes that it makes. ABCMeta keeps state for each class.
    new = ABCMeta.__new__ if issubclass(type(original), ABCMeta) else type.__new__
    return new(type(original), original.__name__, bases, named | members)


def original_of(kind: type) -> type:
    """The class that a module had before it was converted. What others have derived from a replacement is theirs."""
    return vars(kind).get("_fastact_original", ORIGINALS.get(kind, kind))


def is_converted(module: nn.Module) -> bool:
    return original_of(type(module)) is not type(module)


def scope_options(module: nn.Module) -> Options | None:
    """The options of the scope within which its forward runs, if it does."""
    return vars(type(module)).get("_fastact_options")


def is_derived(module: nn.Module) -> bool:
    """Whether its class derives from a converted one: fully_shard makes such, and parametrizations do."""
    return getattr(type(module), "_fastact_class", type(module)) is not type(module)


def class_for(module: nn.Module, names: frozenset[str], options: Options | None = None) -> type:
    """The class whose forward calls this package's functions of these names, and saves recipes."""
    original = original_of(type(module))
    return OURS.get(original) or _converted_class(original, names, options)


def _bound_forwards(module):
    """The attributes that are its class's forward: accelerate's hooks keep it for a forward of the module's own to call."""
    for name, value in list(vars(module).items()):
        if type(value) is types.MethodType and value.__self__ is module and value.__func__ is type(module).forward:
            yield name


def set_class(module: nn.Module, kind: type) -> None:
    bound = list(_bound_forwards(module))
    vars(object)["__class__"].__set__(module, kind)  # past a `__setattr__` or a `__class__` of the module's own
    for name in bound:
        vars(module)[name] = types.MethodType(kind.forward, module)  # type: ignore[attr-defined]


def is_property(module: nn.Module) -> bool:
    """Whether its forward is what a property returns, which takes the place of any forward in its class."""
    forward = getattr_static(original_of(type(module)), "forward", None)
    return isinstance(forward, (property, functools.cached_property))


def calls_its_class(module: nn.Module) -> bool:
    """Whether calling the module calls the forward of its class, and so that of any class that it gets."""
    if is_property(module):
        return False
    # accelerate's hooks call `_old_forward`; what its prepare keeps, `_original_forward`, is called by nobody.
    return "forward" not in vars(module) or any(name in ("forward", "_old_forward") for name in _bound_forwards(module))
