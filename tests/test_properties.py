"""Whatever the shape, strides, dtype and parameters: what PyTorch's op gives, or what it raises."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from family import DTYPES, FAMILY, sample

ROWS = {row.name: row for row in FAMILY if row.overload == "default"}
PARAMETERS = {"hardtanh": 2, "leaky_relu": 1, "hardshrink": 1, "softshrink": 1, "threshold": 2}
NUMBERS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 5e-324, 1e-45, 6e-8, 65504.0, 1e5, 1e39, float("inf"), -float("inf"), float("nan")]),
    st.floats(-4, 4),
)


@st.composite
def parameters(draw, name):
    numbers = [draw(NUMBERS) for _ in range(PARAMETERS.get(name, 0))]
    if name == "hardtanh":
        numbers = draw(st.sampled_from([numbers, sorted(numbers), [numbers[0]] * 2]))
    return numbers


@st.composite
def views(draw):
    """Sizes, strides and offset: any, or of a dense tensor whose dimensions are permuted."""
    sizes = draw(st.lists(st.integers(0, 9), max_size=4))
    strides = [draw(st.integers(0, 30)) for _ in sizes]
    if draw(st.booleans()):
        step = 1
        for dimension in draw(st.permutations(range(len(sizes)))):
            strides[dimension] = step
            step *= max(1, sizes[dimension])
    return sizes, strides, draw(st.integers(0, 15))


def outcome(function, x, gradient):
    """Output and gradient, or the exception's class."""
    x = x.detach().requires_grad_()
    try:
        y = function(x)
        return y.detach(), torch.autograd.grad(y, x, gradient)[0]
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("name", ROWS)
# The same examples in every run: what fails here fails everywhere.
@settings(max_examples=500, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_equals_pytorch(name, device, data):
    row = ROWS[name]
    numbers = data.draw(parameters(name), label="parameters")
    sizes, strides, offset = data.draw(views(), label="sizes, strides, offset")
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    extent = offset + 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if size)
    x = sample(row, max(extent, 1), dtype, device).as_strided(sizes, strides, offset)
    gradient = torch.randn(sizes, device=device).to(dtype)

    actual = outcome(lambda x: row.op(x, *numbers), x, gradient)
    expected = outcome(lambda x: row.pytorch(x, *numbers), x, gradient)
    if isinstance(expected, type) or isinstance(actual, type):
        # Of two faults, bounds in the wrong order and out of range, either may be told.
        two_faults = name == "hardtanh" and numbers[0] > numbers[1] and max(map(abs, numbers)) > torch.finfo(dtype).max
        assert actual == expected or two_faults
        return
    assert actual[0].stride() == expected[0].stride() or x.numel() == 0
    torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=0, equal_nan=True)
    regular = ~x.isnan()  # where PyTorch's CPU ops contradict one another
    torch.testing.assert_close(actual[1][regular], expected[1][regular], rtol=0, atol=0, equal_nan=True)
