"""Which formulas this package's kernel computes, a chain of recipes in one pass, as a program (csrc/recipes/program.h).

A formula without a program, on another device or of another dtype, is computed by itself. No program is taken on trust either
(:mod:`.verification`).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from activations_cuda import _C
from activations_cuda.recipes import norms, rules
from activations_cuda.recipes.step import computing

Reference = float | tuple[int] | tuple[int, str, float]
Instruction = tuple[str, bool, tuple[Reference, ...]]  # its opcode, whether its result is rounded, what it reads


def _operand(number: int, place: str = "broadcast", default: float = 0.0) -> Reference:
    """Of the formula; "channels" or "groups" says which dimensions it has. The default stands for None."""
    return number, place, default


def _argument(number: int) -> Reference:
    return (number,)


def _instruction(opcode: str, *references: Reference, rounded: bool = False) -> Instruction:
    """An instruction, whose result is rounded if the formula's op has stored it; the last one's always is."""
    return opcode, rounded, references


def _norm(opcode: str, statistics: str, parameters: str, bias: float = -0.0) -> tuple[Instruction]:
    """Of a formula of (input, weight, bias, mean, rstd). To add -0 changes nothing."""
    references = [_operand(3, statistics), _operand(4, statistics), _operand(1, parameters, 1.0), _operand(2, parameters, bias)]
    return (_instruction(opcode, *references),)


_RELU = (_instruction("clamp", 0.0, math.inf),)
_HARDTANH = (_instruction("clamp", _argument(0), _argument(1)),)

# By a formula, its instructions from its first operand on.
PROGRAMS: dict[Callable[..., Tensor], tuple[Instruction, ...]] = {
    norms._batch_norm_elementwise: _norm("batch_norm", "channels", "channels", bias=0.0),
    norms._batch_norm_scaled: _norm("scaled_norm", "channels", "channels"),
    norms._batch_norm_affine: _norm("affine_norm", "channels", "channels"),
    norms._group_norm_in_two: _norm("group_norm", "groups", "channels"),
    norms._group_norm_affine: _norm("affine_norm", "groups", "channels"),
    norms._group_norm_centered: _norm("layer_norm", "groups", "channels"),
    norms._layer_norm_affine: _norm("layer_norm", "broadcast", "broadcast"),
    norms._rms_norm: (_instruction("multiply", _operand(3)), _instruction("multiply", _operand(1, default=1.0))),
    torch.relu: _RELU,
    _C.relu: _RELU,
    F.hardtanh: _HARDTANH,
    _C.hardtanh: _HARDTANH,
    _C.relu6: (_instruction("clamp", 0.0, 6.0),),
    _C.silu: (_instruction("silu"),),
    rules.add: (_instruction("add", _operand(1), _argument(0)),),
    torch.mul: (_instruction("multiply", _operand(1)),),
    torch.pow: (_instruction("power", _argument(0)),),  # for the exponents 2 and 3
    torch.tanh: (_instruction("tanh"),),
    rules.scaled: (_instruction("multiply", _operand(1), rounded=True), _instruction("multiply", _argument(0))),
    torch.Tensor.to: (),
    rules.same: (),
}

# Functions of one number: half types have so few that a table holds them all.
TABULATED = frozenset(
    {
        F.leaky_relu,
        torch.ops.aten.elu,
        F.celu,
        _C.gelu,
        _C.silu,
        _C.mish,
        _C.hardswish,
        _C.leaky_relu,
        _C.hardsigmoid,
        _C.hardshrink,
        _C.softshrink,
        _C.threshold,
        F.hardsigmoid,
        F.softplus,
        F.logsigmoid,
        F.hardshrink,
        F.softshrink,
        torch.sigmoid,
        torch.tanh,
        torch.exp,
        torch.sqrt,
        torch.rsqrt,
        torch.pow,
        torch.neg,
    }
)

# For each formula, because an argument may change from step to step. None is ever dropped: a CUDA graph may read it.
MAX_TABLES = 16

_tables: dict[Any, Tensor | None] = {}


def table(formula: Callable[..., Tensor], arguments: tuple[Any, ...], dtype: torch.dtype, like: Tensor) -> Tensor | None:
    """The values of a function of all numbers of a half type, by their bits. None if it depends on an element's place."""
    key = formula, arguments, dtype, like.device
    if key not in _tables:
        others = sum((known[0], *known[2:]) == (formula, dtype, like.device) for known in _tables)
        if others == MAX_TABLES or (like.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None  # a graph's memory is its own
        with computing():
            numbers = torch.arange(2**16, dtype=torch.int32, device=like.device).to(torch.int16).view(dtype)
            values = formula(numbers, *arguments)
            alone = formula(numbers.repeat_interleave(2)[::2], *arguments)  # not in vectors
            is_sure = torch.equal(values.view(torch.int16), alone.view(torch.int16))  # waits for the device
        _tables[key] = values if is_sure else None
    return _tables[key]
