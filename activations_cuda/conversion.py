"""Puts the family in the place of PyTorch's own activations: in a model's modules, or in the functions that it calls."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from activations_cuda import _C
from activations_cuda.replacements import (
    FUNCTIONS,
    OURS,
    functions,
    is_replaced,
    original_of,
    patched,
    replace,
    restore,
    set_class,
)
from activations_cuda.survey import Survey, log, summary

__all__ = ["ConvertMode", "convert", "converted", "revert"]

# PyTorch's ReLU saves its output for backward, which the next layer usually saves too. There the bits would be pure overhead. A
# smooth activation pays where the next layer saves the output, and costs a second tensor where it doesn't.
BY_DEFAULT = tuple(
    kind for kind, name in FUNCTIONS.items() if _C.family[name].pytorch_saves != "output" and not _C.family[name].saves_output
)


def _pays_by_default(function, inplace):
    saves = _C.family[function].pytorch_saves
    return saves == "input" or (saves == "output in place" and not inplace)


def _check_classes(name, classes):
    classes = tuple(classes)
    for kind in classes:
        if kind not in OURS:
            among = ", ".join(sorted(kind.__name__ for kind in OURS))
            raise ValueError(f"{name}: expected classes of torch.nn among {among}, got {kind}")
    return classes


def check_model(name: str, model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}: expected a torch.nn.Module, got {type(model).__name__}")


def as_arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments of a forward pass."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    kind = type(example_inputs).__name__
    raise TypeError(f"convert: expected example_inputs to be a tuple of arguments, a dict or a tensor, got {kind}")


def _counted(classes):
    return ", ".join(f"{count} {name}" for name, count in Counter(kind.__name__ for kind in classes).items())


def convert(
    model: nn.Module,
    classes: Iterable[type] | None = None,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | Tensor | None = None,
) -> nn.Module:
    """Let a model's activations save one bit per element for backward: the same numbers, in less memory.

    Works in place, and changes the modules' classes and those of their attributes that are PyTorch's functions: shared modules
    stay shared, and hooks, the training flag, parameters and buffers stay. :func:`revert` undoes it.

    With ``example_inputs``, one forward pass on fake tensors finds out which layers save which tensors, and exactly those
    modules are converted whose conversion lowers what autograd saves. The pass needs no GPU, no memory and about a second. It
    reaches modules of any class whose code calls one of PyTorch's activation functions, relu included. Training mode, frozen
    parameters and autocast count as they are around the call.

    Without ``example_inputs``, modules of exactly these classes of torch.nn are converted, except LeakyReLU in place: like
    ReLU, it saves its output, which the next layer usually saves too.

    Args:
        model: any module, an activation itself included.
        classes: the classes of torch.nn to convert; with ``example_inputs``, the functions of the same names too. By default
            Hardshrink, Hardsigmoid, Hardtanh, LeakyReLU, ReLU6, Softshrink and Threshold; with ``example_inputs``, also ReLU.
        example_inputs: a tuple of the arguments of a forward pass, a dict of keyword arguments, or one tensor. Of tensors, only
            shapes, strides, dtypes and requires_grad matter: they may be on the meta device, and so may the model.

    Returns:
        The model. What was converted, and with ``example_inputs`` what was left alone and why, is logged (level INFO);
        :func:`converted` counts the modules, :func:`memory_report` lists them.

    Raises:
        TypeError: not a module, or example inputs that are no arguments.
        ValueError: a class that isn't in the family, or ``classes`` were named and the model has none of them to convert.
        RuntimeError: the forward pass depends on the values of tensors on the meta device.
    """
    check_model("convert", model)
    named = None if classes is None else _check_classes("convert", classes)
    if example_inputs is not None:
        found, lines = _convert_what_pays(model, OURS if named is None else named, *as_arguments(example_inputs))
    else:
        theirs = patched()
        found = [
            module
            for module in model.modules()
            if type(module) in (named or BY_DEFAULT)
            and FUNCTIONS[type(module)] not in theirs
            and (named or _pays_by_default(FUNCTIONS[type(module)], getattr(module, "inplace", False)))
        ]
        for module in found:
            set_class(module, OURS[type(module)])
        others = _counted(type(module) for module in model.modules() if original_of(type(module)) in OURS)
        lines = [_counted(map(type, found)) or f"{others or 'no activation of the family'}, left alone"]
    for line in lines:
        log.info("convert: %s", line)
    if named and not found:
        wanted = ", ".join(kind.__name__ for kind in named)
        raise ValueError(f"convert: expected a model with {wanted} to convert, got one with {'; '.join(lines)}")
    return model


def _convert_what_pays(model, classes, args, kwargs):
    """Converts what pays and reverts the rest. Returns the converted modules, and what was decided in words."""
    survey = Survey(model, args, kwargs, frozenset(FUNCTIONS[kind] for kind in classes))
    names = defaultdict(set)
    for module, function in survey.chosen:
        names[module].add(function)
    return [module for module in survey.names if replace(module, names[module])], summary(survey.decisions())


def revert(model: nn.Module) -> nn.Module:
    """Undo :func:`convert`: every module has its own class again.

    Args:
        model: any module, converted or not.

    Returns:
        The model. What was reverted is logged (level INFO).

    Raises:
        TypeError: not a module.
    """
    check_model("revert", model)
    found = list(filter(is_replaced, model.modules()))
    log.info("revert: %s", _counted(map(type, found)) or "nothing")
    for module in found:
        restore(module)
    return model


def converted(model: nn.Module) -> Counter[str]:
    """How many modules of a model compute with this package.

    Args:
        model: any module.

    Returns:
        A count for each name of a class.

    Raises:
        TypeError: not a module.
    """
    check_model("converted", model)
    return Counter(type(module).__name__ for module in filter(is_replaced, model.modules()))


class ConvertMode(TorchFunctionMode):
    """Within it PyTorch's activation functions are this package's: ``F.relu6``, ``torch.relu_``, what ``nn.Hardtanh`` calls.

    For models that call functions where :func:`convert` needs modules::

        with activations_cuda.ConvertMode():
            loss = model(images).sum()

    Args:
        classes: the classes of torch.nn whose functions are meant. By default those that :func:`convert` takes, and as there
            not ``leaky_relu`` in place.

    Raises:
        ValueError: a class that isn't in the family.
    """

    def __init__(self, classes: Iterable[type] | None = None) -> None:
        super().__init__()
        named = BY_DEFAULT if classes is None else _check_classes("ConvertMode", classes)
        self.functions = functions(frozenset(FUNCTIONS[kind] for kind in named))
        self.left_in_place = (
            frozenset()
            if classes
            else frozenset(name for name in map(FUNCTIONS.get, named) if not _pays_by_default(name, inplace=True))
        )

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        ours = self.functions.get(func)
        if ours is None or self._is_left_alone(ours, args, kwargs):
            return func(*args, **kwargs)
        return ours(*args, **kwargs)

    def _is_left_alone(self, ours, args, kwargs):
        if isinstance(ours, partial):
            return ours.func.__name__ in self.left_in_place
        return ours.__name__ in self.left_in_place and signature(ours).bind(*args, **kwargs).arguments.get("inplace", False)
