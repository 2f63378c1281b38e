"""How a formula is described to this package's kernel, which computes a chain of them in one pass: by instructions
(csrc/recipes/program.h) or, if it is a function of one number, by a table.

A formula that has neither, on another device or of another dtype, is computed by itself. No program is taken on trust either
(:mod:`.verification`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from activations_cuda import _C

Reference = float | tuple[int] | tuple[int, str, float]
Instruction = tuple[str, bool, tuple[Reference, ...]]  # its opcode, whether its result is rounded, what it reads


def operand(index: int, place: str = "broadcast", default: float = 0.0) -> Reference:
    """An operand of the formula; "channels" or "groups" says which dimensions it has. The default stands for None."""
    return index, place, default


def argument(index: int) -> Reference:
    return (index,)


def instruction(opcode: str, *references: Reference, rounded: bool = False) -> Instruction:
    """An instruction, whose result is rounded if the formula's op has stored it; the last one's always is."""
    return opcode, rounded, references


def norm(opcode: str, statistics: str, parameters: str, bias: float = -0.0) -> tuple[Instruction]:
    """The program of a formula of (input, weight, bias, mean, rstd). To add -0 changes nothing."""
    references = [operand(3, statistics), operand(4, statistics), operand(1, parameters, 1.0), operand(2, parameters, bias)]
    return (instruction(opcode, *references),)


# For each formula, because an argument may change from step to step. None is ever dropped: a CUDA graph may read it.
MAX_TABLES = 16

_tables: dict[Any, Tensor | None] = {}


def table(formula: Callable[..., Tensor], arguments: tuple[Any, ...], dtype: torch.dtype, like: Tensor) -> Tensor | None:
    """The values of a function of all numbers of a half type, by their bits. None if it depends on an element's place."""
    key = formula, repr(arguments), dtype, like.device  # 0.0 == -0.0, and NaN isn't itself
    if key not in _tables:
        known = list(_tables)  # to which other threads add
        others = sum((each[0], *each[2:]) == (formula, dtype, like.device) for each in known)
        if others >= MAX_TABLES or (like.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None  # a graph's memory is its own
        with _C.recipes.Computing():
            numbers = torch.arange(2**16, dtype=torch.int32, device=like.device).to(torch.int16).view(dtype)
            values = formula(numbers, *arguments)
            alone = formula(numbers.repeat_interleave(2)[::2], *arguments)  # not in vectors
            is_sure = torch.equal(values.view(torch.int16), alone.view(torch.int16))  # waits for the device
        _tables[key] = values if is_sure else None
    return _tables[key]
