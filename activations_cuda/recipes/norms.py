"""Normalizations: their outputs from the statistics that they save. Each formula repeats, to the bit, what some kernel of
PyTorch's does; which one depends on device, layout and sizes.

x is the input, w the weight, b the bias; statistics are float32 for half types. A product and a sum are contracted (`_fma`)
where compilers contract PyTorch's.
"""

import math
from typing import Any

import torch

from activations_cuda.recipes.step import OpRule, Result, Step
from activations_cuda.recipes.verification import Candidates, Formula

HALVES = torch.bfloat16, torch.float16
EPS = 1e-5  # in trials, where a node doesn't save its own


def _fma(a, b, c):
    """a * b + c, rounded once. Without c kernels add 0 to the product, which makes -0 a 0."""
    return (a * b).add_(0.0) if c is None else torch.addcmul(c, a, b)


def _wide(*tensors):
    """In the dtype in which kernels compute."""
    return [tensor.float() if tensor is not None and tensor.dtype in HALVES else tensor for tensor in tensors]


def _closest(x, mean, rstd):
    """The normalized element of each column that is closest to 0.

    A bias that cancels its product with the weight leaves nothing but their rounding, which tells formulas apart.
    """
    normalized = (x.double() - mean.double()) * rstd.double()
    return normalized.gather(0, normalized.abs().argmin(0, keepdim=True))[0]


SAMPLES, ROWS = 8, 512  # in which it is looked for: enough for one that is close to 0


