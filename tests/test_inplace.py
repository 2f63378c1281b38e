"""The ops in place: the same numbers, one bit saved and no clone, and autograd's rules as PyTorch's in-place ops have them."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch.func import grad, vmap

from activations_cuda.memory import saved_bytes
from family import DTYPES, FAMILY, assert_same, assert_same_values, sample
from test_autograd import away_from_breakpoints
from test_exact import LAYOUTS, offset

ops = torch.ops.fastact
SELF_OVERLAPPING = ("expanded", "overlapping")


def inplace(row):
    return lambda x: row.inplace(x, *row.parameters)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in SELF_OVERLAPPING])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_equals_the_op_in_every_layout(row, dtype, layout, device):
    x = LAYOUTS[layout](sample(row, 6 * 5 * 7 * 9, dtype, device))
    gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
    elements = x.untyped_storage().nbytes() // x.element_size()

    def step(function):
        """A view of x's own layout amid zeros, the result, and the gradient of all that the view is part of."""
        leaf = torch.zeros(elements, dtype=dtype, device=device)
        leaf.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)
        base = leaf.requires_grad_() * 1
        result = function(base.as_strided(x.shape, x.stride(), x.storage_offset()))
        return base.detach(), result.detach(), torch.autograd.grad(result, leaf, gradient)[0]

    base, result, actual = step(inplace(row))
    before, expected_result, expected = step(row)
    assert result.stride() == x.stride()
    assert_same_values(result, expected_result)
    assert_same_values(actual, expected)
    before.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(expected_result)
    assert_same_values(base, before)  # what lies around it stays


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_gradients_equal_the_op(row, dtype, device):
    for numel in (0, 1, 9, 513, 40001):
        for layout in (lambda x: x, offset(1), offset(3)):
            x = layout(sample(row, numel, dtype, device))
            gradient = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(x)
            ours, theirs = (x.detach().requires_grad_() for _ in range(2))
            y, expected = inplace(row)(layout(ours * 1)), row(layout(theirs * 1))
            assert_same(y.detach(), expected.detach())
            (actual,), (expected,) = (
                torch.autograd.grad(output, leaf, gradient) for output, leaf in ((y, ours), (expected, theirs))
            )
            assert_same_values(actual, expected)


@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_one_bit_per_element_is_saved(row, device):
    x = torch.randn(1001, device=device, requires_grad=True)
    assert saved_bytes(lambda t: inplace(row)(t + 0), x) == 126


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_returns_its_argument_and_counts_a_version(mode, device):
    x = torch.randn(9, device=device)
    with mode():
        assert ops.relu_(x) is x
    assert x._version == 1
    y = torch.randn(9, device=device, requires_grad=True) * 1
    with mode():
        assert ops.relu_(y) is y
    assert y._version == 1


def test_inference_tensors(device):
    with torch.inference_mode():
        x = torch.randn(9, device=device)
        expected = F.relu(x)
        assert torch.equal(ops.relu_(x), expected)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode is not allowed"):
        ops.relu_(x)


def error(function, x):
    with pytest.raises(RuntimeError) as raised:
        function(x)
    return str(raised.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.requires_grad_(),
        lambda x: x.requires_grad_()[1:],
        lambda x: (x.requires_grad_() * 1).unbind()[0],
        lambda x: x[:1].expand(5, 9),
        lambda x: (x[:1].requires_grad_() * 1).expand(5, 9),
    ],
    ids=["leaf", "view of a leaf", "one of many views", "expanded", "expanded, with grad"],
)
def test_autograd_forbids_what_it_forbids_pytorch(make, device):
    assert error(ops.hardtanh_, make(torch.randn(4, 9, device=device))) == error(
        F.hardtanh_, make(torch.randn(4, 9, device=device))
    )


def test_a_refused_tensor_is_untouched(device):
    x = torch.full((9,), 5.0, device=device, requires_grad=True)
    error(ops.hardtanh_, x)
    assert torch.equal(x, torch.full_like(x, 5.0))
    assert x._version == 0


