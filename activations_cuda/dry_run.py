"""A dry run: the forward pass of a model's copy, on fake tensors where they will do, and what autograd saves in it."""

import logging
import os
import random
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.multiprocessing.reductions import StorageWeakRef

from activations_cuda.arguments import state_of
from activations_cuda.copies import ATOMIC, Copier
from activations_cuda.replacements import MODULE_CALL, callers

FAKES_WONT_DO = DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException


def storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """What a tensor's elements lie in; several for a sparse or a nested one, none where a transform or a library hides them."""
    if tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    elif hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    else:
        with suppress(NotImplementedError):
            return [tensor.untyped_storage()]
        return []
    return [storage for part in parts for storage in storages_of(part.detach())]


def own_storages(model: nn.Module) -> set[StorageWeakRef]:
    """Those of its parameters and buffers, which are there anyway."""
    return {StorageWeakRef(part) for tensor in state_of(model) for part in storages_of(tensor)}


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
    package, _, name = getattr(func, "_qualified_op_name", getattr(func, "_name", "")).partition("::")
    return name.partition(".")[0] if package == "fastact" else ""


def overload_and_arguments(func: Any, args: Any, kwargs: Any) -> tuple[str, dict[str, Any]]:
    """The name of the overload of one of this package's ops that is called, and its arguments by their names, defaults too."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        func = getattr(func, torch._C._jit_resolve_packet(func._qualified_op_name, *args, **kwargs))
    names = [argument.name for argument in func._schema.arguments]
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments if argument.has_default_value()}
    return func._overloadname, defaults | dict(zip(names, args, strict=False)) | kwargs


def call_on_fakes(name: str, overload: str, given: dict[str, Any]) -> Any:
    """One of this package's ops, out of place, such that it saves of fake tensors what it saves of real ones."""
    name = name.removesuffix("_")
    with_mask = getattr(torch.ops.fastact, name + "_with_mask", None)
    if with_mask is not None:
        with suppress(NotImplementedError, ValueError):  # dtypes and parameters that are left to PyTorch's op
            return getattr(with_mask, overload)(**given)[0]
    return getattr(getattr(torch.ops.fastact, name), overload)(**given)


@contextmanager
def _randomness_unchanged(tensors):
    """Whatever random numbers a forward pass takes, Python's and numpy's among them."""
    devices = sorted({tensor.get_device() for tensor in tensors if tensor.is_cuda})
    with torch.random.fork_rng(devices), ExitStack() as states:
        states.callback(random.setstate, random.getstate())
        if of_numpy := sys.modules.get("numpy.random"):
            states.callback(of_numpy.set_state, of_numpy.get_state(legacy=False))
        yield


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
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _fakes(device):
    """A function that makes fake tensors like others, and the mode that they belong to."""
    # The mode isn't entered, so what a model creates, such as positions, is real: it may stay in a cache.
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor):
        if tensor.layout is not torch.strided or tensor.is_nested:
            return _clone(tensor)  # what is no fake is written to in earnest
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
    thread, logger = threading.get_ident(), logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(mute := lambda record: record.thread != thread)
    try:
        yield
    finally:
        logger.removeFilter(mute)


# Random states and torch.compile's stance are the whole process's: two threads could restore what the other has set.
_one_at_a_time = threading.RLock()


def _forget_lock():
    """In a child process, which doesn't have the thread that may have held it."""
    global _one_at_a_time
    _one_at_a_time = threading.RLock()


os.register_at_fork(after_in_child=_forget_lock)


def _run(run, copier, model, args, kwargs):
    with _one_at_a_time, _randomness_unchanged(state_of(model)), _uncompiled(), torch.enable_grad():
        try:
            run(copier, model, args, kwargs)
        except Exception as error:  # maybe because it is a copy, as where a global dict has the model for a key
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note("from a copy of the model that activations_cuda ran; convert(model) without inputs runs none")
            raise


