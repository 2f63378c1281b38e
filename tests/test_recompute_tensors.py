"""The scope and tensors that aren't plain: subclasses, views of other data, memory that was freed."""

import math

import pytest
import torch
from torch import nn

from activations_cuda import _C, recompute
from recomputing import Keep, Scope, assert_same, same_with_scope

pytestmark = pytest.mark.usefixtures("no_hidden_errors")


def test_a_mask_that_is_saved_as_numbers():
    """By the backward of a backward: in the same memory, but of another dtype."""

    class Drops(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, mask):
            ctx.save_for_backward(mask)
            return x * mask

        @staticmethod
        def backward(ctx, grad):
            return Scales.apply(grad, ctx.saved_tensors[0].view(torch.uint8)), None

    class Scales(torch.autograd.Function):
        @staticmethod
        def forward(ctx, grad, numbers):
            ctx.save_for_backward(numbers)
            return grad * numbers

        @staticmethod
        def backward(ctx, grad):
            (numbers,) = ctx.saved_tensors
            return grad * (numbers + numbers), None  # of bools, true and true is 1

    def run(scope):
        torch.manual_seed(0)
        x, mask = torch.randn(64, 512, requires_grad=True), torch.rand(64, 512) > 0.5
        with scope():
            y = Drops.apply(x * x, mask)
            (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            loss = grad.square().sum()
        loss.backward()
        return [x.grad]

    same_with_scope(run)


def test_dropout_of_everything(device):
    """Zeros, whatever the input is: not the mask's product with it."""
    x = torch.randn(64, device=device)
    x[0] = math.inf
    for p in 0.5, 1.0:

        def run(scope, p=p):
            torch.manual_seed(0)
            leaf = x.clone().requires_grad_()
            with scope():
                dropped = torch.native_dropout(leaf.abs(), p, True)[0]
                loss = (Keep.apply(dropped) * Keep.apply(leaf)).sum()
            return torch.autograd.grad(loss, leaf)

        same_with_scope(run)


def test_mask_that_overlaps_itself():
    mask = torch.rand(1 << 12) > 0.5
    mask.as_strided_((64, 64), (0, 1))
    x = torch.randn(64, 64, requires_grad=True)
    with recompute():
        loss = torch.where(mask, x, x * 2).sum()
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.where(mask, 1.0, 2.0).expand(64, 64))


def test_joined_with_an_empty_tensor(device):
    """Of any shape, as torch.cat takes it."""
    x, empty = (torch.randn(size, device=device, requires_grad=True) for size in ((4, 8), (0,)))
    with Scope() as scope:
        loss = Keep.apply(torch.cat([empty, x.sin()])).sum()
    assert "CatBackward0" in [value.source for value in scope.values() if value.is_recipe]
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.autograd.grad(Keep.apply(x.sin()).sum(), x)[0])


def test_joined_with_what_is_joined_of_empty_tensors(device):
    """Along a dimension that these don't have."""
    x, empty = (torch.randn(size, device=device, requires_grad=True) for size in ((64, 128), (0,)))
    with Scope() as scope:
        loss = Keep.apply(torch.cat([torch.cat([empty, empty], 1), x.sin()], 1)).sum()
    assert "CatBackward0" in [value.source for value in scope.values() if value.is_recipe]
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.autograd.grad(Keep.apply(x.sin()).sum(), x)[0])


