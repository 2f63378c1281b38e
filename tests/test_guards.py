"""The kernels write what is theirs, all of it and nothing else, at every size and alignment."""

import pytest
import torch

from family import A_FEW, DTYPES, FAMILY, HALF_TYPES, SMOOTH, assert_same_values, bits, sample
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


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("row", SMOOTH, ids=str)
def test_codes_over_garbage(row, dtype, device):
    for numel in SIZES:
        x, grad = (sample(A_FEW[0], numel, dtype, device, seed) for seed in (0, 1))
        expected = row.reference(x), row.reference_backward(grad, x)
        _, clean = row.with_code(x)
        for offset in OFFSETS[:8]:
            piece = garbage(offset + numel, dtype, device)[offset:].copy_(x)
            garbage(numel, dtype, device), garbage(len(clean), torch.uint8, device)
            output, code = row.with_code(piece)
            assert torch.equal(code, clean), (numel, offset)
            garbage(numel, dtype, device)
            for actual, reference in zip((output, row.code_backward(grad, output, code)), expected, strict=True):
                assert_same_values(actual, reference)


def rounded(size):
    """What PyTorch's allocator on CUDA hands out for so many bytes."""
    return -(-size // 512) * 512


def seen_behind(outputs, *args):
    """How many bytes of garbage are found behind the outputs, in memory that is handed out again."""
    sizes = [rounded(output.nbytes) for output in outputs(*args)]
    blocks = [garbage(size, torch.uint8, "cuda") for size in sizes]
    freed = {(block.data_ptr(), len(block)) for block in blocks}
    del blocks
    ends = {(output.data_ptr(), rounded(output.nbytes)): output.nbytes for output in outputs(*args)}
    seen = 0
    blocks = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    for block in blocks:
        place = block.data_ptr(), len(block)
        if place in freed and place in ends:
            behind = block[ends[place] :]
            assert torch.equal(behind, garbage(len(behind), torch.uint8, "cuda")), (args[0].numel(), ends[place])
            seen += len(behind)
    return seen


def assert_garbage_stays(forward, backward, inputs):
    seen = set()
    for numel in SIZES[1:]:
        x = inputs(numel)
        seen.add((seen_behind(forward, x) > 0, seen_behind(backward, x, forward(x)[1]) > 0))
    assert (True, True) in seen


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_garbage_behind_outputs(row, dtype):
    """It stays. On a CPU AddressSanitizer sees to it."""

    def forward(x):
        return row.with_mask(x, *row.parameters)

    def backward(grad, mask):
        return (torch.ops.fastact.masked_scale(grad, mask, *row.slopes),)

    assert_garbage_stays(forward, backward, lambda numel: sample(row, numel, dtype, "cuda"))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("row", SMOOTH, ids=str)
def test_garbage_behind_codes(row, dtype):
    def backward(grad, code):
        return (row.code_backward(grad, grad, code),)

    assert_garbage_stays(row.with_code, backward, lambda numel: row(sample(A_FEW[0], numel, dtype, "cuda")))
