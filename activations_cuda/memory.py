"""What autograd saves for the backward pass, counted without doing the work: the model runs on fake tensors."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

from activations_cuda.conversion import check_model, survey
from activations_cuda.replacements import FUNCTIONS, original_of
from activations_cuda.survey import Decision, saved_storages, summary

__all__ = ["Decision", "LayerMemory", "MemoryReport", "memory_report", "require", "saved_bytes"]


def require(name: str) -> Any:
    """Import what only the report needs, or say how to install it."""
    try:
        return import_module(name)
    except (ImportError, RuntimeError) as error:  # the latter is what a torchvision built for another torch raises
        # With torch named, or pip would replace it by the one that the newest torchvision wants.
        command = f"pip install 'activations-cuda[report]' torch=={torch.__version__.split('+')[0]}"
        raise ImportError(f"the memory report needs {name} ({error}): {command}") from None


def saved_bytes(function: Callable[..., Any], *arguments: Any) -> int:
    """The bytes that autograd saves for the backward pass of function(*arguments)."""
    with saved_storages(lambda: None) as storages:
        output = function(*arguments)
    del output  # until here it holds all that was counted
    return sum(storage.size for storage in storages.values())


@dataclass(frozen=True)
class LayerMemory:
    """Bytes saved by one module itself, its children's not included."""

    name: str
    kind: str
    before: int
    after: int


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that autograd saves for the backward pass, before and after conversion. Print it for a table.

    ``dataclasses.asdict`` makes plain data of it.
    """

    layers: tuple[LayerMemory, ...]
    before: int
    after: int
    decisions: tuple[Decision, ...]

    def __str__(self) -> str:
        rows = [(layer.name, layer.kind, layer.before, layer.after) for layer in self.layers]
        rows.append(("in all", "", self.before, self.after))
        cells = [
            (name, kind, f"{before / 2**20:.1f}", f"{after / 2**20:.1f}", f"{after / before - 1:+.0%}" if before else "")
            for name, kind, before, after in rows
        ]
        headers = ("layer", "", "before, MiB", "after, MiB", "")
        align = ("left", "left", "right", "right", "right")
        table = require("tabulate").tabulate(cells, headers=headers, colalign=align, disable_numparse=True)
        return "\n".join([table, "", *summary(self.decisions)])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw a bar chart of the layers into a file whose suffix chooses the format."""
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
        axes.set(xlabel="MiB saved for backward", ylim=(len(self.layers), -1))
        axes.legend()
        figure.savefig(path, dpi=110)
        plt.close(figure)


def memory_report(model: nn.Module, *inputs: Any, example_inputs: Any = None, **keyword_inputs: Any) -> MemoryReport:
    """What autograd saves for a model's backward pass, layer by layer, before and after conversion.

    Runs the forward pass of a copy once, on fake tensors: needs no GPU, no memory and next to no time, and leaves the model as
    it is, converted or not. What several layers share counts once, with the first; parameters and
    buffers, which are there anyway, don't count. Before means PyTorch's own activations, after means
    ``convert(model, *inputs)``.

    Args:
        model: the model, in training mode if that is what is asked about; it may be on the meta device.
        inputs: the arguments of its forward pass; or one tuple or list of them, or one dict of keyword arguments. Of tensors
            only shape, strides, dtype and requires_grad matter, so ``torch.empty(256, 3, 224, 224, device="meta")`` will do.
        example_inputs: the inputs, by keyword.
        keyword_inputs: its keyword arguments.

    Returns:
        The bytes of each module that saves any, and of all together; what is converted, what is left alone and why.

    Raises:
        TypeError: not a module, a scripted or FSDP1-wrapped one, or inputs that are no arguments.
    """
    check_model("memory_report", model)
    found = survey("memory_report", model, inputs, keyword_inputs, example_inputs, FUNCTIONS.values())
    before, after = found.saved(frozenset()), found.saved(found.chosen)
    layers = tuple(
        LayerMemory(name, original_of(type(module)).__name__, before[module], after[module])
        for module, name in found.names.items()
        if before[module] or after[module]
    )
    return MemoryReport(layers, before.total(), after.total(), found.decisions())
