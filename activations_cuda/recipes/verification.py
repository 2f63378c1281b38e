"""Trust but verify: a formula is used where it has once given what PyTorch's op gave, all of it, to the bit.

Which formula an op has depends on dtype, device, layout and sizes. So each of these *configurations* is tried at its first use.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from activations_cuda.recipes.values import Recipe, computing

log = logging.getLogger("activations_cuda")

# A recipe's configuration -> the formula that fits, or None if none does.
chosen: dict[tuple[Any, ...], Callable[..., Tensor] | None] = {}


def is_identical(a: Tensor, b: Tensor) -> bool:
    """To the bit, strides too: signs of zeros and the payloads of NaNs count."""
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if a.is_floating_point():
        integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
        a, b = a.view(integer), b.view(integer)
    return torch.equal(a, b)


def _is_telling(tensor):
    """Whether its elements differ enough to tell formulas apart: any fits a weight of zero, as some norms have it at first."""
    flat = tensor.reshape(-1)
    return len(torch.unique(flat[:: 1 + len(flat) // 1024])) > 32


def verify(recipe: Recipe, untried: Sequence[tuple[Recipe, tuple[Callable[..., Tensor], ...]]], tensor: Tensor) -> bool:
    """Find formulas for all recipes that haven't been tried yet, of which `recipe` is the last, that give this tensor."""
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        return False  # comparing waits for the device
    for choice in itertools.product(*(formulas for _, formulas in untried)):
        for (each, _), formula in zip(untried, choice, strict=True):
            each.formula = formula
        try:
            with computing():
                fits = is_identical(recipe.compute(), tensor)
        except Exception as error:  # an op that isn't for this device or dtype
            log.debug("recompute: %s: %s", recipe.source, error)
            continue
        if fits:
            if all(len(formulas) == 1 for _, formulas in untried) or _is_telling(tensor):
                chosen.update((each.configuration, each.formula) for each, _ in untried)
            return True
    log.debug("recompute: no formula of %s fits, shape %s, %s: kept", recipe.source, list(tensor.shape), tensor.dtype)
    chosen.setdefault(recipe.configuration, None)
    return False
