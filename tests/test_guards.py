"""The kernels write what is theirs, all of it and nothing else, at every size and alignment."""

import pytest
import torch

from family import DTYPES, FAMILY, bits, sample
from test_mask import packed

SIZES = range(258)
OFFSETS = range(16)


def garbage(numel, dtype, device):
    return torch.full((numel * dtype.itemsize,), 0xA5, dtype=torch.uint8, device=device).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_in_place_between_guards(row, dtype, device):
    """One buffer has a piece at every offset from 16 elements, and garbage around each."""
    for numel in SIZES:
        x = sample(row, numel, dtype, device).nan_to_num(0.1)
        stride = (numel // 16 + 2) * 16
        actual, expected = (garbage(17 * stride, dtype, device) for _ in range(2))
        for offset in OFFSETS:
            begin = 16 + offset * stride + offset
            actual[begin : begin + numel] = x
            row.inplace(actual[begin : begin + numel], *row.parameters)
            expected[begin : begin + numel] = row(x)
        assert torch.equal(bits(actual), bits(expected)), numel


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_outputs_over_garbage(row, dtype, device):
    """What is freed before a call holds garbage, and the allocator hands it out again."""
    reused = 0
    for numel in SIZES:
        x, grad = (sample(row, numel, dtype, device, seed).nan_to_num(0.1, 1, -1) for seed in (0, 1))
        values, flags = row.reference(x), packed(row.is_inside(x))
        scaled = row.scaled(grad, x)
        for offset in OFFSETS:
            piece = garbage(offset + numel, dtype, device)[offset:].copy_(x)
            freed = {garbage(numel, dtype, device).data_ptr(), garbage(len(flags), torch.uint8, device).data_ptr()}
            output, mask = row.with_mask(piece, *row.parameters)
            reused += output.data_ptr() in freed
            assert torch.equal(bits(output), bits(values)), (numel, offset)
            assert torch.equal(mask.cpu(), flags), (numel, offset)
            garbage(numel, dtype, device)
            assert torch.equal(torch.ops.fastact.masked_scale(grad, mask, *row.slopes), scaled), (numel, offset)
    assert reused  # how often is the allocator's affair
