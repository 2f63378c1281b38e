"""What a model's modules keep within recompute(), found out as in :mod:`.survey`: by one forward pass of a copy."""

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from activations_cuda import _C
from activations_cuda.arguments import unwrapped
from activations_cuda.dry_run import (
    call_on_fakes,
    name_of_ours,
    overload_and_arguments,
    own_storages,
    run_copy,
    running_module,
    storages_of,
)
from activations_cuda.recipes.hook import Hook, unpack
from activations_cuda.replacements import class_for, set_class


class _OutOfPlace(TorchFunctionMode):
    """For fake tensors, on which this package's ops in place copy: what follows is to see the op itself.

    But what is written to a view is its base's, which follows from nothing then.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = name_of_ours(func)
        if not name:
            return func(*args, **kwargs)
        overload, given = overload_and_arguments(func, args, kwargs)
        if name.endswith("_") and given["self"]._is_view():
            return given["self"].copy_(call_on_fakes(name, overload, given | {"self": given["self"].clone()}))
        return call_on_fakes(name, overload, given)


class ScopeSurvey:
    """What the modules of a copy keep within recompute().

    Attributes:
        kept: the bytes that each module is the first to need.
        rules: the bytes that each rule replaced.
    """

    def __init__(
        self, model: nn.Module, args: Any, kwargs: Any, names: Mapping[nn.Module, frozenset[str]], convolutions: bool
    ) -> None:
        model = unwrapped(model)
        self.kept: Counter[nn.Module] = Counter()
        self.rules: Counter[str] = Counter()
        self._converted, self._convolutions = names, convolutions
        self._modules = [*nn.Module.modules(model)]
        run_copy(model, args, kwargs, self._watch)

    def _watch(self, copier, model, args, kwargs):
        for module, functions in self._converted.items():
            set_class(copier(module), class_for(copier(module), functions))
        pack_value = Hook(None, check=False, outer=None, convolutions=self._convolutions, is_dry_run=True).pack
        values = []
        first: dict[StorageWeakRef, nn.Module] = {}
        running = running_module(copier, self._modules)

        def pack(tensor):
            value = pack_value(tensor)
            values.append((weakref.ref(value), tensor.numel() * tensor.element_size(), running()))
            for storage in _kept_storages(value):
                first.setdefault(StorageWeakRef(storage), running())
            return value

        _C.recipes.enter_scope(observes=True)
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack), _OutOfPlace():
                output = model(*args, **kwargs)
        finally:
            _C.recipes.exit_scope()
        kept = {}
        for reference, size, module in values:
            if (value := reference()) is not None:
                for storage in _kept_storages(value):
                    kept[StorageWeakRef(storage)] = storage.nbytes()
                    first.setdefault(StorageWeakRef(storage), module)  # what took a kept tensor's place since
                if value.is_recipe:
                    self.rules[value.source] += size
        del output  # until here it holds all that was counted
        for storage in kept.keys() - own_storages(model):
            self.kept[first[storage]] += kept[storage]


def _kept_storages(value):
    return [storage for root in value.roots for storage in storages_of(root.held)]