@contextmanager
def _interrupts_wait():
    """An interrupt comes after the pass, since it could leave PyTorch's modes for fake tensors on; the second comes at once."""
    interrupt, came, is_waiting = signal.getsignal(signal.SIGINT), [], False
    if callable(interrupt):
        with suppress(ValueError):  # in another thread than the main one, to which none comes
            signal.signal(signal.SIGINT, lambda *arguments: interrupt(*arguments) if came else came.append(arguments))
            is_waiting = True
    try:
        yield
    finally:
        if is_waiting:
            signal.signal(signal.SIGINT, interrupt)
        if came:
            interrupt(*came[0])


def run_copy(model: nn.Module, args: Any, kwargs: Any, run: Callable[..., None]) -> None:
    """Call run(copier, model, args, kwargs) with copies on fake tensors or, if the model depends on values, on real ones."""
    # A model on the meta device counts as one on the CPU, or on a GPU under CUDA's autocast: with meta tensors autocast
    # would change nothing, and attention, for example, would save more.
    default = torch.device("cuda" if torch.is_autocast_enabled() else "cpu")
    device = next((tensor.device for tensor in state_of(model) if not tensor.is_meta), default)
    fake, mode = _fakes(device)
    copier = Copier(fake)
    # Without a GPU nothing real can be made there, and of a recurrent layer's weights PyTorch makes a tensor of their memory.
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in nn.Module.modules(model))
    makes_fakes = device.type == "cuda" and (is_recurrent or not torch.cuda.is_available())
    with torch.inference_mode(False):
        try:
            with _interrupts_wait(), _without_reports_of_fakes(), ExitStack() as afterwards:
                # A fake tensor that the pass leaves in a cache makes the model's next call an error, instead of a fake result.
                afterwards.callback(setattr, mode, "allow_non_fake_inputs", False)
                copies = copier((model, args, kwargs))
                with mode if makes_fakes else nullcontext():
                    _run(run, copier, *copies)
        except Exception as error:
            if _is_final(error, copier):
                raise
            try:
                _run_on_clones(run, model, args, kwargs)
            except torch.OutOfMemoryError:  # most likely the model doesn't take these inputs
                raise error  # noqa: B904 (it has both)


def _is_final(error, copier):
    """Whether real tensors won't do either where fake ones have failed. Raises a better error where there is one."""
    if "saved tensor hooks" in str(error):
        raise RuntimeError(
            "the model's forward pass calls a transform of torch.func, in which PyTorch has no hooks on saved tensors: it "
            "can't be surveyed; convert(model) needs no inputs"
        ) from error
    if not any(tensor.is_meta for tensor, _ in copier.copies.values() if isinstance(tensor, Tensor)):
        return False
    if not isinstance(error, FAKES_WONT_DO):
        return True
    raise RuntimeError(
        f"the model's forward pass depends on the values of its tensors ({error}): expected a model and example "
        "inputs with values, got some on the meta device"
    ) from error


def _run_on_clones(run, model, args, kwargs):
    copier = Copier(_clone)
    try:
        _run(run, copier, *copier((model, args, kwargs)))
    except AssertionError as error:
        if "convert all Tensors to FakeTensors" not in str(error):
            raise
        raise RuntimeError(
            "the model's forward pass finds a fake tensor in a cache, where an earlier pass of a copy has left it: clear "
            "the cache, which is in a class or a global variable"
        ) from error
    finally:
        torch.clear_autocast_cache()  # which keeps the copies of parameters until autocast ends


def running_module(copier: Copier, modules: Collection[nn.Module]) -> Callable[[], nn.Module]:
    """A function that returns the module whose copy is running; outside of all, the first, which is the model."""
    originals = {id(copier(module)): module for module in modules}

    def running():
        copies = (frame.f_locals["self"] for frame in callers(MODULE_CALL))
        return next((originals[id(copy)] for copy in copies if id(copy) in originals), next(iter(modules)))

    return running
