"""The family as the tests know it: a row for each op and set of parameters, crossed with dtypes, devices and layouts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from activations_cuda.conversion import pays_by_default
from activations_cuda.replacements import OURS

BY_DEFAULT = [kind for kind in OURS if pays_by_default(kind, inplace=False)]  # what convert(model) converts
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


class AffineHardsigmoid(torch.autograd.Function):
    """What PyTorch doesn't have: computed in opmath, one rounding for each operation."""

    @staticmethod
    def forward(ctx, x, alpha, beta):
        y = x.to(opmath(x.dtype)) * alpha + beta
        ctx.save_for_backward((y > 0) & (y < 1))
        ctx.alpha = alpha
        return y.clamp(0, 1).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (inside,) = ctx.saved_tensors
        scaled = (grad.to(opmath(grad.dtype)) * ctx.alpha).to(grad.dtype)
        return torch.where(inside, scaled, 0.0), None, None


def softshrink(x, lambd):
    """PyTorch's. On the CPU it shrinks a negative value to -0 or to +0, depending on its place in the tensor; here it is +0."""
    y = F.softshrink(x, lambd)
    return y + 0.0 if x.is_cpu else y


@dataclass(frozen=True)
class Row:
    name: str
    pytorch: Callable  # the op to equal, called as pytorch(x, *parameters)
    inside: Callable  # the rule, called as inside(x, *parameters) on a tensor in opmath
    parameters: tuple = ()
    breakpoints: tuple = ()
    slopes: tuple = (1.0, 0.0)  # inside, outside
    overload: str = "default"
    takes_dtype: tuple = ()  # the devices on which PyTorch compares with its parameters in the dtype, not in opmath

    def __str__(self):
        return f"{self.name}.{self.overload}{self.parameters}".replace(" ", "").replace(".default", "").removesuffix("()")

    def _find(self, name):
        return getattr(getattr(torch.ops.fastact, name), self.overload)

    @property
    def op(self):
        return self._find(self.name)

    @property
    def inplace(self):
        return self._find(self.name + "_")

    @property
    def with_mask(self):
        return self._find(self.name + "_with_mask")

    def __call__(self, x):
        return self.op(x, *self.parameters)

    def reference(self, x):
        return self.pytorch(x, *self.parameters)

    def is_inside(self, x):
        parameters = torch.tensor(self.parameters, dtype=torch.float64)
        if x.device.type in self.takes_dtype:
            parameters = parameters.to(x.dtype)
        return self.inside(x.to(opmath(x.dtype)), *parameters.tolist())

    def derivative(self, x):
        inside, outside = torch.tensor(self.slopes, dtype=opmath(x.dtype), device=x.device)
        return torch.where(self.is_inside(x), inside, outside)

    def scaled(self, grad, x):
        """What backward makes of `grad`: a slope of 1 leaves it as it is, a slope of 0 nothing of it."""
        pieces = [grad if slope == 1 else torch.zeros_like(grad) if slope == 0 else grad * slope for slope in self.slopes]
        return torch.where(self.is_inside(x), *pieces)


def hardtanh_row(min_val, max_val):
    return Row("hardtanh", F.hardtanh, lambda x, low, high: ~((x <= low) | (x >= high)), (min_val, max_val), (min_val, max_val))


def affine_row(alpha, beta):
    return Row(
        "hardsigmoid",
        AffineHardsigmoid.apply,
        lambda x, alpha, beta: (x * alpha + beta > 0) & (x * alpha + beta < 1),
        (alpha, beta),
        (-beta / alpha, (1 - beta) / alpha),
        (alpha, 0.0),
        overload="affine",
    )


def is_shrunk(x, lambd):
    return (x >= -lambd) & (x <= lambd)


FAMILY = [
    hardtanh_row(-1.0, 1.0),
    hardtanh_row(-0.3, 0.7),  # bounds that no dtype represents
    hardtanh_row(0.5, 0.5),
    hardtanh_row(-float("inf"), 2.0),
    # PyTorch's kernels round one sixth to float, in float64 too.
    Row(
        "hardsigmoid",
        F.hardsigmoid,
        lambda x: (x > -3) & (x < 3),
        (),
        (-3.0, 3.0),
        (float(torch.tensor(1 / 6, dtype=torch.float32)), 0.0),
    ),
    affine_row(0.2, 0.5),
    affine_row(-0.75, 0.25),
    Row("relu", F.relu, lambda x: ~(x <= 0), (), (0.0,)),
    Row("relu6", F.relu6, lambda x: ~((x <= 0) | (x >= 6)), (), (0.0, 6.0)),
    Row("leaky_relu", F.leaky_relu, lambda x, slope: x > 0, (0.01,), (0.0,), (1.0, 0.01)),
    Row("leaky_relu", F.leaky_relu, lambda x, slope: x > 0, (-0.2,), (0.0,), (1.0, -0.2)),
    Row("hardshrink", F.hardshrink, lambda x, lambd: ~is_shrunk(x, lambd), (0.3,), (-0.3, 0.3), takes_dtype=("cpu", "cuda")),
    Row("softshrink", softshrink, lambda x, lambd: ~is_shrunk(x, lambd), (0.3,), (-0.3, 0.3), takes_dtype=("cpu", "cuda")),
    Row("threshold", F.threshold, lambda x, t, v: ~(x <= t), (-0.3, 7.1), (-0.3,), takes_dtype=("cuda",)),
]
A_FEW = [FAMILY[0], FAMILY[4]]  # a slope of 1 and another, where that will do


