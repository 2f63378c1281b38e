"""Puts the family in place of PyTorch's own activations: in a model's modules, or in the functions that it calls."""

import gc
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from activations_cuda import _C
from activations_cuda.arguments import arguments_of, check_initialized, check_model, unwrapped
from activations_cuda.recipes.scope import is_suspended, options_of
from activations_cuda.recipes.scope import recompute as Scope
from activations_cuda.replacements import (
    FUNCTIONS,
    ORIGINALS,
    OURS,
    FunctionMode,
    calls_its_class,
    class_for,
    is_converted,
    is_derived,
    is_patched,
    is_property,
    original_of,
    scope_options,
    set_class,
)
from activations_cuda.survey import Survey, can_convert, log, summary

__all__ = ["ConvertMode", "convert", "converted", "revert"]

Model = TypeVar("Model", bound=nn.Module)


def pays_by_default(kind: type, inplace: bool, in_scope: bool = False) -> bool:
    """Whether an activation of torch.nn is worth converting, as far as one can say without inputs.

    PyTorch's ReLU saves its output for backward, which the next layer usually saves too: the bits would come on top. A smooth
    activation pays where the next layer saves the output, and costs a second tensor where it doesn't; in a scope of recompute()
    it saves its input, as PyTorch's does, and in place needs no copy of it.
    """
    activation = _C.family[FUNCTIONS[kind]]
    saves_input = activation.pytorch_saves == "input" or (activation.pytorch_saves == "output in place" and not inplace)
    return saves_input and (in_scope or not activation.saves_output)


def _check_classes(name, classes):
    classes = (classes,) if isinstance(classes, (type, str)) or not isinstance(classes, Iterable) else tuple(classes)
    for kind in classes:
        if not isinstance(kind, type) or kind not in OURS:
            among = ", ".join(sorted(kind.__name__ for kind in OURS))
            is_input = isinstance(kind, (torch.Tensor, list, tuple, dict))
            given = f"{type(kind).__name__} (inputs of that name go in a dict)" if is_input else repr(kind)
            raise ValueError(f"{name}: expected classes of torch.nn among {among}, got {given}")
    return classes


def _is_of_lightning(of):
    return str(getattr(of, "__module__", "")).startswith(("lightning.pytorch.", "pytorch_lightning."))


def _check_forward(model):
    """A class that is derived from the model's own must be what is called."""
    kind = original_of(type(model))
    of_lightning = _is_of_lightning(kind.forward)
    if kind.forward is nn.Module.forward or of_lightning or isinstance(model, torch.fx.GraphModule):
        net = "convert the net that it calls, or use" if of_lightning else "use"
        got = "a torch.fx.GraphModule" if isinstance(model, torch.fx.GraphModule) else kind.__name__
        raise ValueError(
            f"convert: with recompute=True expected a model whose class has a forward, got {got}: {net} "
            "`with activations_cuda.recompute():` around the forward pass"
        )
    if is_suspended(kind.forward):
        raise ValueError(
            f"convert: with recompute=True expected a plain function as forward, got {kind.__name__}'s, a generator or "
            "coroutine, whose code runs after the scope has ended"
        )
    if is_property(model):
        raise ValueError(f"convert: with recompute=True expected a method as forward, got {kind.__name__}'s, a property")
    if not calls_its_class(model):
        raise ValueError(
            "convert: expected a model that calls its class's forward, got one with its own: convert it before accelerate's "
            "prepare, or whatever else sets a forward"
        )
    if any(map(_is_of_lightning, kind.__mro__)):
        warnings.warn(
            f"convert: with recompute=True only {kind.__name__}'s forward runs within the scope, which Lightning doesn't call: "
            "if training_step doesn't either, convert the net that it calls",
            stacklevel=3,
        )


def _counted(classes):
    return ", ".join(f"{count} {name}" for name, count in Counter(kind.__name__ for kind in classes).items())


