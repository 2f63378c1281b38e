"""Bool tensors that no node has made, such as the masks of dropout and ``where``: saved at 8 elements to the byte."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from activations_cuda import _C
from activations_cuda.recipes.step import computing

# A mask may be saved many times: the version that was packed, and weak references to its value and to the hook that it met.
_packed = WeakIdKeyDictionary()


def value_of(hook: Any, tensor: Tensor) -> Any:
    """The value of a mask; the hooks around the scope get its bits.

    A mask that somebody holds from scope to scope, as a model's buffer, and a small part of a larger one are kept as they are:
    packing would save nothing.
    """
    base = tensor if tensor._base is None else tensor._base
    is_whole = base.dtype is torch.bool and base.numel() == base.untyped_storage().nbytes()
    if not is_whole or not 0 < base.numel() <= 2 * tensor.numel():
        return _C.recipes.keep(tensor, hook.outer)
    version, reference, met = _packed.get(base, (None, None, None))
    if met is not None and met() is not hook:
        return _C.recipes.keep(tensor, hook.outer)
    value = reference() if reference is not None and version == base._version else None
    if value is None:
        with computing():
            bits = base.new_empty((base.numel() + 7) // 8, dtype=torch.uint8) if hook.assumes else _C.recipes.pack_mask(base)
            bits = _C.recipes.keep(bits, hook.outer)
        value = _C.recipes.recipe_of(_C.recipes.unpack_mask, bits, (base.shape, base.stride()), base)
        _packed[base] = base._version, weakref.ref(value), weakref.ref(hook)
    return value if base is tensor else _C.recipes.view_of(value, tensor, base)