def _closest_of_channels(x, mean, rstd, *_):
    x, channels = x[:SAMPLES], x.size(1)
    groups = rstd.numel() if rstd.dim() == 1 else rstd.size(1)
    mean, rstd = (
        each.reshape(-1, groups)[:SAMPLES].expand(len(x), groups).repeat_interleave(channels // groups, 1).unsqueeze(2)
        for each in (mean, rstd)
    )
    columns = torch.broadcast_tensors(x.reshape(len(x), channels, -1), mean, rstd)
    return _closest(*(each.transpose(1, 2).flatten(0, 1) for each in columns))


# How kernels compute an output, in float32 for half types. Written to `out` if given, which may be x.


def _affine(x, w, b, mean, rstd, out):
    scale = rstd if w is None else rstd * w
    return torch.addcmul(_fma(-mean, scale, b), x, scale, out=out)


def _folded(x, w, b, mean, rstd, out):
    """Where a kernel before has computed scale and shift, each rounded."""
    scale = rstd if w is None else rstd * w
    shift = 0.0 - mean * scale if b is None else b - mean * scale
    return torch.addcmul(shift, x, scale, out=out)


def _scaled(x, w, b, mean, rstd, out):
    x = torch.sub(x, mean, out=out)
    return torch.addcmul(b, x, w * rstd, out=x)


def _centered(x, w, b, mean, rstd, out):
    x = torch.sub(x, mean, out=out).mul_(rstd)
    if w is None:
        return x if b is None else x.add_(b)
    return x.mul_(w) if b is None else torch.addcmul(b, x, w, out=x)


def _centered_on_cpu(x, w, b, mean, rstd, out):
    y = _centered(x, w, b, mean, rstd, out)
    return y.add_(0.0) if b is None else y  # which makes -0 a 0


# Weight, bias and statistics, in shapes that broadcast against x.


def _of_channels(x, w, b, mean, rstd, *_):
    shape = (1, -1) + (1,) * (x.dim() - 2)
    return [None if each is None else each.view(shape) for each in (w, b, mean, rstd)]


def _of_groups(x, w, b, mean, rstd, n, c, hw, groups, *_):
    shape = (1, -1) + (1,) * (x.dim() - 2)
    statistics = (each.repeat_interleave(c // groups, 1).view(n, *shape[1:]) for each in (mean, rstd))
    return [*(None if each is None else each.view(shape) for each in (w, b)), *statistics]


def _of_rows(x, w, b, mean, rstd, *_):
    return w, b, mean, rstd


def _formula(name, broadcast, arithmetic):
    """A formula of (x, weight, bias, mean, 1/std, *arguments)."""

    def formula(x, *others):
        wide, *operands = _wide(x, *broadcast(x, *others))
        return arithmetic(wide, *operands, out=None if wide is x else wide).to(x.dtype)

    formula.__name__ = name
    return formula


STATISTICS = "result1", "result2"
RUNNING = "running_mean", "running_var"


def batch_norm(op: Any, eps: str, formulas: tuple[Formula, ...], on_cpu: tuple[Formula, ...] | None = None) -> OpRule:
    """The rule of a batch norm whose node saves eps by this name. If no other formula fits, it is the op itself."""

    def in_training(x, w, b, statistics, eps):
        # With running ones of the same dtype, by which the CPU's op chooses the dtype in which it rounds.
        running = [torch.zeros_like(each) for each in statistics]
        return op(x, w, b, *running, True, 0.0, eps)

    def whole(x, w, b, mean, invstd, eps):
        return in_training(x, w, b, (mean, invstd), eps)[0]

    candidates = Candidates((*formulas, whole), in_training, _closest_of_channels, on_cpu and (*on_cpu, whole))

    def otherwise(step: Step) -> Result:
        x, w, b = step.operand(0, "input"), step.operand(1, "weight"), step.bias(2)
        if step.node._saved_training:  # type: ignore[attr-defined]
            return candidates, (x, w, b, *map(step.saved, STATISTICS)), step.arguments(eps)
        mean, var = map(step.statistics, RUNNING)
        arguments = step.arguments(eps)
        return BATCH_NORM_IN_EVALUATION, (x, w, b, mean, step.computed(_invstd, var, *arguments), var), arguments

    return OpRule(
        candidates,
        ("input", "weight", None),
        (eps,),
        saved=STATISTICS,
        when="training",
        contiguous=RUNNING,
        otherwise=otherwise,
    )


batch_norm_affine = _formula("batch_norm_affine", _of_channels, _affine)  # the CPU's
batch_norm_scaled = _formula("batch_norm_scaled", _of_channels, _scaled)  # cuDNN's, channels-last
batch_norm_folded = _formula("batch_norm_folded", _of_channels, _folded)  # cuDNN's, contiguous, of small channels


def batch_norm_elementwise(x, w, b, mean, invstd, *var_and_eps):
    """The second half of CUDA's."""
    return torch.batch_norm_elemt(x, w, b, mean, invstd, var_and_eps[-1])


NATIVE = batch_norm_elementwise, batch_norm_affine
NATIVE_ON_CPU = (batch_norm_affine,)
CUDNN = batch_norm_elementwise, batch_norm_scaled, batch_norm_folded


def _invstd(var, eps):
    """1/std of a running variance, as kernels compute it."""
    (var,) = _wide(var)
    return (var + eps).rsqrt_()


def batch_norm_evaluated(x, w, b, mean, invstd, var, eps):
    return torch.batch_norm(x, w, b, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled)


def _batch_norm_with_some_statistics(x, w, b, statistics, eps):
    """The op of trials: in evaluation, with statistics of a part of the input."""
    part = x[:SAMPLES].transpose(0, 1).flatten(1).float()
    var, mean = (each.to(statistics[0].dtype) for each in torch.var_mean(part, 1, correction=0))
    invstd = _invstd(var, eps)
    return batch_norm_evaluated(x, w, b, mean, invstd, var, eps), mean, invstd, var


BATCH_NORM_IN_EVALUATION = Candidates(
    (batch_norm_elementwise, batch_norm_affine, batch_norm_evaluated),
    _batch_norm_with_some_statistics,
    _closest_of_channels,
    on_cpu=(batch_norm_affine, batch_norm_evaluated),
)


def _layer_norm_op(x, w, b, statistics, shape):
    return torch.native_layer_norm(x, shape, w, b, EPS)


def _closest_of_rows(x, mean, rstd, shape, *_):
    rows = x.reshape(-1, math.prod(shape))[:ROWS]
    return _closest(rows, *(each.reshape(-1, 1)[:ROWS] for each in (mean, rstd))).view(shape)


layer_norm_centered = _formula("layer_norm_centered", _of_rows, _centered)
layer_norm_centered_on_cpu = _formula("layer_norm_centered_on_cpu", _of_rows, _centered_on_cpu)


def layer_norm_whole(x, w, b, shape, eps):
    return torch.native_layer_norm(x, shape, w, b, eps)[0]


def _layer_norm_again(step: Step) -> Result:
    """Takes the statistics again, since the saved ones were rounded to a half type. The node doesn't save eps."""
    operands = (step.operand(i, name) for i, name in enumerate(("input", "weight", "bias")))
    return layer_norm_whole, tuple(operands), (*step.arguments("normalized_shape"), step.eps())


LAYER_NORM = OpRule(
    Candidates((layer_norm_centered,), _layer_norm_op, _closest_of_rows, on_cpu=(layer_norm_centered_on_cpu,)),
    ("input", "weight", "bias"),
    ("normalized_shape",),
    saved=STATISTICS,
    otherwise=_layer_norm_again,
)


def _group_norm_op(x, w, b, statistics, n, c, hw, groups, eps=EPS):
    return torch.native_group_norm(x, w, b, n, c, hw, groups, eps)


def group_norm_whole(x, w, b, mean, rstd, n, c, hw, groups, eps=None):
    if eps is None:
        raise NotImplementedError("eps isn't known")
    return torch.native_group_norm(x, w, b, n, c, hw, groups, eps)[0]


group_norm_affine = _formula("group_norm_affine", _of_groups, _affine)
group_norm_folded = _formula("group_norm_folded", _of_groups, _folded)
group_norm_centered = _formula("group_norm_centered", _of_groups, _centered)

_GROUP_NORM = Candidates(
    (group_norm_whole, group_norm_folded, group_norm_affine, group_norm_centered), _group_norm_op, _closest_of_channels
)
# Not saved from torch 2.15 on.
_SAVES_EPS = hasattr(torch._C._functions.NativeGroupNormBackward0, "_saved_eps")  # type: ignore[attr-defined]
GROUP_NORM_ARGUMENTS = "N", "C", "HxW", "group", *(["eps"] if _SAVES_EPS else [])


def _group_norm_as_called(step: Step) -> Result:
    """For a bias without a gradient, or where the node doesn't save eps."""
    operands = step.operand(0, "input"), step.operand(1, "weight"), step.bias(2), *map(step.saved, STATISTICS)
    return _GROUP_NORM, operands, (*step.arguments(*GROUP_NORM_ARGUMENTS), *([] if _SAVES_EPS else [step.eps()]))


GROUP_NORM = OpRule(
    _GROUP_NORM,
    ("input", "weight", None),
    GROUP_NORM_ARGUMENTS,
    saved=STATISTICS,
    otherwise=_group_norm_as_called,
)


def rms_norm(step: Step) -> Result:
    operands = step.operand(0, "input"), step.operand(1, "weight"), None, step.saved("result1")
    return _RMS_NORM, operands, step.arguments("normalized_shape")


def _rms_norm_op(x, w, b, statistics, shape):
    return torch._fused_rms_norm(x, shape, w, EPS)


def rms_norm_scaled(x, w, b, rstd, shape):
    wide, w, rstd = _wide(x, w, rstd)
    y = wide * rstd
    return (y if w is None else y.mul_(w)).to(x.dtype)


_RMS_NORM = Candidates((rms_norm_scaled,), _rms_norm_op, _closest_of_rows)