def convert(
    model: Model,
    *inputs: Any,
    classes: type | Iterable[type] | None = None,
    example_inputs: Any = None,
    recompute: bool | Scope = False,
    **keyword_inputs: Any,
) -> Model:
    """Let a model's activations save less for backward: the same numbers, in less memory.

    Called with the inputs of the model's forward pass, ``convert(model, x, mask=mask)``, it runs that pass once on a copy of
    the model and on fake tensors, finds out which layers save which tensors, and converts exactly those calls whose conversion
    lowers what autograd saves. The pass takes about a second and needs no GPU and little memory; if it fails on fake tensors,
    e.g. because it depends on values, it runs on copies of the parameters. It reaches modules of any class whose forward calls
    one of PyTorch's activations, as a function or as a method. Training mode, frozen parameters and autocast are taken as they
    are at the call.

    Without inputs, modules of exactly the default ``classes`` below are converted, except LeakyReLU in place: like ReLU, it
    saves its output, which the next layer usually saves too.

    Works in place and changes the modules' classes: an activation gets this package's of the same name, any other module a
    subclass of its own class. Shared modules stay shared, and hooks, the training flag, parameters and buffers stay. If another
    model holds the same activation module, it stays unconverted there, unless both models share the block around it.
    :func:`revert` undoes it all.

    Args:
        model: any module, an activation itself included.
        inputs: the arguments of a forward pass; or one tuple or list of them, or one dict of keyword arguments. If the model
            takes one list or dict, pass it in a tuple: ``convert(model, (batch,))``. Of tensors,
            only shapes, strides, dtypes and requires_grad matter: they may be on the meta device, and so may the model.
        classes: the classes of torch.nn to convert; with inputs, the functions of the same names too. By default Hardshrink,
            Hardsigmoid, Hardtanh, LeakyReLU, ReLU6, Softshrink and Threshold; with inputs, also ReLU, GELU, SiLU, Hardswish and
            Mish.
        example_inputs: the inputs, by keyword.
        recompute: whether the model's forward runs within :func:`recompute`, for training loops that aren't yours to edit, or a
            scope, whose options are used and whose model is ignored:
            ``recompute=activations_cuda.recompute(convolutions=True)``. Later calls of ``convert`` keep it, until
            :func:`revert`. All smooth activations are converted then, without inputs all modules of them: their outputs are
            recomputed, and in place they don't copy their input.
        keyword_inputs: keyword arguments of the forward pass.

    Returns:
        The model. What was converted, what was left alone and why, is logged in one line (logger ``activations_cuda``, level
        INFO), or printed if nothing handles logs; where nothing is converted, it is a warning. :func:`converted` counts the
        modules, :func:`memory_report` lists them.

    Raises:
        TypeError: not a module, a scripted one, with inputs an FSDP1-wrapped one, inputs that the model's forward doesn't take,
            ``recompute`` that is neither a bool nor a scope, or a class derived from a converted one, e.g. by fully_shard.
        ValueError: a class that this package doesn't replace, ``classes`` were named and the model has none of them to
            convert, a lazy module that hasn't been called yet, or with ``recompute`` a model whose class has no plain forward
            (a GraphModule, a generator, coroutine or property) or that has a forward of its own.
        RuntimeError: the forward pass depends on the values of tensors on the meta device, or calls a transform of torch.func.
    """
    check_model("convert", model)
    named = None if classes is None else _check_classes("convert", classes)
    options = options_of("convert", recompute)
    surveyed = bool(inputs or keyword_inputs) or example_inputs is not None
    if surveyed or options:
        check_initialized("convert", model)
    if options:
        _check_forward(unwrapped(model))
    in_scope = bool(options or scope_options(unwrapped(model)))  # by an earlier call
    if surveyed:
        args, kwargs = arguments_of("convert", model, inputs, keyword_inputs, example_inputs)
        considered = frozenset(map(FUNCTIONS.__getitem__, OURS if named is None else named))
        found = Survey(model, args, kwargs, considered, in_scope)
        functions, lines = found.converts(), summary(found.decisions())
        are_all_ours = bool(found.calls) and all(call.is_ours for call in found.calls)
    else:
        activations = [module for module in nn.Module.modules(model) if original_of(type(module)) in OURS]
        functions, lines = _chosen_by_class(activations, named, in_scope)
        are_all_ours = bool(activations) and all(map(is_converted, activations))
    if named and not functions:
        wanted = ", ".join(kind.__name__ for kind in named)
        raise ValueError(f"convert: expected a model with {wanted} to convert, got one with {'; '.join(lines)}")
    functions = {_original_of_twin.get(module, module): names for module, names in functions.items()}
    scoped = {}
    if surveyed or options:
        scoped = {module: each for module in nn.Module.modules(model) if (each := scope_options(module))}  # by an earlier call
    if options and original_of(type(unwrapped(model))) not in OURS:
        scoped[unwrapped(model)] = options
    if scoped:
        whose = "the model's forward runs" if unwrapped(model) in scoped else "forwards of submodules run"
        lines.append(f"{whose} within recompute()")
    modules = {*functions, *scoped}
    kinds = {module: class_for(module, functions.get(module, frozenset()), scoped.get(module)) for module in modules}
    is_in_vain = not functions and not in_scope and not are_all_ours and named is None
    if is_in_vain:  # before anything changes: it may be an error
        warnings.warn(f"convert: nothing to convert: {'; '.join(lines)}", stacklevel=2)
    _apply(model, kinds, anew=bool(surveyed or options))
    if not is_in_vain:
        _say("convert: %s", "; ".join(lines))
    return model


