"""What functorch makes of the ops: the composite path, and in it the same rule."""

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from family import DTYPES, FAMILY, assert_same_values, sample


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_values_and_gradients_are_the_packed_paths(row, dtype, device):
    x = sample(row, 4001, dtype, device)
    assert_same_values(vmap(row)(x), row(x))
    assert_same_values(vmap(grad(row))(x), row.scaled(torch.ones_like(x), x))


@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_transforms(row, device):
    x = sample(row, 24, torch.float64, device).nan_to_num(0.1, posinf=2.0, neginf=-2.0).view(4, 6)
    derivative = row.derivative(x)
    assert torch.equal(vmap(row, in_dims=1, out_dims=1)(x), row(x))
    assert torch.equal(vmap(vmap(row))(x), row(x))
    assert torch.equal(vmap(row, chunk_size=3)(x), row(x))
    assert torch.equal(vmap(grad(lambda t: row(t).sum()))(x), derivative)
    assert torch.equal(jvp(row, (x,), (2 * torch.ones_like(x),))[1], 2 * derivative)
    assert torch.equal(vjp(row, x)[1](2 * torch.ones_like(x))[0], 2 * derivative)
    for jacobian in (jacrev, jacfwd):
        assert torch.equal(jacobian(row)(x[0]), torch.diag(derivative[0]))
    for second in (hessian, lambda f: jacrev(jacrev(f)), lambda f: jacfwd(jacfwd(f))):
        squared = second(lambda t: row(t).pow(2).sum())(x[0])
        assert torch.equal(squared, torch.diag(2 * derivative[0] ** 2))


@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_results_have_no_more_history_than_pytorchs(row, device):
    x = sample(row, 24, torch.float32, device)
    ones = torch.ones_like(x)
    for result in (vjp(row, x)[1](ones)[0], grad(lambda t: row(t).sum())(x), jvp(row, (x,), (ones,))[1]):
        assert not result.requires_grad


@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_in_place_below_a_transform(row, device):
    """The outer derivative needs the input, which the inner one's op writes to."""
    x = sample(row, 24, torch.float64, device).nan_to_num(0.1, posinf=2.0, neginf=-2.0).view(4, 6)
    weight = torch.randn(4, 6, device=device, dtype=torch.float64, requires_grad=True)

    def derivatives(function):
        def squared(t, w):
            return function(t * w).square().sum()

        yield grad(lambda t: grad(squared)(t, weight.detach()).square().sum())(x)
        yield from torch.autograd.grad(grad(squared)(x, weight).sum(), weight)
        yield from torch.autograd.grad(vmap(squared)(x, weight).sum(), weight)

    ours = derivatives(lambda t: row.inplace(t, *row.parameters))
    for actual, expected in zip(ours, derivatives(row), strict=True):
        assert torch.equal(actual, expected)


def test_unbatched_argument_inside_vmap(device):
    x = torch.randn(5, device=device)
    y = vmap(lambda t: t + torch.ops.fastact.hardtanh(x))(torch.zeros(3, 5, device=device))
    assert_same_values(y[0], torch.nn.functional.hardtanh(x))
