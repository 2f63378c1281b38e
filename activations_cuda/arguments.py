"""The model and the inputs that a user gives: what is refused, and what they stand for."""

import sys
from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from activations_cuda.recipes.scope import Options
from activations_cuda.replacements import original_of

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
    while (inner := wrapped(model)) is not None:
        if issubclass(type(model), PARALLEL) and (device_ids := cast(Any, model).device_ids):  # none on the CPU
            return tree_map_only(Tensor, lambda tensor: tensor if tensor.is_meta else tensor.to(device_ids[0]), inputs)
        model = inner
    return inputs


def state_of(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers, also of a class with a method of its own by these names."""
    return [*nn.Module.parameters(model), *nn.Module.buffers(model)]


def check_model(name: str, model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{name}: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"{name}: expected a torch.nn.Module of Python code, got one of TorchScript: call it before torch.jit")


def check_initialized(name: str, model: nn.Module) -> None:
    if any(map(is_lazy, state_of(model))):
        raise ValueError(f"{name}: expected a model whose parameters are initialized, got a lazy one: call it once")


def _check_options(name, forward, args, kwargs):
    """What is an argument of recompute() isn't taken for an input."""
    options = set(Options._fields) & set(kwargs)
    try:
        parameters = signature(forward).parameters if options else {}
    except (TypeError, ValueError):  # it has no signature
        return
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    for option in options - set(parameters):
        if not takes_any or not (args or set(kwargs) - options):  # a call without any input
            raise TypeError(
                f"{name}: expected inputs of the model, got {option}, an argument of recompute(): pass "
                f"recompute=activations_cuda.recompute({option}={kwargs[option]!r})"
            )


def arguments_of(
    name: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], example_inputs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a model's forward: these, or if there is one alone, those that it stands for."""
    for each in args:
        several = each if isinstance(each, (tuple, list)) else (each,)
        if any(isinstance(item, type) for item in several):
            raise TypeError(f"{name}: expected example inputs, got a class: name classes by keyword, classes=...")
    if example_inputs is not None:
        args = (*args, example_inputs)
    (inputs,) = args if len(args) == 1 else (args,)
    hint = ""
    if len(args) == 1 and isinstance(inputs, (Mapping, tuple, list)):
        hint = f"; one {type(inputs).__name__} stands for several arguments: if the model takes one, wrap it in a tuple"
    if isinstance(inputs, Mapping):
        args, kwargs = (), {**inputs, **kwargs}
    elif isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields"):  # a named tuple is one argument
        args = tuple(inputs)
    elif isinstance(inputs, (int, float, str)):
        kind = type(inputs).__name__
        raise TypeError(f"{name}: expected example inputs to be tensors, a tuple of arguments or a dict, got {kind}")
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    if any(isinstance(module, fsdp) for module in nn.Module.modules(model)):  # past a `modules` of the model's own
        raise TypeError(f"{name}: expected a model that isn't wrapped yet, got FullyShardedDataParallel: call {name} before it")
    called = unwrapped(model)
    _check_options(name, called.forward, args, kwargs)
    forward = vars(called).get("forward", cast(Any, original_of(type(called))).forward)
    is_plain = type(called).__call__ is nn.Module.__call__ and not hasattr(forward, "__wrapped__")
    if is_plain and not called._forward_pre_hooks:  # which may add arguments
        try:
            signature(called.forward).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}: expected the arguments of the model's forward ({error}){hint}") from None
        except ValueError:  # it has no signature
            pass
    return moved_by_wrapper(model, (args, kwargs))
