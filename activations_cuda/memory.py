"""What autograd keeps for the backward pass, counted without doing the work: the model runs on fake tensors."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from activations_cuda.conversion import OURS, ConvertMode, check_model

__all__ = ["LayerMemory", "MemoryReport", "kept_bytes", "memory_report", "require"]


def require(name: str) -> Any:
    """Import what only the report needs, or say how to install it."""
    try:
        return import_module(name)
    except (ImportError, RuntimeError) as error:  # the latter is what a torchvision built for another torch raises
        # With torch named, lest pip exchange it for the one that the newest torchvision wants.
        command = f"pip install 'activations-cuda[report]' torch=={torch.__version__.split('+')[0]}"
        raise ImportError(f"the memory report needs {name} ({error}): {command}") from None


@contextmanager
def _kept(owner: Callable[[], str], but: tuple[Tensor, ...] = ()) -> Iterator[dict[str, int]]:
    """Yields a dict that gets, for whoever owner() names at the time, the bytes of the storages that autograd keeps; a storage
    counts once, those of the tensors `but` not at all."""
    seen = {StorageWeakRef(tensor.untyped_storage()) for tensor in but}
    kept: defaultdict[str, int] = defaultdict(int)

    def pack(tensor):
        storage = StorageWeakRef(tensor.untyped_storage())
        if storage not in seen:
            seen.add(storage)
            kept[owner()] += tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def kept_bytes(function: Callable[..., Any], *arguments: Any) -> int:
    """The bytes that autograd keeps for the backward pass of function(*arguments)."""
    with _kept(lambda: "") as kept:
        output = function(*arguments)
    del output  # until here it holds all that was counted
    return kept[""]


@dataclass(frozen=True)
class LayerMemory:
    """Bytes kept by one module itself, its children's not included."""

    name: str
    kind: str
    before: int
    after: int


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that autograd keeps for the backward pass, before and after conversion. Print it for a table.

    ``dataclasses.asdict`` makes plain data of it.
    """

    layers: tuple[LayerMemory, ...]
    before: int
    after: int

    def __str__(self) -> str:
        rows = [(layer.name, layer.kind, layer.before, layer.after) for layer in self.layers]
        rows.append(("in all", "", self.before, self.after))
        cells = [
            (name, kind, f"{before / 2**20:.1f}", f"{after / 2**20:.1f}", f"{after / before - 1:+.0%}" if before else "")
            for name, kind, before, after in rows
        ]
        headers = ("layer", "", "before, MiB", "after, MiB", "")
        align = ("left", "left", "right", "right", "right")
        return require("tabulate").tabulate(cells, headers=headers, colalign=align, disable_numparse=True)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw a bar chart of the layers into a file whose suffix tells the format."""
        require("matplotlib").use("Agg", force=False)
        plt = require("matplotlib.pyplot")
        figure, axes = plt.subplots(figsize=(8, 2 + 0.2 * len(self.layers)), layout="constrained")
        places = range(len(self.layers))
        for offset, label, color in ((-0.2, "before", "tab:gray"), (0.2, "after", "tab:blue")):
            total = getattr(self, label) / 2**20
            axes.barh(
                [place + offset for place in places],
                [getattr(layer, label) / 2**20 for layer in self.layers],
                0.4,
                label=f"{label}: {total:.0f} MiB in all",
                color=color,
            )
        axes.set_yticks(places, [f"{layer.name} {layer.kind}" for layer in self.layers], fontsize=6)
        axes.set(xlabel="MiB kept for backward", ylim=(len(self.layers), -1))
        axes.legend()
        figure.savefig(path, dpi=110)
        plt.close(figure)


def _op_name(func):
    """The name of one of this package's ops, such as relu6_; an empty one for any other function."""
    return func._schema.name.removeprefix("fastact::") if getattr(func, "namespace", None) == "fastact" else ""