def test_leaves_without_grad_mode(device):
    x = torch.randn(9, device=device, requires_grad=True)
    expected = F.hardtanh(x.detach())
    with torch.no_grad():
        ops.hardtanh_(x)
    assert torch.equal(x.detach(), expected)
    assert x.is_leaf


def test_overwriting_what_another_op_keeps_is_noticed(device):
    x = torch.randn(9, device=device, requires_grad=True)
    y = x.exp()
    ops.hardtanh_(y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("view", [lambda x: x[1], lambda x: x[:, 1:3], lambda x: x.t()], ids=["row", "columns", "transposed"])
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_a_view_changes_its_base(row, view, device):
    x = sample(row, 24, torch.float64, device).nan_to_num(0.1, posinf=2.0, neginf=-2.0).view(4, 6)
    gradient = torch.randn(4, 6, device=device, dtype=torch.float64)

    def step(function):
        leaf = x.detach().requires_grad_()
        base = leaf * 1
        function(view(base))
        return base.detach(), torch.autograd.grad(base, leaf, gradient)[0]

    def by_copying(t):
        t.copy_(row(t.clone()))

    for actual, expected in zip(step(inplace(row)), step(by_copying), strict=True):
        assert_same_values(actual, expected)


@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_derivatives(row, device):
    x = away_from_breakpoints(row, device)

    def function(t):
        return inplace(row)(t * 1)

    assert torch.autograd.gradcheck(function, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, x, check_fwd_over_rev=True)


def test_tangents_of_views(device):
    x, tangent = torch.randn(4, 6, device=device), torch.randn(4, 6, device=device)

    def dual(function):
        with forward_ad.dual_level():
            base = forward_ad.make_dual(x.clone(), tangent.clone())
            function(base[1])
            return forward_ad.unpack_dual(base).tangent

    assert torch.equal(dual(ops.hardtanh_), dual(F.hardtanh_))


@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_transforms(row, device):
    x = sample(row, 24, torch.float32, device).nan_to_num(0.1).view(4, 6)
    assert torch.equal(vmap(lambda t: inplace(row)(t.clone()))(x), row(x))
    assert torch.equal(vmap(grad(lambda t: inplace(row)(t * 1).sum()))(x), row.derivative(x))


def test_what_belongs_to_pytorch(device):
    """Integers, and parameters that the kernels don't take."""
    x = torch.arange(-3, 9, device=device)
    assert torch.equal(ops.hardtanh_(x.clone(), 0.0, 6.0), F.hardtanh(x, 0.0, 6.0))
    leaf = torch.randn(9, device=device, requires_grad=True)
    y, expected = ops.hardtanh_(leaf * 1, float("nan"), 1.0), F.hardtanh(leaf * 1, float("nan"), 1.0)
    assert_same(y.detach(), expected.detach())
    gradients = [torch.autograd.grad(output.sum(), leaf)[0] for output in (y, expected)]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (float("nan"), 1.0)])
@pytest.mark.parametrize("placed", ["cpu", "meta"])
def test_retained_gradients_without_the_kernels(placed, bounds):
    """Where the output of the composite path, or of PyTorch's op, is copied to what was there."""
    leaf = torch.randn(9, device=placed, requires_grad=True)
    kept = []
    for function in (ops.hardtanh_, F.hardtanh_):
        y = leaf * 1
        y.retain_grad()
        function(y, *bounds).sum().backward()
        kept.append(y.grad)
    assert kept[0].shape == kept[1].shape
    assert placed == "meta" or torch.equal(*kept)


def test_tangents_of_views_without_the_kernels():
    def dual(function):
        with forward_ad.dual_level():
            base = forward_ad.make_dual(torch.randn(4, 6, requires_grad=True), torch.ones(4, 6)) * 1
            view = base[1]
            function(base, float("nan"), 1.0)
            return forward_ad.unpack_dual(view).tangent

    assert torch.equal(dual(ops.hardtanh_), dual(F.hardtanh_))
