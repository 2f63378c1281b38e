"""Bool tensors that no node has made, such as the masks of dropout and ``where``: saved at 8 elements to the byte."""

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from activations_cuda import _C
from activations_cuda.recipes.step import computing

SMALLEST = 64  # of elements that are worth it

# A mask may be saved many times: the version that was packed, and a weak reference to its value.
_packed = WeakIdKeyDictionary()


def value_of(tensor: Tensor, hooks: Any) -> Any:
    """The value of a mask; the hooks around the scope get its bits."""
    base = tensor if tensor._base is None else tensor._base
    if base.dtype is not torch.bool or not SMALLEST <= base.numel() == base.untyped_storage().nbytes():
        return _C.recipes.keep(tensor, hooks)
    version, reference = _packed.get(base, (None, None))
    value = reference() if reference is not None and version == base._version else None
    if value is None:
        with computing():
            bits = _C.recipes.keep(_pack(base), hooks)
        value = _C.recipes.recipe_of(_unpack, bits, (base.shape, base.stride()), base)
        _packed[base] = base._version, weakref.ref(value)
    return value if base is tensor else _C.recipes.view_of(value, tensor, base)


def _pack(mask):
    """In the order of its memory."""
    flat = mask.as_strided((mask.numel(),), (1,)).view(torch.uint8)
    bytes = F.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
    return bytes.bitwise_left_shift(_places(mask.device)).sum(1, dtype=torch.uint8)


def _unpack(packed, shape, stride):
    bits = packed.unsqueeze(1).bitwise_right_shift(_places(packed.device)).bitwise_and(1)
    return bits.view(torch.bool).view(-1).as_strided(shape, stride)


def _places(device):
    return torch.arange(8, dtype=torch.uint8, device=device)
