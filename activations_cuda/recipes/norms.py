"""Normalisations: their outputs from the statistics that they save. Each formula repeats, to the bit, what some kernel of
PyTorch's does; which one depends on device, layout and sizes.

x is the input, w the weight, b the bias; statistics are float32 for half types. A product and a sum are contracted (`_fma`)
where compilers contract PyTorch's.
"""

from typing import Any

import torch
import torch.nn.functional as F

from activations_cuda.recipes.step import Step
from activations_cuda.recipes.values import Kept, Underivable


def _fma(a, b, c):
    """a * b + c, rounded once; a product if there is no c."""
    return a * b if c is None else torch.addcmul(c, a, b)


def _wide(*tensors):
    """In the dtype in which kernels compute."""
    halves = torch.bfloat16, torch.float16
    return [tensor.float() if tensor is not None and tensor.dtype in halves else tensor for tensor in tensors]


def _along_channels(x, *tensors):
    shape = (1, -1) + (1,) * (x.dim() - 2)
    return [None if tensor is None else tensor.view(shape) for tensor in tensors]


def _bias(step, i, weight):
    """The bias of a norm, which its node doesn't save."""
    if step.node.next_functions[i][0] is not None:
        return step.operand(i)
    if weight is None:
        step.is_assumed = True  # most likely there is none
        return None
    norm = step.norm(weight)
    if norm is None:
        raise Underivable
    return None if norm.bias is None else Kept(norm.bias)


def _eps(step, weight):
    return getattr(step.norm(weight), "eps", None)


def batch_norm(formulas, mean: str, invstd: str, eps: str):
    """The rule of a batch norm whose node has its statistics and eps by these names."""

    def rule(step: Step) -> tuple[Any, ...]:
        x, w = step.operand(0, "input"), step.operand(1, "weight")
        b = _bias(step, 2, w)
        if not step.node._saved_training:
            return (_batch_norm_eval,), (x, w, b, step.saved("running_mean"), step.saved("running_var")), step.arguments(eps)
        return formulas, (x, w, b, step.saved(mean), step.saved(invstd)), step.arguments(eps)

    return rule


def _batch_norm_eval(x, w, b, mean, var, eps):
    return F.batch_norm(x, mean, var, w, b, False, 0.0, eps)


def _batch_norm_affine(x, w, b, mean, invstd, eps):
    """The CPU's."""
    X, w, b, mean, invstd = _wide(x, *_along_channels(x, w, b, mean, invstd))
    scale = invstd if w is None else invstd * w
    return torch.addcmul(_fma(-mean, scale, b), X, scale).to(x.dtype)


def _batch_norm_elementwise(x, w, b, mean, invstd, eps):
    """The second half of CUDA's."""
    return torch.batch_norm_elemt(x, w, b, mean, invstd, eps)


def _batch_norm_scaled(x, w, b, mean, invstd, eps):
    """cuDNN's, channels-last and for many shapes."""
    X, w, b, mean, invstd = _wide(x, *_along_channels(x, w, b, mean, invstd))
    return torch.addcmul(b, X - mean, w * invstd).to(x.dtype)


def _batch_norm_whole(x, w, b, mean, invstd, eps):
    return torch.native_batch_norm(x, w, b, None, None, True, 0.0, eps)[0]


def _batch_norm_cudnn(x, w, b, mean, invstd, eps):
    return torch.cudnn_batch_norm(x, w, b, None, None, True, 0.0, eps)[0]


NATIVE = _batch_norm_affine, _batch_norm_elementwise, _batch_norm_whole
CUDNN = _batch_norm_elementwise, _batch_norm_scaled, _batch_norm_cudnn


def layer_norm(step: Step) -> tuple[Any, ...]:
    x, w, b = (step.operand(i, name) for i, name in enumerate(("input", "weight", "bias")))
    eps = _eps(step, w)  # not saved, and needed only if the statistics were rounded to a half type
    formulas = (
        (_layer_norm_affine, _layer_norm_cuda) if eps is None else (_layer_norm_whole, _layer_norm_affine, _layer_norm_cuda)
    )
    return formulas, (x, w, b, step.saved("result1"), step.saved("result2")), (*step.arguments("normalized_shape"), eps)


def _layer_norm_affine(x, w, b, mean, rstd, shape, eps):
    X, w, b, mean, rstd = _wide(x, w, b, mean, rstd)
    y = (X - mean) * rstd
    return (_fma(y, w, b) if w is not None else y if b is None else y + b).to(x.dtype)


def _layer_norm_cuda(x, w, b, mean, rstd, shape, eps):
    """Vectorised on CUDA."""
    X, w, b, mean, rstd = _wide(x, w, b, mean, rstd)
    return _fma(w, rstd * (X - mean), b).to(x.dtype)


def _layer_norm_whole(x, w, b, mean, rstd, shape, eps):
    return torch.native_layer_norm(x, shape, w, b, eps)[0]


def group_norm(step: Step) -> tuple[Any, ...]:
    x, w = step.operand(0, "input"), step.operand(1, "weight")
    operands = x, w, _bias(step, 2, w), step.saved("result1"), step.saved("result2")
    eps = getattr(step.node, "_saved_eps", None) or _eps(step, w)  # not saved from torch 2.15 on
    formulas = (_group_norm_affine, _group_norm_centred, _group_norm_whole)
    return formulas[: 2 if eps is None else 3], operands, (*step.arguments("N", "C", "HxW", "group"), eps)


def _along_groups(x, w, b, mean, rstd, n, c, groups):
    shape = (1, -1) + (1,) * (x.dim() - 2)
    mean, rstd = (each.repeat_interleave(c // groups, 1).view(n, *shape[1:]) for each in _wide(mean, rstd))
    return _wide(x, *(None if each is None else each.view(shape) for each in (w, b)), mean, rstd)


def _group_norm_affine(x, w, b, mean, rstd, n, c, hw, groups, eps):
    X, w, b, mean, rstd = _along_groups(x, w, b, mean, rstd, n, c, groups)
    scale = rstd if w is None else rstd * w
    return torch.addcmul(_fma(-mean, scale, b), X, scale).to(x.dtype)


def _group_norm_centred(x, w, b, mean, rstd, n, c, hw, groups, eps):
    X, w, b, mean, rstd = _along_groups(x, w, b, mean, rstd, n, c, groups)
    y = (X - mean) * rstd
    return (y if w is None else _fma(y, w, b)).to(x.dtype)


def _group_norm_whole(x, w, b, mean, rstd, n, c, hw, groups, eps):
    return torch.native_group_norm(x, w, b, n, c, hw, groups, eps)[0]


def rms_norm(step: Step) -> tuple[Any, ...]:
    operands = step.operand(0, "input"), step.operand(1, "weight"), step.saved("result1")
    return (_rms_norm, _rms_norm_whole), operands, step.arguments("normalized_shape", "eps")


def _rms_norm(x, w, rstd, shape, eps):
    X, W, rstd = _wide(x, w, rstd)
    return (X * rstd if W is None else X * rstd * W).to(x.dtype)


def _rms_norm_whole(x, w, rstd, shape, eps):
    return torch._fused_rms_norm(x, shape, w, eps)[0]
