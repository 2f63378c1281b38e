"""Every value of the half types, and of float32 one in 97: values, masks and gradients to the bit."""

from dataclasses import replace

import pytest
import torch

from family import FAMILY
from test_exact import check
from test_mask import packed

# Beside those of the family: breakpoints at zero, at subnormals, at the ends of the range.
MORE = {
    "hardtanh": [(0.0, 6.0), (-6.0e-8, 6.0e-8), (-65504.0, 65504.0), (-1.0, float("inf"))],
    "leaky_relu": [(1.0,), (3.0e-8,), (-65504.0,)],
    "hardshrink": [(0.0,), (6.0e-8,), (65504.0,), (-1.0,)],
    "softshrink": [(0.0,), (6.0e-8,), (65504.0,)],
    "threshold": [(0.0, 0.0), (65504.0, -1.0), (-6.0e-8, float("inf"))],
}
ROWS = FAMILY + [
    replace(row, parameters=parameters, slopes=(1.0, *parameters) if name == "leaky_relu" else row.slopes)
    for name, more in MORE.items()
    for row in [next(row for row in FAMILY if row.name == name)]
    for parameters in more
]


def check_with_mask(row, x):
    check(row, x)
    _, mask = row.with_mask(x, *row.parameters)
    assert torch.equal(mask.cpu(), packed(row.is_inside(x)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_half(row, dtype, device):
    check_with_mask(row, torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device))


@pytest.mark.cuda
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_one_float_in_97(row):
    patterns = torch.arange(-(2**31), 2**31, 97, dtype=torch.int64, device="cuda")
    assert len(patterns) > 44e6
    check_with_mask(row, patterns.to(torch.int32).view(torch.float32))
