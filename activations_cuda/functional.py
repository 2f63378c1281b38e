"""The functional forms, named and ordered as in :mod:`torch.nn.functional`.

On a plain CPU or CUDA tensor each returns PyTorch's result to the bit. The piecewise-linear ones do so in float64, float32,
float16 and bfloat16 and save one bit per element for backward, in place too. ``gelu``, ``hardswish``, ``mish`` and ``silu``
do so in bfloat16 and float16 and save their output, which the next layer usually saves too, and a few bits per element. For
any other dtype PyTorch's op is called. Under torch.compile each is a handful of ATen ops that fuse with their neighbors, and
a value's last bit may differ.

Common to all: the input is a tensor of any shape and strides. With ``inplace=True`` it is written to and returned; in the
dtypes above no clone of it is saved. Otherwise a new tensor of its shape, dtype and device is returned, with the strides that
PyTorch's op gives it. The piecewise-linear ones raise NotImplementedError for a bool or complex input, and for integers where
PyTorch has no rule for them. An in-place form raises RuntimeError where autograd or overlapping memory forbid it, as PyTorch's
do.
"""

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from activations_cuda import _C

__all__ = [
    "gelu",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "mish",
    "relu",
    "relu6",
    "silu",
    "softshrink",
    "threshold",
]


def is_exporting() -> bool:
    # Not torch.compiler.is_exporting(), which torch 2.11's Dynamo takes for true whatever it compiles.
    return torch.compiler._is_exporting_flag


def _ops(pytorch_has_it=True):
    """Whose ops to call. In eager mode the compiled module's: torch.ops costs a microsecond more."""
    if is_exporting():  # a program that is to run where this package isn't installed
        return torch.ops.aten if pytorch_has_it else torch.ops.fastact
    return torch.ops.fastact if is_dynamo_compiling() else _C


def relu(input: Tensor, inplace: bool = False) -> Tensor:
    r"""Set what is negative to 0, as :func:`torch.nn.functional.relu`.

    .. math:: \text{relu}(x) = \max(x, 0)

    The gradient passes where ``x > 0`` and at NaN.

    Args:
        input: a tensor of real numbers, of any shape.
        inplace: write to the input.

    Returns:
        A tensor of the input's shape and dtype; in place, the input.
    """
    ops = _ops()
    return ops.relu_(input) if inplace else ops.relu(input)


def relu6(input: Tensor, inplace: bool = False) -> Tensor:
    r"""Clamp every element to [0, 6], as :func:`torch.nn.functional.relu6`.

    .. math:: \text{relu6}(x) = \min(\max(x, 0), 6)

    The gradient passes where ``0 < x < 6`` and at NaN.

    Args:
        input: a tensor of real numbers, of any shape.
        inplace: write to the input.

    Returns:
        A tensor of the input's shape and dtype; in place, the input.
    """
    ops = _ops()
    return ops.relu6_(input) if inplace else ops.relu6(input)


def leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    r"""Scale what is negative, as :func:`torch.nn.functional.leaky_relu`.

    .. math:: \text{leaky\_relu}(x) = \max(x, 0) + \text{negative\_slope} \cdot \min(x, 0)

    The gradient passes where ``x > 0`` and is scaled elsewhere, at NaN too. In place, ``negative_slope`` may be negative.

    Args:
        input: a floating-point tensor of any shape.
        negative_slope: the slope of the negative part. If it is 0, the gradient there is 0, even where the incoming one is
            infinite.
        inplace: write to the input.

    Returns:
        A tensor of the input's shape and dtype; in place, the input.
    """
    ops = _ops()
    return ops.leaky_relu_(input, negative_slope) if inplace else ops.leaky_relu(input, negative_slope)


def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor:
    r"""Clamp every element to a range, as :func:`torch.nn.functional.hardtanh`.

    .. math:: \text{hardtanh}(x) = \min(\max(x, \text{min\_val}), \text{max\_val})

    The gradient passes where ``min_val < x < max_val`` and at NaN, and is 0 elsewhere, the bounds included.

    Args:
        input: a tensor of real numbers, of any shape.
        min_val: the lower bound.
        max_val: the upper bound, not below the lower.
        inplace: write to the input.

    Returns:
        A tensor of the input's shape and dtype; in place, the input.

    Raises:
        ValueError: ``min_val > max_val``.
    """
    ops = _ops()
    return ops.hardtanh_(input, min_val, max_val) if inplace else ops.hardtanh(input, min_val, max_val)


def hardsigmoid(input: Tensor, inplace: bool = False, *, alpha: float | None = None, beta: float | None = None) -> Tensor:
    r"""A sigmoid of three straight lines, as :func:`torch.nn.functional.hardsigmoid`.

    .. math:: \text{hardsigmoid}(x) = \frac{\min(\max(x + 3, 0), 6)}{6}

    With ``alpha`` and ``beta``, the form of ONNX's HardSigmoid and of Keras 2 (both: alpha = 0.2, beta = 0.5):

    .. math:: \text{hardsigmoid}(x) = \min(\max(\text{alpha} \cdot x + \text{beta}, 0), 1)

    The gradient is 1/6, or alpha, strictly between the breakpoints and 0 elsewhere, at NaN too.

    Args:
        input: a floating-point tensor of any shape.
        inplace: write to the input.
        alpha: the slope, not 0.
        beta: the value at 0, before clamping.

    Returns:
        A tensor of the input's shape and dtype; in place, the input.

    Raises:
        ValueError: alpha without beta or beta without alpha, ``alpha == 0``, NaN for either, or a finite number beyond the
            range of the input's dtype.
    """
    if alpha is None and beta is None:
        ops = _ops()
        return ops.hardsigmoid_(input) if inplace else ops.hardsigmoid(input)
    if alpha is None or beta is None:
        raise ValueError(f"hardsigmoid: expected both alpha and beta or neither, got alpha={alpha} and beta={beta}")
    ops = _ops(pytorch_has_it=False)
    if ops is _C:  # whose functions have no overloads
        return ops.hardsigmoid_affine_(input, alpha, beta) if inplace else ops.hardsigmoid_affine(input, alpha, beta)
    return ops.hardsigmoid_(input, alpha, beta) if inplace else ops.hardsigmoid(input, alpha, beta)


