"""The saved bits: their layout, and what masked_scale makes of them."""

import numpy as np
import pytest
import torch

from family import DTYPES, FAMILY, assert_same, bits, opmath, sample


def memory_order(x):
    """The elements of a dense tensor as they lie in memory."""
    return x.as_strided((x.numel(),), (1,))


def packed(flags):
    return torch.from_numpy(np.packbits(flags.cpu().numpy(), bitorder="little"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_layout(row, dtype, device):
    for numel in [0, 1, 7, 8, 9, 127, 512, 513, 40001]:
        x = sample(row, numel, dtype, device)
        output, mask = row.with_mask(x, *row.parameters)
        assert_same(output, row(x))
        assert mask.dtype == torch.uint8
        assert torch.equal(mask.cpu(), packed(row.is_inside(x)))  # packbits pads with 0, as the mask does


@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_order_is_the_outputs_memory(row, device):
    x = sample(row, 6 * 5 * 7 * 9, torch.float32, device).view(6, 5, 7, 9)
    for view in (
        x.permute(2, 0, 3, 1),
        x.to(memory_format=torch.channels_last),
        x[:, 1:4],
        x[..., ::2],
        x.expand(2, 6, 5, 7, 9),
    ):
        output, mask = row.with_mask(view, *row.parameters)
        in_order = memory_order(torch.empty_like(output).copy_(view))
        assert torch.equal(mask.cpu(), packed(row.is_inside(in_order)))


@pytest.mark.parametrize("slopes", [(1.0, 0.0), (0.0, 1.0), (1.0, -0.01), (1 / 6, 0.0), (2.5, float("inf"))])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_scale(dtype, slopes, device):
    for numel in [0, 1, 7, 8, 9, 513, 40001]:
        grad = sample(FAMILY[0], numel, dtype, device)
        flags = torch.rand(numel, generator=torch.Generator().manual_seed(numel)) < 0.5
        actual = torch.ops.fastact.masked_scale(grad, packed(flags).to(device), *slopes)
        kept, scaled = [], grad.to(opmath(dtype))
        for slope in slopes:
            kept.append(grad if slope == 1 else torch.zeros_like(grad) if slope == 0 else (scaled * slope).to(dtype))
        assert_same(actual, torch.where(flags.to(device), *kept))


def test_slope_one_keeps_the_bits_of_nan(device):
    grad = torch.tensor([0x7F800001, 0x7FC01234, -0x3FFFFF], dtype=torch.int32, device=device).view(torch.float32)
    mask = torch.tensor([0b111], dtype=torch.uint8, device=device)
    assert torch.equal(bits(torch.ops.fastact.masked_scale(grad, mask, 1.0, 0.0)), bits(grad))


def test_strided_gradient_is_read_in_its_own_memory_order(device):
    grad = torch.randn(6, 5, 7, 9, device=device).to(memory_format=torch.channels_last)
    flags = torch.rand(grad.shape, device=device).to(memory_format=torch.channels_last) < 0.5
    actual = torch.ops.fastact.masked_scale(grad, packed(memory_order(flags)).to(device), 1.0, 0.0)
    assert_same(actual, torch.where(flags, grad, 0.0))
