"""Gradients have the strides that PyTorch's backward gives them: in what order the next layer's sums depends on them."""

import itertools

import pytest
import torch

from family import A_FEW, assert_same
from test_mask import packed
from test_subclasses import HAS_REFERENCE, Wrapper

ops = torch.ops.fastact

SHAPES = [(4, 6, 5, 7), (4, 6, 1, 1), (1, 6, 5, 7), (4, 1, 5, 7), (4, 6, 5, 1), (1, 1, 1, 1), (4, 0, 5, 7)]
A_FEW_SHAPES = SHAPES[:2]
DENSE = {
    "contiguous": lambda n, c, h, w: torch.randn(n, c, h, w),
    "channels-last": lambda n, c, h, w: torch.randn(n, c, h, w).to(memory_format=torch.channels_last),
    "permuted": lambda n, c, h, w: torch.randn(h, n, w, c).permute(1, 3, 0, 2),
    "transposed": lambda n, c, h, w: torch.randn(n, c, w, h).transpose(2, 3),
}
DISJOINT = DENSE | {
    "row-sliced": lambda n, c, h, w: torch.randn(n, c, h, w + 3)[..., :w],
    "column-sliced": lambda n, c, h, w: torch.randn(n, c, h, 2 * w)[..., ::2],
    "channels-last sliced": lambda n, c, h, w: torch.randn(n, c + 3, h, w).to(memory_format=torch.channels_last)[:, :c],
}
LAYOUTS = DISJOINT | {
    "expanded over space": lambda n, c, h, w: torch.randn(n, c, 1, 1).expand(n, c, h, w),
    "expanded over the batch": lambda n, c, h, w: torch.randn(1, c, h, w).expand(n, c, h, w),
    "expanded over rows and batch": lambda n, c, h, w: torch.randn(1, c, 1, w).expand(n, c, h, w),
    "of one scalar": lambda n, c, h, w: torch.randn(()).expand(n, c, h, w),
}


def like(x):
    """The same elements in the same layout, in memory of their own."""
    storage = x.untyped_storage().clone()
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, x.storage_offset(), x.shape, x.stride())


class Intermediate(torch.autograd.Function):
    """Gives an in-place op a tensor of the input's own layout to write to, and returns the gradient as it arrives."""

    @staticmethod
    def forward(ctx, leaf, x):
        return like(x)

    @staticmethod
    def backward(ctx, gradient):
        Intermediate.gradient = gradient
        return gradient, None


def gradient(function, x, incoming, inplace):
    leaf = x.detach().requires_grad_()
    y = function(Intermediate.apply(leaf, x) if inplace else leaf)
    if not inplace:
        y.grad_fn.register_hook(lambda inputs, _: setattr(Intermediate, "gradient", inputs[0]))
    y.backward(incoming)
    return Intermediate.gradient


def pytorchs(row, suffix=""):
    return lambda x: getattr(torch.ops.aten, row.name + suffix)(x, *row.parameters)


def cases(inputs, dtype, device, shapes=SHAPES):
    for shape, (x, make), (grad, make_grad) in itertools.product(shapes, inputs.items(), LAYOUTS.items()):
        torch.manual_seed(0)
        yield f"{shape}, {x}, gradient {grad}", *(m(*shape).to(dtype).to(device) for m in (make, make_grad))


def assert_same_gradients(pairs):
    different = []
    for case, actual, expected in pairs:
        try:
            assert_same(actual, expected)
        except AssertionError as error:
            different.append(f"{case}: {error}")
    assert not different, f"{len(different)} differ, the first: {different[0]}"


def in_dtypes(rows):
    """Strides are the same in all of them."""
    pairs = [(row, torch.float32) for row in rows] + [(row, torch.bfloat16) for row in A_FEW]
    return pytest.mark.parametrize(("row", "dtype"), pairs, ids=str)


@in_dtypes(HAS_REFERENCE)
def test_strides_are_pytorchs(row, dtype, device):
    assert_same_gradients(
        (case, gradient(row, x, grad, False), gradient(pytorchs(row), x, grad, False))
        for case, x, grad in cases(LAYOUTS, dtype, device)
    )


@in_dtypes([row for row in HAS_REFERENCE if hasattr(torch.ops.aten, row.name + "_")])
def test_strides_in_place(row, dtype, device):
    def ours(x):
        return row.inplace(x, *row.parameters)

    assert_same_gradients(
        (case, gradient(ours, x, grad, True), gradient(pytorchs(row, "_"), x, grad, True))
        for case, x, grad in cases(DISJOINT, dtype, device)
        if min(row.slopes) >= 0  # PyTorch's leaky_relu_ takes no negative slope
    )


