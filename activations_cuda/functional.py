"""The functional forms, named and ordered as in :mod:`torch.nn.functional`.

Each returns PyTorch's own numbers to the bit on a plain CPU or CUDA tensor of dtype float64, float32, float16 or bfloat16, and
keeps one bit per element for the backward pass. Under torch.compile, for tensor subclasses and in functorch's transforms each
is a handful of ATen ops, of which a value's last bit may differ. Any other dtype gets what PyTorch's op does with it.
"""

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from activations_cuda import _C

_ops = torch.ops.fastact  # what torch.compile can trace; calling the compiled module instead saves a microsecond


def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0) -> Tensor:
    r"""Clamp every element to a range, as :func:`torch.nn.functional.hardtanh`.

    .. math:: \text{hardtanh}(x) = \min(\max(x, \text{min\_val}), \text{max\_val})

    The gradient passes where ``min_val < x < max_val`` and at NaN, and is 0 elsewhere, the bounds included.

    Args:
        input: a real tensor of any shape and strides.
        min_val: the lower bound.
        max_val: the upper bound, not below the lower.

    Returns:
        A new tensor of the input's shape, dtype and device, with the strides PyTorch's op gives it.

    Raises:
        ValueError: ``min_val > max_val``.
        NotImplementedError: a bool or complex input.
    """
    if is_dynamo_compiling():
        return _ops.hardtanh(input, min_val, max_val)
    return _C.hardtanh(input, min_val, max_val)


def hardsigmoid(input: Tensor, alpha: float | None = None, beta: float | None = None) -> Tensor:
    r"""A sigmoid of three straight lines, as :func:`torch.nn.functional.hardsigmoid`.

    .. math:: \text{hardsigmoid}(x) = \frac{\min(\max(x + 3, 0), 6)}{6}

    With ``alpha`` and ``beta``, the form of ONNX's HardSigmoid and of Keras 2 (both: alpha = 0.2, beta = 0.5):

    .. math:: \text{hardsigmoid}(x) = \min(\max(\text{alpha} \cdot x + \text{beta}, 0), 1)

    The gradient is 1/6, or alpha, strictly between the breakpoints and 0 elsewhere, at NaN too.

    Args:
        input: a floating-point tensor of any shape and strides.
        alpha: the slope, not 0.
        beta: the value at 0.

    Returns:
        A new tensor of the input's shape, dtype and device, with the strides PyTorch's op gives it.

    Raises:
        ValueError: alpha without beta or beta without alpha, ``alpha == 0``, or NaN for either.
        NotImplementedError: a dtype that isn't floating-point.
    """
    if alpha is None and beta is None:
        return _ops.hardsigmoid(input) if is_dynamo_compiling() else _C.hardsigmoid(input)
    if alpha is None or beta is None:
        raise ValueError(f"hardsigmoid: expected both alpha and beta or neither, got alpha={alpha} and beta={beta}")
    if is_dynamo_compiling():
        return _ops.hardsigmoid.affine(input, alpha, beta)
    return _C.hardsigmoid_affine(input, alpha, beta)
