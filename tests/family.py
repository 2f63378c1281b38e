"""The family as the tests know it: a row for each op and set of parameters, crossed with dtypes, devices and layouts."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import activations_cuda  # noqa: F401 - registers the ops

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


@dataclass(frozen=True)
class Row:
    op: torch._ops.OpOverload
    pytorch: Callable  # the op to equal, called as pytorch(x, *parameters)
    parameters: tuple = ()
    breakpoints: tuple = ()
    inside: Callable = None  # the rule, called as inside(x, *parameters) on a tensor in opmath
    slope: float = 1.0  # of the linear piece; the other one is 0

    def __str__(self):
        return f"{self.op.__name__}{self.parameters}".replace(" ", "")

    @property
    def with_mask(self):
        packet = getattr(torch.ops.fastact, self.op._schema.name.split("::")[1] + "_with_mask")
        return getattr(packet, self.op._overloadname)

    def __call__(self, x):
        return self.op(x, *self.parameters)

    def reference(self, x):
        return self.pytorch(x, *self.parameters)

    def is_inside(self, x):
        return self.inside(x.to(opmath(x.dtype)), *self.parameters)


def hardtanh_row(min_val, max_val):
    return Row(
        torch.ops.fastact.hardtanh.default,
        F.hardtanh,
        (min_val, max_val),
        (min_val, max_val),
        lambda x, low, high: ~((x <= low) | (x >= high)),
    )


FAMILY = [
    hardtanh_row(-1.0, 1.0),
    hardtanh_row(0.0, 6.0),  # relu6
    hardtanh_row(-0.3, 0.7),  # bounds that no dtype represents
    hardtanh_row(0.5, 0.5),
    hardtanh_row(-float("inf"), 2.0),
    Row(
        torch.ops.fastact.hardsigmoid.default,
        F.hardsigmoid,
        (),
        (-3.0, 3.0),
        lambda x: (x > -3) & (x < 3),
        slope=float(torch.tensor(1 / 6, dtype=torch.float32)),
    ),
    Row(
        torch.ops.fastact.hardsigmoid.affine,
        AffineHardsigmoid.apply,
        (0.2, 0.5),
        (-2.5, 2.5),
        lambda x, alpha, beta: (x * alpha + beta > 0) & (x * alpha + beta < 1),
        slope=0.2,
    ),
    Row(
        torch.ops.fastact.hardsigmoid.affine,
        AffineHardsigmoid.apply,
        (-0.75, 0.25),
        (-1.0, 1 / 3),
        lambda x, alpha, beta: (x * alpha + beta > 0) & (x * alpha + beta < 1),
        slope=-0.75,
    ),
]


def opmath(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def bits(x):
    return x.view(BITS[x.element_size()])


def neighbours(values):
    """The values, and for each the next ones below and above in its dtype."""
    around = [values, *((bits(values) + step).view(values.dtype) for step in (-1, 1))]
    return torch.cat([x[~x.isnan()] for x in around])


def special_values(row, dtype):
    finfo = torch.finfo(dtype)
    smallest = bits(torch.zeros(1, dtype=dtype)).add(1).view(dtype).item()
    points = [*row.breakpoints, finfo.tiny, smallest, finfo.max, finfo.eps, 1.0, 2.0]
    values = torch.tensor([p for p in points if p != 0 and abs(p) != float("inf")], dtype=torch.float64).to(dtype)
    extremes = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0], dtype=dtype)
    return torch.cat([neighbours(torch.cat([values, -values])), extremes])


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