@pytest.mark.parametrize("row", HAS_REFERENCE, ids=str)
def test_strides_in_a_transform(row, device):
    """The composite path, of tensors that functorch wraps."""
    assert_same_gradients(
        (case, torch.func.vjp(row, x)[1](grad)[0], torch.func.vjp(row.reference, x)[1](grad)[0])
        for case, x, grad in cases(LAYOUTS, torch.float32, device, A_FEW_SHAPES)
    )


@pytest.mark.parametrize("row", HAS_REFERENCE, ids=str)
def test_strides_of_a_wrapped_gradient(row, device):
    def wrapped(function, x, grad):
        leaf = Wrapper(x, []).requires_grad_()
        return torch.autograd.grad(function(leaf), leaf, Wrapper(grad, []))[0].inner

    assert_same_gradients(
        (case, wrapped(row, x, grad), wrapped(pytorchs(row), x, grad))
        for case, x, grad in cases(LAYOUTS, torch.float32, device, A_FEW_SHAPES)
    )


@pytest.mark.parametrize("row", HAS_REFERENCE, ids=str)
def test_strides_of_batched_gradients(row, device):
    """Values alone: PyTorch's own ops lay them out in one way or another."""
    for _, x, grad in cases(LAYOUTS, torch.float32, device, A_FEW_SHAPES):
        leaf = x.detach().requires_grad_()
        y = row(leaf)
        batch = torch.stack([grad, grad * 2])
        actual = torch.autograd.grad(y, leaf, batch, is_grads_batched=True, retain_graph=True)[0]
        vmapped = torch.func.vmap(lambda g, y=y, leaf=leaf: torch.autograd.grad(y, leaf, g, retain_graph=True)[0])(batch)
        expected = torch.stack([torch.autograd.grad(y, leaf, g, retain_graph=True)[0] for g in batch])
        assert torch.equal(actual, expected)
        assert torch.equal(vmapped, expected)


def elements(x, strides):
    """A dense tensor's elements in the memory order of these strides."""
    return torch.empty_strided(x.shape, strides, dtype=x.dtype).copy_(x).as_strided((x.numel(),), (1,))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slopes", [(1.0, 0.0), (0.3, -2.0)])
def test_masked_scale_takes_every_order(slopes, dtype, device):
    """Of gradient, mask and result."""
    shape = (3, 5, 4, 11)
    flags = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.5
    orders = [make(*shape).stride() for make in DENSE.values()]
    for (_, make), mask_strides, strides in itertools.product(LAYOUTS.items(), orders, orders):
        grad = make(*shape).to(dtype).to(device)
        mask = packed(elements(flags, mask_strides)).to(device)
        actual = ops.masked_scale(grad, mask, *slopes, mask_strides=mask_strides, strides=strides)
        inside, outside = (grad if s == 1 else torch.zeros_like(grad) if s == 0 else grad * s for s in slopes)
        expected = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        assert_same(actual, expected.copy_(torch.where(flags.to(device), inside, outside)))
        meta = ops.masked_scale(grad.to("meta"), mask.to("meta"), *slopes, mask_strides=mask_strides, strides=strides)
        assert meta.stride() == strides


@pytest.mark.parametrize("name", ["mask_strides", "strides"])
@pytest.mark.parametrize("strides", [(8, 1), (3, 0), (7,), (-7, 1), (6, 2)])
def test_strides_that_are_not_dense(name, strides, device):
    grad, mask = torch.randn(3, 7, device=device), torch.zeros(3, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match=rf"masked_scale: expected {name} of a dense tensor of shape \[3, 7\], got"):
        ops.masked_scale(grad, mask, 1.0, 0.0, **{name: strides})


@pytest.mark.parametrize("row", HAS_REFERENCE, ids=str)
def test_many_dimensions(row, device):
    """None of which can be joined with another."""
    dims = 16
    x = torch.randn((2,) * dims, device=device).requires_grad_()
    grad = torch.randn((2,) * dims, device=device).permute(*reversed(range(dims)))
    grad = grad.permute(*range(0, dims, 2), *range(1, dims, 2))
    (actual,) = torch.autograd.grad(row(x), x, grad)
    (expected,) = torch.autograd.grad(pytorchs(row)(x), x, grad)
    assert_same(actual, expected)
