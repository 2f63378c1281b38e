"""What functorch makes of the ops: the composite body, and in it the same rule."""

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from family import DTYPES, FAMILY, assert_same_values, sample


def composite_rtol(row, dtype):
    return row.tolerance and max(torch.finfo(dtype).eps, row.tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_composite_body_decides_by_the_same_rule(row, dtype, device):
    """Gradients through the composite body are the rule's; values may differ in the last bit."""
    x = sample(row, 4001, dtype, device)
    values = vmap(row)(x)
    rtol = composite_rtol(row, dtype)
    torch.testing.assert_close(values, row(x), rtol=rtol, atol=0, equal_nan=True)
    gradient = vmap(grad(row))(x)
    expected = row.derivative(x)
    assert torch.equal(gradient != 0, expected != 0)
    torch.testing.assert_close(gradient, expected.to(dtype), rtol=rtol, atol=0)


@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_transforms(row, device):
    x = sample(row, 24, torch.float64, device).nan_to_num(0.1, posinf=2.0, neginf=-2.0).view(4, 6)
    derivative = row.derivative(x).to(x)
    close = {"rtol": composite_rtol(row, torch.float64), "atol": 0}
    torch.testing.assert_close(vmap(row, in_dims=1, out_dims=1)(x), row(x), **close)
    torch.testing.assert_close(vmap(vmap(row))(x), row(x), **close)
    torch.testing.assert_close(vmap(grad(lambda t: row(t).sum()))(x), derivative, **close)
    torch.testing.assert_close(jvp(row, (x,), (2 * torch.ones_like(x),))[1], 2 * derivative, **close)
    torch.testing.assert_close(vjp(row, x)[1](2 * torch.ones_like(x))[0], 2 * derivative, **close)
    for jacobian in (jacrev, jacfwd):
        torch.testing.assert_close(jacobian(row)(x[0]), torch.diag(derivative[0]), **close)
    squared = hessian(lambda t: row(t).pow(2).sum())(x[0])
    torch.testing.assert_close(squared, torch.diag(2 * derivative[0] ** 2), **close)


def test_unbatched_argument_inside_vmap(device):
    x = torch.randn(5, device=device)
    y = vmap(lambda t: t + torch.ops.fastact.hardtanh(x))(torch.zeros(3, 5, device=device))
    assert_same_values(y[0], torch.nn.functional.hardtanh(x))
