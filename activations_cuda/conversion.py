"""Puts the family in the place of PyTorch's own activations: in a model's modules, or in the functions that it calls."""

import logging
from collections import Counter
from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from activations_cuda import functional, modules

__all__ = ["ConvertMode", "convert", "converted", "revert"]

OURS = {getattr(nn, name): getattr(modules, name) for name in modules.__all__}
PYTORCHS = {ours: pytorchs for pytorchs, ours in OURS.items()}

# All but ReLU: PyTorch's keeps its output for backward, which the next layer mostly keeps too. There one bit per element is not
# in the place of an activation but on top of one.
BY_DEFAULT = tuple(pytorchs for pytorchs in OURS if pytorchs is not nn.ReLU)

log = logging.getLogger(__name__)


def _names(classes):
    return ", ".join(sorted(kind.__name__ for kind in classes))


def _check_classes(name, classes):
    classes = tuple(classes)
    for kind in classes:
        if kind not in OURS:
            raise ValueError(f"{name}: expected classes of torch.nn among {_names(OURS)}, got {kind}")
    return classes


def check_model(name, model):
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}: expected a torch.nn.Module, got {type(model).__name__}")


def _swap(name, model, table):
    """Changes the class of the modules themselves: who holds one, its hooks, flags and name stay as they are."""
    check_model(name, model)
    found = [module for module in model.modules() if type(module) in table]
    if not found:
        others = Counter(
            f"{type(m).__module__.split('.')[0]}.{type(m).__name__}" for m in model.modules() if type(m) in {*OURS, *PYTORCHS}
        )
        there = ", ".join(f"{count} {kind}" for kind, count in others.items()) or "no activation of the family"
        raise ValueError(f"{name}: expected a model with modules of exactly the class {_names(table)}, got one with {there}")
    counts = Counter(type(module).__name__ for module in found)
    for module in found:
        module.__class__ = table[type(module)]
    log.info("%s: %s", name, ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return model


def convert(model: nn.Module, classes: Iterable[type] = BY_DEFAULT) -> nn.Module:
    """Let a model's activations keep one bit per element for backward: the same numbers, in less memory.

    Works in place, on every module of exactly one of these classes: a subclass of yours is left alone, as are functions that a
    ``forward`` calls (for those there is :class:`ConvertMode`). Shared modules stay shared; hooks, the training flag and
    whatever else a module holds stay.

    Args:
        model: any module, an activation itself included.
        classes: the classes of torch.nn to convert. By default Hardshrink, Hardsigmoid, Hardtanh, LeakyReLU, ReLU6, Softshrink
            and Threshold, but not ReLU: it mostly costs no memory, since the next layer keeps its output anyway.

    Returns:
        The model. How many of which class were converted is logged (level INFO); :func:`converted` counts them.

    Raises:
        TypeError: not a module.
        ValueError: nothing to convert, or a class that isn't in the family.
    """
    return _swap("convert", model, {kind: OURS[kind] for kind in _check_classes("convert", classes)})


def revert(model: nn.Module) -> nn.Module:
    """Undo :func:`convert`: every module of this package is one of torch.nn again.

    Args:
        model: any module.

    Returns:
        The model.

    Raises:
        TypeError: not a module.
        ValueError: nothing to revert.
    """
    return _swap("revert", model, PYTORCHS)


def converted(model: nn.Module) -> Counter[str]:
    """How many modules of this package a model has.

    Args:
        model: any module.

    Returns:
        A count for each name of a class.

    Raises:
        TypeError: not a module.
    """
    check_model("converted", model)
    return Counter(type(module).__name__ for module in model.modules() if type(module) in PYTORCHS)


def _functions(classes):
    """What to call in the place of torch.relu, torch.Tensor.relu_, torch.nn.functional.leaky_relu_ and their like."""
    table = {}
    for name in functional.__all__:
        if name.replace("_", "") not in {kind.__name__.lower() for kind in classes}:
            continue
        ours = getattr(functional, name)
        for owner in (nn.functional, torch, torch.Tensor):
            for pytorchs, replacement in ((name, ours), (name + "_", partial(ours, inplace=True))):
                if hasattr(owner, pytorchs):
                    table[getattr(owner, pytorchs)] = replacement
    return table


class ConvertMode(TorchFunctionMode):
    """Within it PyTorch's activation functions are this package's: ``F.relu6``, ``torch.relu_``, what ``nn.Hardtanh`` calls.

    For models that call functions where :func:`convert` needs modules::

        with activations_cuda.ConvertMode():
            loss = model(images).sum()

    Args:
        classes: the classes of torch.nn whose functions are meant, as for :func:`convert`.

    Raises:
        ValueError: a class that isn't in the family.
    """

    def __init__(self, classes: Iterable[type] = BY_DEFAULT) -> None:
        super().__init__()
        self.functions = _functions(_check_classes("ConvertMode", classes))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self.functions and "out" not in kwargs:
            func = self.functions[func]
        return func(*args, **kwargs)
