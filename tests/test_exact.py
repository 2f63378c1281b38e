"""Values and gradients equal PyTorch's own op's to the bit, in every dtype, size and layout."""

import pytest
import torch

from family import DTYPES, FAMILY, assert_same, assert_same_values, sample

SIZES = [0, 1, 7, 8, 9, 127, 511, 513, 1000003]


def flat(x):
    return x


def offset(by):
    return lambda x: torch.cat([x.new_zeros(by), x])[by:]


LAYOUTS = {
    "zero_dim": lambda x: x[:1].reshape(()),
    "contiguous": lambda x: x.view(6, 5, 7, 9),
    "offset": lambda x: offset(1)(x).view(6, 5, 7, 9),
    "transposed": lambda x: x.view(30, 63).t(),
    "permuted": lambda x: x.view(6, 5, 7, 9).permute(2, 0, 3, 1),
    "channels_last": lambda x: x.view(6, 5, 7, 9).to(memory_format=torch.channels_last),
    "channels_last_1x1": lambda x: x.view(30, 63, 1, 1).to(memory_format=torch.channels_last),
    "channels_last_odd_batch_stride": lambda x: x[:315].as_strided((1, 5, 7, 9), (999, 1, 45, 5)),
    "empty_odd_strides": lambda x: x[:0].as_strided((2, 0, 3), (5, 1, 3)),
    "channels_last_3d": lambda x: x.view(6, 5, 7, 3, 3).to(memory_format=torch.channels_last_3d),
    "row_sliced": lambda x: x.view(30, 63)[:, :29],
    "sliced_twice": lambda x: x.view(6, 5, 7, 9)[:, 1:4, 2:6],
    "column_sliced": lambda x: x.view(30, 63)[:, 3::4],
    "sliced_channels_last": lambda x: x.view(6, 5, 7, 9).to(memory_format=torch.channels_last)[:, 1:4],
    "expanded": lambda x: x.view(30, 1, 63).expand(30, 4, 63),
    "overlapping": lambda x: x.as_strided((40, 50), (20, 1)),
}


def check(row, x):
    """Compares forward, and backward with a dense, a sliced and an expanded gradient."""
    ours, theirs = (x.detach().requires_grad_() for _ in range(2))
    y, expected = row(ours), row.reference(theirs)
    assert_same(y.detach(), expected.detach())
    with torch.no_grad():
        assert_same(row(x), expected)
    with torch.inference_mode():
        assert_same(row(x), expected.detach())

    grad = torch.randn(x.shape, dtype=torch.float32, generator=torch.Generator().manual_seed(1)).to(x)
    if grad.numel() > 2:
        grad.view(-1)[:2] = torch.tensor([float("inf"), -0.0])  # inf * 0 would be NaN
    sliced = torch.cat([grad, grad], dim=-1).chunk(2, dim=-1)[1] if grad.dim() else grad
    for incoming in (grad, sliced, x.new_full((), 0.3).expand(x.shape)):
        (actual,) = torch.autograd.grad(y, ours, incoming, retain_graph=True)
        (expected_grad,) = torch.autograd.grad(expected, theirs, incoming, retain_graph=True)
        assert actual.shape == expected_grad.shape
        if x.device.type == "cpu":
            # PyTorch's CPU kernels contradict one another at NaN; there the family's rule holds.
            expected_grad = torch.where(x.isnan(), row.scaled(incoming, x), expected_grad)
        assert_same_values(actual, expected_grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_sizes_and_offsets(row, dtype, device):
    for numel in SIZES:
        for layout in (flat, offset(1), offset(3)):
            check(row, layout(sample(row, numel, dtype, device, seed=numel)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_layouts(row, dtype, layout, device):
    check(row, LAYOUTS[layout](sample(row, 6 * 5 * 7 * 9, dtype, device)))


@pytest.mark.parametrize("layout", ["channels_last", "permuted", "row_sliced"])
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_gradient_in_another_layout(row, layout, device):
    x = LAYOUTS[layout](sample(row, 6 * 5 * 7 * 9, torch.float32, device)).nan_to_num().requires_grad_()
    grad = torch.randn(x.shape[::-1], device=device).permute(*reversed(range(x.dim())))
    (actual,) = torch.autograd.grad(row(x), x, grad)
    (expected,) = torch.autograd.grad(row.reference(x), x, grad)
    assert_same_values(actual, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("inference", [False, True])
def test_integers_do_what_pytorch_does(dtype, inference, device):
    x = torch.arange(20, device=device).sub(0 if dtype == torch.uint8 else 10).to(dtype)
    with torch.inference_mode(inference):
        y = torch.ops.fastact.hardtanh(x, 0.0, 6.9)
        expected = torch.nn.functional.hardtanh(x, 0.0, 6.9)
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bound", [1e5, 1e39, 1e300])
def test_bounds_beyond_the_dtype_do_what_pytorch_does(bound, dtype, device):
    x = torch.randn(9, device=device).to(dtype)

    def result(function):
        try:
            return function(x, -bound, bound)
        except RuntimeError as error:
            return str(error)

    actual, expected = result(torch.ops.fastact.hardtanh), result(torch.nn.functional.hardtanh)
    assert actual == expected if isinstance(expected, str) else torch.equal(actual, expected)


@pytest.mark.parametrize("layout", [lambda x: x, lambda x: x[::2]], ids=["contiguous", "sliced"])
@pytest.mark.parametrize("bounds", [(1e-8, 1.0), (-1.0, -1e-8), (4e-42, 1.0), (-1.0, -4e-42)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_bound_that_rounds_to_zero_is_of_pytorchs_sign(dtype, bounds, layout, device):
    x = layout(torch.tensor([0.0, -0.0, 2e-7, -2e-7], device=device).to(dtype).repeat(33))
    actual, expected = (function(x, *bounds) for function in (torch.ops.fastact.hardtanh, torch.nn.functional.hardtanh))
    assert_same_values(actual, expected)


@pytest.mark.parametrize("bounds", [(float("nan"), 1.0), (-1.0, float("nan"))])
def test_nan_bounds_do_what_pytorch_does(bounds, device):
    x = torch.randn(9, device=device, requires_grad=True)
    y = torch.ops.fastact.hardtanh(x, *bounds)
    expected = torch.nn.functional.hardtanh(x, *bounds)
    assert_same(y.detach(), expected.detach())
    ours, theirs = (torch.autograd.grad(output.sum(), x)[0] for output in (y, expected))
    assert torch.equal(ours, theirs)


def test_a_slope_of_zero_is_no_multiplication(device):
    """PyTorch's leaky_relu makes NaN of an infinite gradient there."""
    x = torch.tensor([-1.0, 1.0], device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(torch.ops.fastact.leaky_relu(x, 0.0), x, torch.tensor([float("inf"), 2.0], device=device))
    assert gradient.tolist() == [0.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_subnormals_that_the_process_flushes(row, dtype, device):
    """On the CPU. In bfloat16, PyTorch's vectorized loops flush them and the rest at their end doesn't."""
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    sign = torch.iinfo(bits).min
    some = torch.arange(64, dtype=bits)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor can't flush subnormals")
    try:
        x = torch.cat([some, some + sign]).view(dtype).to(device)
        for each in (x,) if dtype is torch.bfloat16 else (x, x[:7], x[1::2]):
            assert_same(row(each), row.reference(each))
    finally:
        torch.set_flush_denormal(False)