class _PyTorchsOps(TorchFunctionMode):
    """Turns this package's ops into PyTorch's functions: what a converted model was before."""

    def __init__(self):
        super().__init__()
        self.functions = ConvertMode(OURS).functions

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = _op_name(func)
        if name and func._overloadname == "default" and name not in ("hardshrink_", "softshrink_"):  # not PyTorch's in place
            pytorchs = getattr(nn.functional, name.removesuffix("_"), None)
            if pytorchs:
                func, kwargs = pytorchs, kwargs | ({"inplace": True} if name.endswith("_") else {})
        if func in self.functions:
            with torch._C.DisableTorchFunction():  # or a ConvertMode around the report would turn it back
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class _PackedOps(TorchFunctionMode):
    """Makes this package's ops keep on fake tensors what they keep on real ones; else they would be traced."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = _op_name(func)
        packet = getattr(torch.ops.fastact, name.removesuffix("_") + "_with_mask", None) if name else None
        if packet is not None:
            with suppress(NotImplementedError, ValueError):  # dtypes and parameters that PyTorch's op answers for
                output, _ = getattr(packet, func._overloadname)(*args, **kwargs)
                return args[0].copy_(output) if name.endswith("_") else output
        return func(*args, **kwargs)


@contextmanager
def _current_module(model):
    """Yields a function that names the module of `model` whose forward is running."""
    names = {module: name for name, module in model.named_modules()}
    running = [""]

    def enter(module, _):
        running.append(names.get(module, running[-1]))

    def leave(module, *_):
        running.pop()

    with register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True):
        yield lambda: running[-1]


def _count(model, inputs, *modes):
    """The bytes that each module keeps, on fake tensors that stand for the model's and the inputs."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    device = next((tensor.device for tensor in state.values() if not tensor.is_meta), torch.device("cpu"))

    @cache  # an input that is passed twice is one
    def fake_like(tensor):
        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
        return fake.requires_grad_(tensor.requires_grad)

    with torch.inference_mode(False), torch.enable_grad(), FakeTensorMode(allow_non_fake_inputs=True) as fake_mode:
        # A model on the meta device stands for one on the CPU: attention, say, keeps more on meta tensors.
        fake_state = {name: fake_like(t) if t.is_meta else fake_mode.from_tensor(t) for name, t in state.items()}
        fake_inputs = tree_map_only(torch.Tensor, fake_like, inputs)
        with ExitStack() as stack:
            owner = stack.enter_context(_current_module(model))
            kept = stack.enter_context(_kept(owner, but=tuple(fake_state.values())))
            for mode in modes:
                stack.enter_context(mode)
            output = torch.func.functional_call(model, fake_state, fake_inputs)
    del output  # until here it holds all that was counted
    return kept


def memory_report(model: nn.Module, *example_inputs: Any) -> MemoryReport:
    """What autograd keeps for a model's backward pass, layer by layer, before and after conversion.

    Runs the model's forward pass twice on fake tensors: needs no GPU, no memory and next to no time, and leaves parameters,
    buffers and modules as they are, converted or not. What several layers share counts once, with the first; parameters and
    buffers, which are there anyway, don't count. Before means PyTorch's own activations, after those that
    :func:`~activations_cuda.convert` and :class:`~activations_cuda.ConvertMode` reach by default.

    Args:
        model: the model, in training mode if that is what is asked about; it may be on the meta device.
        example_inputs: the arguments of its forward pass. Of tensors only shape, strides, dtype and requires_grad matter, so
            ``torch.empty(256, 3, 224, 224, device="meta")`` will do.

    Returns:
        The bytes of each module that keeps any, and of all together.

    Raises:
        TypeError: not a module.
    """
    check_model("memory_report", model)
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    before = _count(model, example_inputs, _PyTorchsOps())
    after = _count(model, example_inputs, _PackedOps(), ConvertMode())
    layers = tuple(
        LayerMemory(name, type(module).__name__, before[name], after[name])
        for name, module in model.named_modules()
        if before[name] or after[name]
    )
    return MemoryReport(layers, sum(before.values()), sum(after.values()))
