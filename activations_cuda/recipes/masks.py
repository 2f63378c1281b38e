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

# A mask may be saved many times: the version that was packed, and weak references to its value and to the hook that it met.
_packed = WeakIdKeyDictionary()


def value_of(hook: Any, tensor: Tensor) -> Any:
    """The value of a mask; the hooks around the scope get its bits.

    A mask that somebody holds from scope to scope, as a model's buffer, and a small part of a larger one are kept as they are:
    packing would save nothing.
    """
    base = tensor if tensor._base is None else tensor._base
    is_whole = base.dtype is torch.bool and base.numel() == base.untyped_storage().nbytes()
    if not is_whole or not SMALLEST <= base.numel() <= 2 * tensor.numel():
        return _C.recipes.keep(tensor, hook.outer)
    version, reference, met = _packed.get(base, (None, None, None))
    if met is not None and met() is not hook:
        return _C.recipes.keep(tensor, hook.outer)
    value = reference() if reference is not None and version == base._version else None
    if value is None:
        with computing():
            bits = _C.recipes.keep(_pack(base), hook.outer)
        value = _C.recipes.recipe_of(unpack, bits, (base.shape, base.stride()), base)
        _packed[base] = base._version, weakref.ref(value), weakref.ref(hook)
    return value if base is tensor else _C.recipes.view_of(value, tensor, base)


# Eight bools are the bytes of an int64. Multiplied by this, the lowest bits of all come into the highest byte, side by side.
_GATHER = 0x0102040810204080


def _pack(mask):
    """In the order of its memory; the first of eight elements is the lowest bit."""
    flat = mask.as_strided((mask.numel(),), (1,)).view(torch.uint8)
    padding = -len(flat) % 8
    eights = (F.pad(flat, (0, padding)) if padding else flat).view(torch.int64)
    return eights.mul(_GATHER).bitwise_right_shift_(56).to(torch.uint8)


def unpack(packed, shape, stride):
    bools = _spread(packed.device).index_select(0, packed.to(torch.int32)).view(torch.bool)
    return bools.as_strided(shape, stride)


_tables: dict[torch.device, Tensor] = {}


def _spread(device):
    """The eight bools of every byte."""
    if device in _tables:
        return _tables[device]
    places = torch.arange(8, dtype=torch.uint8, device=device)
    bytes = torch.arange(256, dtype=torch.uint8, device=device)
    table = bytes.unsqueeze(1).bitwise_right_shift(places).bitwise_and_(1).view(torch.int64).view(-1)
    if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):  # a graph's memory is its own
        _tables[device] = table
    return table