class Scales(torch.Tensor):
    """What is divided by it, or subtracts it, comes out a hundred times as large."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * 100 if func in (torch.div, torch.sub) else result


@pytest.mark.parametrize("function", [torch.div, torch.sub])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_an_operand_of_a_subclass(function, requires_grad):
    """Its __torch_function__ has run once, around the op."""

    def run(scope):
        torch.manual_seed(0)
        x, plain, scales = (torch.randn(64, 128) for _ in range(3))
        x.requires_grad_(), plain.requires_grad_()
        scales = scales.as_subclass(Scales).requires_grad_(requires_grad)
        with scope():  # the first of them verifies the recipe
            loss = (function(x, plain) * 100).sin().sum() + function(x, scales).sin().sum()
        torch.autograd.backward(loss)
        return [x.grad]

    same_with_scope(run)


def test_other_data():
    """They have the same layout and version."""
    a = torch.randn(64, 128, requires_grad=True)
    with recompute():
        y = a @ torch.eye(128)
        before = y.sin()
        y.data = y.data * 2
        z = y.cos()
    assert before.grad_fn is not None  # what it saved is still there
    (gradient,) = torch.autograd.grad(z.sum(), y)
    assert torch.equal(gradient, -y.detach().sin())


def test_memory_that_was_freed():
    """As hand-made sharding does: no kernel reads it."""
    norm, x = nn.BatchNorm2d(16), torch.randn(8, 16, 20, 20, requires_grad=True)
    with recompute():
        loss = Keep.apply(torch.relu(norm(x))).sum()
    norm.weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"expected a tensor of shape \[16\].*one whose memory was freed"):
        loss.backward()


def test_kinds_that_are_kept():
    def run(scope):
        torch.manual_seed(0)
        x = torch.randn(4, 4, dtype=torch.complex64, requires_grad=True)
        sparse, dense = torch.eye(3).to_sparse().requires_grad_(), torch.randn(3, 3, requires_grad=True)
        jagged = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(3, 3)], layout=torch.jagged, requires_grad=True)
        with scope():
            losses = (x.conj() * x * x).abs().sum(), torch.sparse.mm(sparse, dense).sum(), jagged.sin().relu().values().sum()
        for loss in losses:
            loss.backward()
        return [torch.view_as_real(x.grad), sparse.grad.to_dense(), dense.grad, jagged.grad.values()]

    same_with_scope(run)


CONJUGATES = {
    "product": lambda z: (z * z.conj()).real,
    "einsum": lambda z: torch.einsum("ij,ij->i", z, z.conj()).real,
}


@pytest.mark.parametrize("function", CONJUGATES.values(), ids=CONJUGATES)
def test_second_derivatives_of_conjugates(function):
    """What a conjugate view gives back in backward is a view of one that isn't conjugated, or the other way around."""

    def run(scope):
        torch.manual_seed(0)
        z = torch.randn(16, 16, dtype=torch.complex64, requires_grad=True)
        with scope():
            (grad,) = torch.autograd.grad(function(z).pow(2).sum(), z, create_graph=True)
            penalty = grad.abs().square().sum()
        return [torch.view_as_real(each) for each in torch.autograd.grad(penalty, z)]

    same_with_scope(run)


def test_subclass():
    class Mine(torch.Tensor):
        pass

    def run(scope):
        x = torch.linspace(-1, 1, 16).as_subclass(Mine).requires_grad_()
        with scope():
            y = x.relu() * x.relu().exp()
        assert type(y) is Mine
        return torch.autograd.grad(y.sum(), x)

    same_with_scope(run)


def test_mask_in_memory_of_another_library(device):
    """Kernels read eight elements at a time, where its memory may not begin."""
    mask = torch.from_dlpack((torch.rand(2**10 + 1, device=device) > 0.5)[1:])
    x = torch.randn(2**10, device=device, requires_grad=True)
    packed = _C.recipes.packed_masks()
    with recompute():
        y = torch.where(mask, x * 2, 0.0)
    assert _C.recipes.packed_masks() == packed
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert_same(grad, 2.0 * mask)


@pytest.mark.parametrize("true", [1, 2, 128, 255])
def test_bools_of_any_byte(true, device):
    mask = (torch.rand(64, 33) > 0.5).to(torch.uint8).mul(true).to(device).view(torch.bool)
    x = torch.randn(64, 33, device=device)

    def run(scope):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        with scope():
            y = torch.where(mask, a, b)
            loss = (y * y.detach()).sum()
        loss.backward()
        return a.grad, b.grad

    same_with_scope(run)


def test_a_view_of_other_data():
    x = torch.randn(64, 16)

    def run(scope):
        y = x.clone().requires_grad_()
        with scope():
            view = y.exp()[2:]
            view.data = torch.ones(62, 16)
            loss = (view * view).sum()
        loss.backward()
        return (y.grad,)

    same_with_scope(run)


def test_a_mask_that_is_swapped():
    """As load_state_dict does on request: not where a tensor has weak references."""
    mask, x = torch.rand(16, 16) > 0.5, torch.randn(16, 16, requires_grad=True)
    with Scope() as scope:
        loss = (x * 2).masked_fill(mask, 0.0).sum()
    assert any(value.source == "bits" for value in scope.values())
    loss.backward()
    torch.utils.swap_tensors(mask, torch.rand(16, 16) > 0.5)


@pytest.mark.parametrize("make", [lambda memory: torch.empty(0, dtype=torch.bool).set_(memory, 0, (8, 8), (8, 1)), "data"])
def test_a_mask_in_memory_that_is_used_again(make):
    """Whose writes the first mask's version doesn't count. Its graph is still there."""
    memory, x, kept = torch.empty(8, 8, dtype=torch.bool), torch.randn(8, 8, requires_grad=True), []
    for value in True, False:
        mask = memory.data if make == "data" else make(memory.untyped_storage())
        mask.fill_(value)
        with recompute():
            kept.append(torch.where(mask, x * 2, x * 3))
    assert (torch.autograd.grad(kept[1].sum(), x)[0] == 3).all()
