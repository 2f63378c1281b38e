"""What joins tensors in the scope, as torch.cat does: its bits and strides, on a GPU by a kernel of ours where it can."""

import pytest
import torch

from activations_cuda import _C, recompute
from activations_cuda.recipes.verification import is_identical
from answers import kernels

SIZES = (48,), (3, 5), (2, 3, 32), (2, 3, 5, 16), (2, 16, 1, 1), (1, 16, 3, 5), (2, 2, 3, 4, 16)
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def check(tensors, dim, is_ours):
    def join():
        return _C.recipes.join(tuple(tensors), dim)

    expected = torch.cat(tensors, dim)
    found, names = kernels(join) if expected.is_cuda else (join(), set())
    assert torch.equal(found, expected)
    assert found.dtype == expected.dtype
    assert found.stride() == expected.stride()
    if expected.is_cuda:
        assert any("join_kernel" in name for name in names) == is_ours


def parts(sizes, dim, lengths, device, dtype=torch.bfloat16, layout=torch.contiguous_format):
    torch.manual_seed(0)
    shapes = [(*sizes[:dim], length, *sizes[dim + 1 :]) for length in lengths]
    return [torch.randn(shape, device=device).to(dtype).contiguous(memory_format=layout) for shape in shapes]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.bool])
@pytest.mark.parametrize("lengths", [(16,), (16, 32), (64, 16, 48, 16), (16,) * 64])
@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_along_each_dimension(sizes, layout, lengths, dtype):
    if layout != "contiguous" and len(sizes) not in LAYOUTS:
        pytest.skip("there is no such layout")
    layout = torch.contiguous_format if layout == "contiguous" else LAYOUTS[len(sizes)]
    for dim in range(len(sizes)):
        tensors = parts(sizes, dim, lengths, "cuda", dtype, layout)
        assert all(each.is_contiguous(memory_format=layout) for each in tensors)
        check(tensors, dim, is_ours=True)
        check(tensors, dim - len(sizes), is_ours=True)


def test_many_rows(device):
    check(parts((70, 1, 61, 63), 1, (64, 32, 8), device, layout=torch.channels_last), 1, is_ours=True)


def test_where_the_op_takes_another_way(device):
    x, y = parts((2, 3, 4, 4), 1, (16, 32), device)
    z = y.contiguous(memory_format=torch.channels_last)
    check([x, z], 1, is_ours=False)  # in two layouts
    one, other = parts((2, 3, 1, 1), 1, (16, 32), device)
    check([one.clone(memory_format=torch.channels_last), other], 1, is_ours=False)  # the same, though each is both
    check([x, y.float()], 1, is_ours=False)
    check([x.new_empty(0), x], 1, is_ours=False)
    check([x, y.new_empty(0)], 1, is_ours=False)
    check([x, y[:, :0]], 1, is_ours=False)
    check([x, y[:, ::2]], 1, is_ours=False)
    check([x.flatten()[1:-7], y.flatten()], 0, is_ours=False)  # not aligned
    check([x.flatten()[:15], y.flatten()], 0, is_ours=False)  # no whole pieces
    check([z[:, :4], z], 1, is_ours=False)
    check(parts((3, 5), 1, (16,) * 65, device), 1, is_ours=False)  # too many
    with pytest.raises(RuntimeError, match="must match except in dimension"):
        _C.recipes.join((x, y.flip(0)[:1]), 1)
    with pytest.raises(IndexError, match="out of range"):
        _C.recipes.join((x, y), 4)
    with pytest.raises((RuntimeError, ValueError), match="non-empty list"):
        _C.recipes.join((), 0)


def test_in_the_scope(device, monkeypatch):
    joined = []
    join = _C.recipes.join
    monkeypatch.setattr(_C.recipes, "join", lambda tensors, dim: joined.append(dim) or join(tensors, dim))
    x, y = (each.requires_grad_() for each in parts((16, 16, 32, 32), 1, (16, 32), device, torch.float32))
    expected = torch.autograd.grad(torch.cat([x.exp(), y.exp()], 1).square().sum(), [x, y])
    for _ in range(3):
        with recompute():
            loss = torch.cat([x.exp(), y.exp()], 1).square().sum()
        joined.clear()
        found = torch.autograd.grad(loss, [x, y])
        assert joined == [1]
        assert all(map(is_identical, found, expected))


@pytest.mark.cuda
@pytest.mark.usefixtures("most_memory")
def test_beyond_32_bits():
    first, second = (torch.arange(n, dtype=torch.int32, device="cuda").view(torch.bfloat16) for n in (3 << 29, 1 << 29))
    rows = 1 << 20
    found, names = kernels(lambda: _C.recipes.join((first.view(rows, -1), second.view(rows, -1)), 1))
    assert any("join_kernel" in name for name in names)
    width = first.numel() // rows
    assert is_identical(found[:, :width].contiguous(), first.view(rows, -1))
    assert is_identical(found[:, width:].contiguous(), second.view(rows, -1))
