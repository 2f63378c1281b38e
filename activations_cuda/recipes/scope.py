"""The scope within which autograd saves recipes."""

import functools
import threading
from collections.abc import Callable
from inspect import isasyncgenfunction, isclass, iscoroutinefunction, isgeneratorfunction
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from activations_cuda import _C
from activations_cuda.recipes.hook import Hook, sharding, unpack
from activations_cuda.recipes.verification import report

Function = TypeVar("Function", bound=Callable[..., Any])

_autograd = torch._C._autograd


def is_suspended(function: Callable[..., Any]) -> bool:
    """Whether a call of it returns before its code has run."""
    kinds = isgeneratorfunction, iscoroutinefunction, isasyncgenfunction
    return any(is_kind(each) for is_kind in kinds for each in (function, type(function).__call__))


class _Entered(threading.local):
    def __init__(self) -> None:
        self.hooks: list[Hook | None] = []


_entered = _Entered()


class Options(NamedTuple):
    """What :class:`recompute` is called with beside a model."""

    check: bool = False
    convolutions: bool = False


class recompute:
    """Context manager and decorator within which autograd doesn't save what follows from other saved tensors: the same
    gradients, to the bit, in less memory.

    For the forward pass and the loss::

        with activations_cuda.recompute():
            loss = criterion(model(images), labels)
        loss.backward()

    The output of an inexpensive op, such as a normalization, an activation, an addition or a cast, whose operands are saved
    anyway is replaced by a recipe, and computed again when the backward pass needs it. Each recipe is compared with its tensor
    when the op first runs with given sizes, dtypes and layouts; where they differ, the tensor is saved as usual. So are tensors
    smaller than 16 KiB. The model isn't modified. The scope holds for the calling thread and may be entered again within
    itself. It has no effect while TorchScript traces, nor if entered under torch.compile, in a transform of torch.func, or in a
    function that non-reentrant checkpoint runs; within it, torch.func.grad and its like raise PyTorch's error.

    Args:
        model: the module; if given, the error of ``check`` names the part of it that saved the tensor.
        check: compare every recipe with its tensor, in every step, and raise an error where they differ.
        convolutions: recompute depthwise convolutions too, which take little longer than a copy.

    Raises:
        RuntimeError: at the end of a scope with ``check=True``, if a recipe gave other bits. In backward, as autograd would, if
            what a recipe reads or replaced was written to in place since. If a scope ends in another thread than the one in
            which it began.
        TypeError: ``model`` isn't a module, or what is decorated isn't a function, or is a class, a generator or a coroutine.
    """

    def __init__(self, model: nn.Module | None = None, *, check: bool = False, convolutions: bool = False) -> None:
        if model is not None and not isinstance(model, nn.Module):
            hint = ": as a decorator it is called, @recompute()" if callable(model) else ""
            raise TypeError(f"recompute: expected a torch.nn.Module, got {type(model).__name__}{hint}")
        self.model, self.options = model, Options(check, convolutions)

    def _hook(self, outer):
        """What to have autograd call, or None where this scope does nothing."""
        if not _autograd._saved_tensors_hooks_is_enabled():  # within torch.func's transforms
            return None
        check, convolutions = self.options
        if outer is None:
            return Hook(self.model, check, None, convolutions)
        if getattr(outer[0], "__module__", "") == "torch.utils.checkpoint":
            return None  # saves nothing itself, and counts what its function saves
        around = getattr(outer[0], "__self__", None)
        if isinstance(around, Hook):
            model = around.model if self.model is None else self.model
            convolutions = convolutions or around.convolutions
            return Hook(model, check or around.check, around.outer, convolutions, begins=around.begins)
        return Hook(self.model, check, outer, convolutions)

    def __enter__(self) -> "recompute":
        if not is_dynamo_compiling():
            hook = self._hook(_autograd._top_saved_tensors_default_hooks(True))
            if hook is not None:
                _C.recipes.set_sharding(*sharding())
                _autograd._push_saved_tensors_default_hooks(hook.pack, unpack)
                _C.recipes.enter_scope()
            _entered.hooks.append(hook)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if is_dynamo_compiling():
            return
        if not _entered.hooks:  # as where another thread closes a generator
            raise RuntimeError("recompute: expected a scope to end in the thread in which it began")
        hook = _entered.hooks.pop()
        if hook is not None:
            _C.recipes.exit_scope()
            _autograd._pop_saved_tensors_default_hooks()
            report()
            if hook.mismatch is not None and error is None:
                raise RuntimeError(f"recompute: {hook.mismatch}")

    def __call__(self, function: Function) -> Function:
        if not callable(function):
            hint = ": call the model within it, `with recompute(model):`" if self.model is not None else ""
            raise TypeError(f"recompute: expected a function to decorate, got {type(function).__name__}{hint}")
        if isclass(function):
            raise TypeError(f"recompute: expected a function, got {function!r}: decorate its forward")
        if is_suspended(function):
            raise TypeError(
                f"recompute: expected a plain function, got {function!r}, a generator or coroutine, whose code runs after the "
                "scope has ended: enter the scope within it"
            )

        @functools.wraps(function)
        def within(*args, **kwargs):
            if is_dynamo_compiling():
                return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        return within  # type: ignore[return-value]


def options_of(function: str, given: bool | recompute) -> Options | None:
    """The options of a scope; the defaults for ``True``, None for ``False``."""
    if isinstance(given, recompute):
        return given.options
    if not isinstance(given, bool):
        raise TypeError(f"{function}: expected recompute to be a bool or a scope, activations_cuda.recompute(), got {given!r}")
    return Options() if given else None
