"""The compiled module: for each member of the family, which csrc/family.def lists, a function, and one that works in place."""

from collections.abc import Callable

from torch import Tensor

compiler: str
cuda_toolkit: str | None
saves: dict[str, str]
smooth: set[str]

def __getattr__(name: str) -> Callable[..., Tensor]: ...
