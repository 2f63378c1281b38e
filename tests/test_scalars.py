"""The numbers that sums add, which autograd's nodes don't save: noted as their ops are called, and the same bits."""

import contextlib
import math
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from activations_cuda import memory_report, recompute
from activations_cuda.recipes.verification import is_identical
from nets import NewGelu
from recomputing import Keep, Scope, compare, same_with_scope

pytestmark = pytest.mark.usefixtures("no_hidden_errors")

NUMBERS = 0.3, -7, 1.0, 3, 1e-3, 2**24 + 1, 1e40, math.inf, -0.0


def some(device, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(4, 40, device=device, dtype=dtype).requires_grad_()


def sums(x, numbers):
    """Of what is saved as well."""
    kept = Keep.apply(x)
    return sum(Keep.apply(x + number).tanh().sum() for number in numbers) + kept.sum()


def recipes(scope):
    return [value for value in scope.values() if value.is_recipe and value.source in ("AddBackward0", "RsubBackward1")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_each_sum_has_its_own_number(dtype, device):
    """A configuration is verified once, with one of them."""
    leaf = some(device, dtype)
    for i in range(len(NUMBERS)):
        numbers = NUMBERS[i:] + NUMBERS[:i]
        with Scope(check=i % 2 > 0) as scope:
            loss = sums(leaf * 1, numbers)
        if i > 0:  # the first scope may have begun to observe ops
            assert len(recipes(scope)) == len(numbers)
        (found,) = torch.autograd.grad(loss, leaf)
        assert is_identical(found, torch.autograd.grad(sums(leaf * 1, numbers), leaf)[0])


@pytest.mark.parametrize(
    "add", [lambda x, n: x * 2.0 + n, lambda x, n: torch.add(x * 2.0, n, alpha=0.3), lambda x, n: (x * 1.0).add_(n)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_number_verifies_no_others(dtype, add, device):
    """Some say nothing of how others are rounded."""
    leaf = some(device, dtype)

    def loss(number):
        x = leaf * 1
        kept = Keep.apply(x)
        return Keep.apply(torch.relu(add(x, number))).sum() + kept.sum()

    for number in (1.0, 1.0, 0.3, -2.74, 1e-3, 7, 2049):
        with Scope(check=number != 1):
            found = loss(number)
        assert is_identical(*(torch.autograd.grad(each, leaf)[0] for each in (found, loss(number))))


def test_observing_that_begins_in_a_backward_pass():
    """It would end with that pass, as state of the thread; so it begins later."""
    program = """
        import torch
        from activations_cuda import _C, recompute
        x = torch.randn(64, 1024, requires_grad=True)
        with recompute():
            y = x.exp()
            z = torch.autograd.grad((y * x.sin()).sum(), x, create_graph=True)[0]
            h = torch.utils.checkpoint.checkpoint(lambda x: (x.exp() * (x.exp() + 1)).exp().sum(), x * 1, use_reentrant=True)
            h.backward()
            for _ in range(2):
                y = x.exp()
                loss = (y * (y + 1)).sum()
            assert _C.recipes.observes_ops()
            loss.backward()
            assert _C.recipes.observes_ops()
        assert not _C.recipes.observes_ops()
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert run.returncode == 0 and "callback" not in run.stderr, run.stderr


def test_zeros_of_forward_mode(capfd):
    """Which have no memory."""
    for _ in range(2):
        with recompute():
            x = some("cpu")
            loss = Keep.apply(x * 1).sum() + Keep.apply(x * 1 + 0.3).sum()
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
                (dual.sin() + 0.3).sum()
        loss.backward()
    assert "Exception" not in capfd.readouterr().err


def gelu_net(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 80), NewGelu(), nn.Linear(80, 40)).to(device)


@pytest.mark.parametrize("is_autocast", [False, True])
def test_gelu_of_several_ops(is_autocast, device):
    """Of its five tensors, the linear layer's output is saved; on the CPU, whose tanh varies with layouts, and tanh's."""
    model, x = gelu_net(device), some(device).detach()

    def loss(model):
        with torch.autocast(device, torch.bfloat16, enabled=is_autocast):
            return model(x).float().square().sum()

    for _ in range(2):
        compare(model, loss)
    with Scope(model) as scope:
        output = loss(model)
    kept = {tensor.untyped_storage()._cdata: tensor for tensor in scope.tensors()}.values()
    assert sum(tensor.shape == (4, 80) for tensor in kept) == (1 if device == "cuda" else 2)
    del output


def test_a_report_knows_the_numbers(device):
    """Of the first net, too."""
    model, x = gelu_net(device), some(device).detach()
    for _ in range(2):
        with Scope(model) as scope:
            output = model(x)
        kept = scope.bytes(model)
        del output
    assert memory_report(model, x, recompute=True).recompute == kept


def test_what_is_no_number_is_saved(device):
    """Even where a sum with a number, of which autograd makes no node, came right before."""
    leaf, mask = some(device), torch.zeros(4, 40, device=device)
    for other in torch.tensor(0.3, device=device), torch.full((4, 40), 0.3, device=device), torch.tensor(0.3), True:

        def loss(other):
            x = leaf * 1
            kept = Keep.apply(x)
            assert (mask + 1.0).sum() == 160
            return Keep.apply(x + other).sum() + kept.sum()

        for _ in range(2):
            with Scope() as scope:
                found = loss(other)
            assert not recipes(scope)
            assert torch.equal(*(torch.autograd.grad(each, leaf)[0] for each in (found, loss(other))))


def test_a_number_of_an_earlier_scope():
    """Whose op has made no node, so that a node made outside has its sequence number."""
    leaf = some("cpu")
    for _ in range(2):
        x = leaf * 1
        with Scope() as scope:
            loss = Keep.apply(x).sum() + Keep.apply(x + 0.3).sum()
        verified = recipes(scope)
        loss.backward()
    assert verified
    x, other = leaf * 1, torch.full_like(leaf, 0.7)
    with recompute(), pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        leaf.add_(0.3)
    y = x + other
    with Scope(check=False) as scope:
        loss = Keep.apply(x).sum() + Keep.apply(y).sum()
    assert not recipes(scope)
    del loss


@pytest.mark.parametrize("others", [0, 3000])
def test_a_sum_of_long_ago_is_saved(others):
    """Only so many are remembered."""
    leaf = some("cpu")

    def loss():
        x = leaf * 1
        kept, early = Keep.apply(x), x + 0.3
        for _ in range(others):
            x = x + 0.7
        return Keep.apply(early).sum() + kept.sum() + x.sum()

    for _ in range(2):
        with Scope() as scope:
            found = loss()
        known = len(recipes(scope))
        assert torch.equal(*(torch.autograd.grad(each, leaf)[0] for each in (found, loss())))
    assert known == (others == 0)


@pytest.mark.parametrize("scope", [recompute, contextlib.nullcontext])
def test_in_many_threads(scope, device):
    """Each has its own sums, and nodes of the same sequence numbers."""
    leaf, results = some(device), {}

    def run(i):
        numbers = NUMBERS[i:] + NUMBERS[:i]
        for _ in range(20):
            with recompute(), scope():
                loss = sums(leaf * 1, numbers)
            results[i] = torch.autograd.grad(loss, leaf)[0], torch.autograd.grad(sums(leaf * 1, numbers), leaf)[0]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(is_identical(*pair) for pair in results.values())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_and_derivatives_within(use_reentrant, device):
    def run(scope):
        leaf = some(device)
        with scope():
            x = checkpoint(lambda x: sums(x, (0.3, 2)), leaf * 1, use_reentrant=use_reentrant)
            y = sums(leaf * 1, (0.7, 5))
            (first,) = torch.autograd.grad(y, leaf, create_graph=True)
            z = Keep.apply(1.5 - first).sum() + Keep.apply(first).sum() + x
            z.backward()
        return first, leaf.grad

    for _ in range(2):
        same_with_scope(run)


def test_ops_are_observed_where_a_number_was_lacking():
    """From then on, and within scopes."""
    program = """
        import torch
        from torch import nn
        from activations_cuda import _C, recompute
        observes = _C.recipes.observes_ops
        torch.manual_seed(0)
        x = torch.randn(64, 1024, requires_grad=True)
        norm = nn.LayerNorm(1024)
        with recompute():
            loss = (norm(norm(x * 2)).relu() * x).sum()
            assert not observes()
            y = x.exp()
            loss = loss + (y * (y + 1)).sum()
            assert observes()
        assert not observes()
        with recompute():
            assert observes()
            with recompute():
                assert observes()
            assert observes()
        assert not observes()
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