@dataclass(frozen=True)
class Smooth:
    """A smooth activation: what to equal is PyTorch's op, whatever that computes."""

    name: str
    parameters: tuple = ()
    bits: tuple = (5, 10)  # of the code, in bfloat16 and float16
    pytorch: str = ""  # the name of the op to equal, where it is another

    def __str__(self):
        return "_".join((self.name, *self.parameters))

    def _arguments(self):
        return dict(zip(("approximate",), self.parameters, strict=False))

    def pytorchs(self, suffix=""):
        return getattr(torch.ops.aten, (self.pytorch or self.name) + suffix)

    def __call__(self, x):
        return getattr(torch.ops.fastact, self.name)(x, **self._arguments())

    def inplace(self, x, *_):
        return getattr(torch.ops.fastact, self.name + "_")(x, **self._arguments())

    def with_code(self, x):
        return getattr(torch.ops.fastact, self.name + "_with_code")(x, *self.parameters)

    def reference(self, x):
        return self.pytorchs()(x, **self._arguments())

    def reference_inplace(self, x):
        return self.pytorchs("_")(x, **self._arguments())

    def code_backward(self, *arguments, **keywords):
        return torch.ops.fastact.code_backward(*arguments, str(self).removesuffix("_none"), **keywords)

    def reference_backward(self, grad, x):
        return self.pytorchs("_backward")(grad, x, **self._arguments())

    def code_bytes(self, x):
        return (x.numel() + 7) // 8 * self.bits[x.dtype == torch.float16]


SMOOTH = [
    Smooth("gelu", ("none",), (8, 10)),
    Smooth("gelu", ("tanh",), (5, 8)),
    Smooth("silu"),
    Smooth("hardswish", (), (5, 8)),
    Smooth("mish"),
]
HALF_TYPES = [torch.bfloat16, torch.float16]


def every_pattern(dtype, device="cpu"):
    """All 65,536 values of a dtype of 16 bits."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).to(device)


def forms(row):
    """The op, and the op in place of a copy."""
    return row, lambda x: row.inplace(x * 1, *row.parameters)


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def opmath(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def bits(x):
    return x.view(BITS[x.element_size()])


def neighbors(values):
    """The values, and for each the next ones below and above in its dtype."""
    around = [values, *((bits(values) + step).view(values.dtype) for step in (-1, 1))]
    return torch.cat([x[~x.isnan()] for x in around])


def special_values(row, dtype):
    finfo = torch.finfo(dtype)
    smallest = bits(torch.zeros(1, dtype=dtype)).add(1).view(dtype).item()
    points = [*row.breakpoints, finfo.tiny, smallest, finfo.max, finfo.eps, 1.0, 2.0]
    values = torch.tensor([p for p in points if p != 0 and abs(p) != float("inf")], dtype=torch.float64).to(dtype)
    extremes = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0], dtype=dtype)
    return torch.cat([neighbors(torch.cat([values, -values])), extremes])


def sample(row, numel, dtype, device="cpu", seed=0):
    """`numel` normal values wide enough to leave every linear piece, with the special values strewn among them."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(numel, generator=generator, dtype=torch.float32) * 3).to(dtype)
    special = special_values(row, dtype)
    where = torch.randperm(numel, generator=generator)[: len(special)]
    x[where] = special[torch.randperm(len(special), generator=generator)[: len(where)]]
    return x.to(device)


def assert_same(actual, expected):
    """Equal dtype, shape, strides and bits, but for the payload of NaN, which PyTorch itself does not keep."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.stride() == expected.stride()
    assert_same_values(actual, expected)


def assert_same_values(actual, expected):
    different = (bits(actual) != bits(expected)) & ~(actual.isnan() & expected.isnan())
    assert not different.any(), (
        f"{int(different.sum())} of {actual.numel()} elements differ, the first: "
        f"{actual[different][0].item()!r} where {expected[different][0].item()!r} was expected"
    )
