"""The compiled module: for each member of the family, which csrc/family.def lists, a function, and one that works in place."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

compiler: str

class Member:
    pytorch_saves: str  # for backward: "input", "output" or "output in place"
    saves_output: bool  # does this package, with a code? Else it saves a mask alone
    packed_op: str  # which returns what is saved beside the output

family: dict[str, Member]  # by the name of the op
recipes: Any  # the hook of recompute(), for activations_cuda/recipes

def __getattr__(name: str) -> Callable[..., Tensor]: ...