def hardshrink(input: Tensor, lambd: float = 0.5, inplace: bool = False) -> Tensor:
    r"""Set what is small to 0, as :func:`torch.nn.functional.hardshrink`.

    .. math:: \text{hardshrink}(x) = x \text{ if } |x| > \text{lambd, else } 0

    The gradient passes where ``|x| > lambd`` and at NaN.

    Args:
        input: a floating-point tensor of any shape.
        lambd: the threshold on ``|x|``, rounded to the input's dtype. If negative, every element passes unchanged.
        inplace: write to the input.

    Returns:
        A tensor of the input's shape and dtype; in place, the input.
    """
    ops = _ops(pytorch_has_it=not inplace)
    return ops.hardshrink_(input, lambd) if inplace else ops.hardshrink(input, lambd)


def softshrink(input: Tensor, lambd: float = 0.5, inplace: bool = False) -> Tensor:
    r"""Move every element towards 0, as :func:`torch.nn.functional.softshrink`.

    .. math:: \text{softshrink}(x) = \text{sign}(x) \cdot \max(|x| - \text{lambd}, 0)

    The gradient passes where ``|x| > lambd`` and at NaN.

    Args:
        input: a floating-point tensor of any shape.
        lambd: how far, finite and not negative; the input's dtype rounds it.
        inplace: write to the input.

    Returns:
        A tensor of the input's shape and dtype; in place, the input.

    Raises:
        RuntimeError: a ``lambd`` that is negative, infinite or NaN; ValueError where the installed PyTorch's op takes it.
    """
    ops = _ops(pytorch_has_it=not inplace)
    return ops.softshrink_(input, lambd) if inplace else ops.softshrink(input, lambd)


def threshold(input: Tensor, threshold: float, value: float, inplace: bool = False) -> Tensor:
    r"""Replace what doesn't exceed a threshold, as :func:`torch.nn.functional.threshold`.

    .. math:: \text{threshold}(x) = x \text{ if } x > \text{threshold, else value}

    The gradient passes where ``x > threshold`` and at NaN.

    Args:
        input: a tensor of real numbers, of any shape.
        threshold: the threshold.
        value: what replaces the elements that don't exceed it.
        inplace: write to the input.

    Returns:
        A tensor of the input's shape and dtype; in place, the input.
    """
    ops = _ops()
    return ops.threshold_(input, threshold, value) if inplace else ops.threshold(input, threshold, value)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    r"""The Gaussian error linear unit, as :func:`torch.nn.functional.gelu`.

    .. math:: \text{gelu}(x) = x \cdot \Phi(x)

    with the standard normal distribution function :math:`\Phi`, or, with ``approximate="tanh"``,

    .. math:: \text{gelu}(x) = \frac{x}{2} \left(1 + \tanh\left(\sqrt{2 / \pi} \cdot (x + 0.044715 x^3)\right)\right)

    Args:
        input: a floating-point tensor of any shape.
        approximate: ``"none"`` or ``"tanh"``.

    Returns:
        A tensor of the input's shape and dtype.

    Raises:
        RuntimeError: another ``approximate``.
    """
    ops = _ops()
    return ops.gelu(input, approximate) if ops is _C else ops.gelu(input, approximate=approximate)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    r"""The sigmoid linear unit, also known as swish, as :func:`torch.nn.functional.silu`.

    .. math:: \text{silu}(x) = \frac{x}{1 + e^{-x}}

    Args:
        input: a floating-point tensor of any shape.
        inplace: write to the input.

    Returns:
        A tensor of the input's shape and dtype; in place, the input.
    """
    ops = _ops()
    return ops.silu_(input) if inplace else ops.silu(input)


def hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    r"""A swish with a sigmoid of three straight lines, as :func:`torch.nn.functional.hardswish`.

    .. math:: \text{hardswish}(x) = x \cdot \frac{\min(\max(x + 3, 0), 6)}{6}

    Args:
        input: a floating-point tensor of any shape.
        inplace: write to the input.

    Returns:
        A tensor of the input's shape and dtype; in place, the input.
    """
    ops = _ops()
    return ops.hardswish_(input) if inplace else ops.hardswish(input)


def mish(input: Tensor, inplace: bool = False) -> Tensor:
    r"""A self-regularized non-monotonic function, as :func:`torch.nn.functional.mish`.

    .. math:: \text{mish}(x) = x \cdot \tanh(\ln(1 + e^x))

    Args:
        input: a floating-point tensor of any shape.
        inplace: write to the input.

    Returns:
        A tensor of the input's shape and dtype; in place, the input.
    """
    ops = _ops()
    return ops.mish_(input) if inplace else ops.mish(input)