def _chosen_by_class(activations, named, in_scope):
    """The functions to replace in each of these modules, and what was decided, in words."""
    functions = {}
    for module in activations:
        kind = original_of(type(module))
        is_meant = pays_by_default(kind, getattr(module, "inplace", False), in_scope) if named is None else kind in named
        if is_meant and can_convert(module):
            functions[module] = frozenset([FUNCTIONS[kind]])
    if functions:
        return functions, [f"{_counted(original_of(type(module)) for module in functions)} converted"]
    if not activations:
        return functions, ["no activation module: pass example inputs to reach functions"]
    if named is not None and (kinds := [kind for module in activations if (kind := original_of(type(module))) in named]):
        patched = sorted({FUNCTIONS[kind] for kind in kinds if is_patched(FUNCTIONS[kind])})
        reason = f"torch.nn.functional.{patched[0]} was replaced" if patched else "a forward of its own was set"
        return functions, [f"{_counted(kinds)} left alone: {reason}"]
    reason = "" if in_scope or named is not None else ": pass example inputs to find out whether converting them saves memory"
    return functions, [f"{_counted(map(type, activations))} left alone{reason}"]


def _say(message, *arguments):
    """To whatever handles logs, or else to stderr."""
    if log.hasHandlers():
        log.info(message, *arguments)
    elif sys.stderr and log.level <= logging.INFO and not log.disabled and log.manager.disable < logging.INFO:
        with suppress(OSError, ValueError):  # it is closed
            print(f"activations_cuda.{message % arguments}", file=sys.stderr)


FROZEN_AT_FIRST = gc.get_freeze_count()  # Python 3.12 starts with some

# The activations that others stand for in a model's tree, since another model has the same ones.
_original_of_twin: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


def _apply(model, kinds, anew):
    """Give each module its new class, after undoing earlier conversions or on top of them; or leave all as it was."""
    before = [(module, type(module), [*module._modules.items()]) for module in nn.Module.modules(model)]
    try:
        if anew:
            revert_all(model)
        _replace(model, kinds)
    except BaseException:  # of a class whose instances can have no other, or an interrupt
        for module, kind, children in before:
            for name, child in children:
                if module._modules[name] is not child:
                    module._modules[name] = child
            if type(module) is not kind:
                set_class(module, kind)
        raise


def _replace(model, kinds):
    activations = [module for module in kinds if type(module) in OURS and "forward" not in vars(module)]
    twins = {module: _twin(module, OURS[type(module)]) for module in _held_elsewhere(model, activations)}
    for module, kind in kinds.items():
        if module not in twins:
            set_class(module, kind)
    _original_of_twin.update({twin: module for module, twin in twins.items()})
    _exchange(model, twins)


