"""What autograd saves, and derivatives of every order and mode."""

import gc

import pytest
import torch

from activations_cuda.memory import saved_bytes
from family import DTYPES, FAMILY, assert_same_values, sample


def away_from_breakpoints(row, device="cpu"):
    """Finite differences mean nothing across a breakpoint."""
    points = torch.tensor([p for p in row.breakpoints if abs(p) != float("inf")])
    x = torch.linspace(-8, 8, 24, dtype=torch.float64)
    return x[(x[:, None] - points).abs().min(dim=1).values > 0.01].to(device).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_one_bit_per_element_is_saved(row, dtype, device):
    for numel in (0, 1, 8, 9, 100003):
        x = sample(row, numel, dtype, device).requires_grad_()
        assert saved_bytes(row, x) == (numel + 7) // 8
    assert saved_bytes(row, x.detach()) == 0


@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_derivatives(row, device):
    x = away_from_breakpoints(row, device)
    assert torch.autograd.gradcheck(
        row, x, check_forward_ad=True, check_undefined_grad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(row, x, check_fwd_over_rev=True, check_batched_grad=True)


@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_derivatives_of_the_ops_behind(row, device):
    x = away_from_breakpoints(row, device)
    assert torch.autograd.gradcheck(lambda t: row.with_mask(t, *row.parameters)[0], x, check_forward_ad=True)
    mask = torch.randint(0, 256, ((x.numel() + 7) // 8,), dtype=torch.uint8, device=device)

    def masked_scale(t):
        return torch.ops.fastact.masked_scale(t, mask, 0.5, -2.0)

    assert torch.autograd.gradcheck(masked_scale, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(masked_scale, x)


@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_double_backward_equals_the_rule(row, device):
    x = sample(row, 1003, torch.float32, device).nan_to_num(0.1).requires_grad_()
    grad = torch.randn(1003, device=device, requires_grad=True)
    (first,) = torch.autograd.grad(row(x), x, grad, create_graph=True)
    outer = torch.randn(1003, device=device)
    (second,) = torch.autograd.grad(first, grad, outer)
    assert_same_values(second, row.scaled(outer, x))


HAVE_SECOND = [row for row in FAMILY if row.name != "hardsigmoid"]  # of PyTorch's


@pytest.mark.parametrize("row", HAVE_SECOND, ids=str)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_gradient_is_a_function_of_the_input(row, inplace, device):
    """Its derivative is zero, as PyTorch's is, and not missing: an optimizer would leave out what is in front of the op."""
    x = sample(row, 24, torch.float32, device).nan_to_num(0.1)

    def derivatives(function):
        leaf, grad = x.detach().requires_grad_(), torch.ones_like(x).requires_grad_()
        (first,) = torch.autograd.grad(function(leaf * 1), leaf, grad, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), leaf, create_graph=True)
        return first.detach(), second.detach(), *torch.autograd.grad(first.sum() + second.sum(), [grad, leaf])

    ours = (lambda t: row.inplace(t, *row.parameters)) if inplace else row
    for actual, expected in zip(derivatives(ours), derivatives(row.reference), strict=True):
        assert_same_values(actual, expected)


def test_second_backward_needs_retain_graph(device):
    x = torch.randn(9, device=device, requires_grad=True)
    y = torch.ops.fastact.hardtanh(x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_backward_frees_the_mask(device):
    x = torch.randn(1 << 16, device=device, requires_grad=True)
    masks = []

    def pack(tensor):
        masks.append(tensor.untyped_storage()._weak_ref())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = torch.ops.fastact.hardtanh(x)
    assert not torch.UntypedStorage._expired(masks[0])
    y.sum().backward()
    gc.collect()
    assert torch.UntypedStorage._expired(masks[0])


def test_output_is_not_a_leaf_and_names_its_function(device):
    x = torch.randn(3, device=device, requires_grad=True)
    y, z = torch.ops.fastact.hardsigmoid(x), torch.ops.fastact.silu(x.bfloat16())
    for node, name in (y.grad_fn, "MaskedScaleBackward"), (z.grad_fn, "CodeBackward"):
        assert node.name() == name
        assert repr(node).startswith(f"<{name} object at ")
        assert isinstance(node, torch.autograd.graph.Node)
    assert y.grad_fn.next_functions[0][0].variable is x
    assert not torch.ops.fastact.hardsigmoid(x.detach()).requires_grad


def test_only_the_output_of_with_mask_is_differentiable(device):
    output, mask = torch.ops.fastact.hardtanh_with_mask(torch.randn(9, device=device, requires_grad=True), -1.0, 1.0)
    assert output.requires_grad
    assert not mask.requires_grad


def test_lazy_negation_is_resolved(device):
    """The imaginary part of a conjugate is a view whose elements are negated only when they are read."""
    z = torch.randn(100, dtype=torch.complex64, device=device)
    x = z.conj().imag
    assert x.is_neg()
    assert_same_values(torch.ops.fastact.hardtanh(x), torch.nn.functional.hardtanh(x.resolve_neg()))
    with torch.inference_mode():
        assert_same_values(torch.ops.fastact.hardtanh(x), torch.nn.functional.hardtanh(x.resolve_neg()))
