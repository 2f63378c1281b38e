"""What autograd saves for the backward pass, counted without doing the work: the model runs on fake tensors."""

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from activations_cuda.arguments import arguments_of, check_initialized, check_model
from activations_cuda.dry_run import saved_tensors, storages_of
from activations_cuda.recipes.scope import options_of
from activations_cuda.recipes.scope import recompute as Scope
from activations_cuda.replacements import FUNCTIONS, original_of
from activations_cuda.scope_survey import ScopeSurvey
from activations_cuda.survey import Decision, Survey, summary

__all__ = ["Decision", "LayerMemory", "MemoryReport", "memory_report", "saved_bytes"]


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
    with saved_tensors(lambda: None) as saved:
        output = function(*arguments)
    storages = {StorageWeakRef(part): part.nbytes() for tensor, _ in saved() for part in storages_of(tensor)}
    del output  # until here it holds all that is counted
    return sum(storages.values())


@dataclass(frozen=True)
class LayerMemory:
    """Bytes saved by one module itself, its children's not included."""

    name: str
    kind: str
    before: int
    after: int
    recompute: int | None = None


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that autograd saves for the backward pass, before and after conversion. Print it for a table.

    ``dataclasses.asdict`` makes plain data of it.

    Attributes:
        layers: the modules that save any.
        before: the bytes of all together.
        after: the same, once the model is converted.
        decisions: what ``convert(model, *inputs)`` converts, what it leaves alone and why. (With ``recompute=True`` it
            converts every smooth activation too.)
        recompute: the bytes within :func:`recompute`, of the converted model; None if that wasn't asked for.
        recomputed: the bytes that each rule replaced, by the name of its node in autograd's graph.
    """

    layers: tuple[LayerMemory, ...]
    before: int
    after: int
    decisions: tuple[Decision, ...]
    recompute: int | None = None
    recomputed: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        from tabulate import tabulate  # type: ignore[import-untyped]

        rows = [*self.layers, LayerMemory("in all", "", self.before, self.after, self.recompute)]
        others = ["after", *(["recompute"] if self.recompute is not None else [])]
        unit, size = ("MiB", 2**20) if self.before >= 2**20 else ("KiB", 2**10)
        headers = ["layer", "", f"before, {unit}"]
        for column in others:
            headers += [f"{column}, {unit}", ""]
        cells = []
        for row in rows:
            compared = [getattr(row, column) for column in others]
            changes = [f"{saved / row.before - 1:+.0%}" if row.before else "" for saved in compared]
            numbers = [f"{saved / size:.1f}" for saved in (row.before, *compared)]
            cells.append([row.name, row.kind, numbers[0], *chain.from_iterable(zip(numbers[1:], changes, strict=True))])
        align = ["left", "left"] + ["right"] * (len(headers) - 2)
        table = tabulate(cells, headers=headers, colalign=align, disable_numparse=True)
        rules = [f"{saved / size:.1f} {unit} by {name}" for name, saved in Counter(self.recomputed).most_common()]
        return "\n".join([table, "", *summary(self.decisions), *(["recomputed: " + ", ".join(rules)] if rules else [])])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw a bar chart of the layers into a file, whose suffix chooses the format. Needs matplotlib."""
        require("matplotlib").use("Agg", force=False)
        plt = require("matplotlib.pyplot")
        figure, axes = plt.subplots(figsize=(8, 2 + 0.2 * len(self.layers)), layout="constrained")
        places = range(len(self.layers))
        bars = [("before", "tab:gray"), ("after", "tab:blue")]
        if self.recompute is not None:
            bars.append(("recompute", "tab:green"))
        width = 0.8 / len(bars)
        for i, (label, color) in enumerate(bars):
            offset = width * (i - (len(bars) - 1) / 2)
            total = getattr(self, label) / 2**20
            axes.barh(
                [place + offset for place in places],
                [getattr(layer, label) / 2**20 for layer in self.layers],
                width,
                label=f"{label}: {total:.0f} MiB in all",
                color=color,
            )
        axes.set_yticks(places, [f"{layer.name} {layer.kind}" for layer in self.layers], fontsize=6)
        axes.set(xlabel="MiB saved for backward", ylim=(len(self.layers), -1))
        axes.legend()
        figure.savefig(path, dpi=110)
        plt.close(figure)


def memory_report(
    model: nn.Module, *inputs: Any, example_inputs: Any = None, recompute: bool | Scope = False, **keyword_inputs: Any
) -> MemoryReport:
    """What autograd saves for a model's backward pass, layer by layer, before and after conversion.

    Runs the forward pass of a copy on fake tensors, twice with ``recompute``. It needs no GPU, and no memory unless the pass
    depends on tensors' values, and leaves the model as it is, converted or not. Don't pass inputs that can be read only once,
    such as generators: the second pass would find them empty. What several layers share counts once, with the first; parameters
    and buffers, which are there anyway, don't count. Before means PyTorch's own activations, after means ``convert(model,
    *inputs)``.

    It counts what PyTorch's kernels for the model's device save; a model on the meta device counts as one on the CPU (under
    CUDA's autocast, on a GPU), where attention with dropout saves more than on a GPU. What LSTM layers reserve for backward,
    and on a GPU GRU and RNN layers too, isn't counted: for fake tensors it is empty.

    Args:
        model: the model, in training mode if that is what is asked about; it may be on the meta device.
        inputs: the arguments of its forward pass; or one tuple or list of them, or one dict of keyword arguments. Of tensors
            only shape, strides, dtype and requires_grad matter, so ``torch.empty(256, 3, 224, 224, device="meta")`` will do.
        example_inputs: the inputs, by keyword.
        recompute: whether to report what is saved within :func:`recompute` too, by ``convert(model, *inputs, recompute=True)``,
            given that every formula fits; or a scope, whose options are used, as for :func:`convert`.
        keyword_inputs: its keyword arguments.

    Returns:
        The bytes of each module that saves any, and of all together; what is converted, what is left alone and why.

    Raises:
        TypeError: not a module, a scripted or FSDP1-wrapped one, inputs that the model's forward doesn't take, or ``recompute``
            that is neither a bool nor a scope.
        ValueError: a lazy module that hasn't been called yet.
        RuntimeError: the forward pass depends on the values of tensors on the meta device, or calls a transform of torch.func.
    """
    check_model("memory_report", model)
    check_initialized("memory_report", model)
    options = options_of("memory_report", recompute)
    args, kwargs = arguments_of("memory_report", model, inputs, keyword_inputs, example_inputs)
    found = Survey(model, args, kwargs, frozenset(FUNCTIONS.values()))
    before, after, decisions = found.saved(frozenset()), found.saved(found.chosen), found.decisions()
    within = None
    if options:
        found.decide(recompute=True)
        within = ScopeSurvey(model, args, kwargs, found.converts(), options.convolutions)
    layers = tuple(
        LayerMemory(
            name, original_of(type(module)).__name__, before[module], after[module], within.kept[module] if within else None
        )
        for module, name in found.names.items()
        if before[module] or after[module] or (within and within.kept[module])
    )
    kept, rules = (within.kept.total(), dict(within.rules)) if within else (None, {})
    return MemoryReport(layers, before.total(), after.total(), decisions, kept, rules)