def _held_elsewhere(model, modules):
    """Those that are children of a module outside of the model's tree too, or were until a twin took their place there."""
    if gc.get_freeze_count() > FROZEN_AT_FIRST:  # what is frozen isn't found
        return [module for module in modules if module is not model]
    found = _children_elsewhere(model, modules)
    if found:  # maybe of a model that is garbage
        gc.collect()
        found = _children_elsewhere(model, found)
    return found


def _children_elsewhere(model, modules):
    own = {id(module._modules) for module in nn.Module.modules(model)}
    others = {id(each): each for each in gc.get_referrers(*modules) if isinstance(each, dict) and id(each) not in own}
    owners = gc.get_referrers(*others.values()) if others else []
    attributes = [vars(each) if isinstance(each, nn.Module) else each for each in owners]
    children = [each["_modules"] for each in attributes if type(each) is dict and id(each.get("_modules")) in others]
    held = {id(value) for each in children for value in dict.values(each)} | set(map(id, _original_of_twin.values()))
    return [module for module in modules if module is not model and id(module) in held]


def _twin(module, kind):
    twin = object.__new__(kind)
    object.__setattr__(twin, "__dict__", vars(module))
    return twin


def _exchange(model, twins):
    for module in list(nn.Module.modules(model)):
        for name, child in module._modules.items():
            if child in twins:
                module._modules[name] = twins[child]


def revert_all(model: nn.Module) -> None:
    """Undo conversion, without a word."""
    found = list(filter(is_converted, nn.Module.modules(model)))
    twins = {module: _original_of_twin[module] for module in found if module in _original_of_twin}
    for module in found:
        if module not in twins:
            set_class(module, original_of(type(module)))
    _exchange(model, twins)


def revert(model: Model) -> Model:
    """Undo :func:`convert`: every module has its own class again. Modules that you created from this package's classes become
    torch.nn's too.

    Args:
        model: any module, converted or not.

    Returns:
        The model. What was reverted is logged, as by :func:`convert`.

    Raises:
        TypeError: not a module.
    """
    check_model("revert", model)
    kinds = _counted(type(module) for module in filter(is_converted, nn.Module.modules(model)))
    names = {module: name or type(module).__name__ for name, module in nn.Module.named_modules(model)}
    hidden = [name for module, name in names.items() if type(module) in ORIGINALS and not calls_its_class(module)]
    derived = [name for module, name in names.items() if is_derived(module)]
    revert_all(model)
    _say("revert: %s", kinds or "nothing")
    for found, what in (
        (hidden, "a forward that was set on the module may still call this package's; set it anew"),
        (
            derived,
            "of a class that was derived since from the converted one, as by fully_shard or a parametrization: still "
            "converted; revert before fully_shard, and again after removing a parametrization",
        ),
    ):
        if found:
            warnings.warn(f"revert: {', '.join(found)}: {what}", stacklevel=2)
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
    return Counter(type(module).__name__ for module in nn.Module.modules(model) if is_converted(module) or is_derived(module))


class ConvertMode(FunctionMode):
    """Context manager that replaces PyTorch's activation functions, e.g. ``F.relu6`` and what ``nn.Hardtanh`` calls, by this
    package's.

    For calls outside of a model, which :func:`convert` doesn't reach::

        with activations_cuda.ConvertMode():
            y = F.relu6(F.conv2d(images, weight))

    An activation in a function that a checkpoint with ``use_reentrant=False`` runs within it raises an error in backward:
    convert the model instead.

    Args:
        classes: the classes of torch.nn whose functions are meant. By default Hardshrink, Hardsigmoid, Hardtanh, ReLU6,
            Softshrink and Threshold.

    Raises:
        ValueError: a class that this package doesn't replace.
    """

    def __init__(self, classes: type | Iterable[type] | None = None) -> None:
        pay_in_place = (kind for kind in FUNCTIONS if pays_by_default(kind, inplace=True))
        named = pay_in_place if classes is None else _check_classes("ConvertMode", classes)
        super().__init__(frozenset(FUNCTIONS[kind] for kind in named))
