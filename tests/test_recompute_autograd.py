"""The scope and autograd: double backward, retained and partial graphs, hooks, threads, modes."""

import contextlib
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import activations_cuda
from activations_cuda import recompute
from activations_cuda.recipes.verification import forget_choices
from recomputing import Keep, Scope, assert_same, gradients, same_with_scope, small_net

pytestmark = pytest.mark.usefixtures("no_hidden_errors")


@pytest.mark.parametrize("within", [True, False])
def test_double_backward(within):
    def run(scope):
        net, x = small_net()
        x.requires_grad_()
        with scope():
            loss = net(x).square().mean()
        with scope() if within else contextlib.nullcontext():
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + grad.square().sum()).backward()
        return [x.grad, grad, *(parameter.grad for parameter in net.parameters())]

    same_with_scope(run)


NETS = {"layer norm": partial(nn.LayerNorm, 16), "activation": nn.Tanh, "linear": partial(nn.Linear, 16, 16)}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("verified", [True, False])
def test_forward_over_reverse(name, verified):
    """Tangents of what is saved are autograd's own to give back, and recipes know nothing of them."""
    torch.manual_seed(0)
    net, x = NETS[name]().double(), torch.randn(8, 16, dtype=torch.float64)
    forget_choices()

    def run(scope):
        if verified:
            with scope():
                loss = net(x.clone().requires_grad_()).square().sum()
            loss.backward()
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.clone(), torch.ones_like(x)).requires_grad_()
            with scope():
                loss = net(dual).square().sum()
            (grad,) = torch.autograd.grad(loss, dual, create_graph=True)
            return forward_ad.unpack_dual(grad)

    same_with_scope(run)


def test_retain_graph():
    def run(scope):
        net, x = small_net()
        with scope():
            loss = net(x).square().mean()
        result = []
        for i in range(3):
            net.zero_grad()
            loss.backward(retain_graph=i < 2)
            result += [parameter.grad.clone() for parameter in net.parameters()]
        return result

    same_with_scope(run)


def test_a_saved_input_has_its_node():
    """Which passes_unnoticed (answers.cpp) counts on: without it, layer norms' gradients would only take longer."""
    x = torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True)
    with recompute():
        node = F.layer_norm(x.float(), (8,)).grad_fn
    assert node._saved_input.grad_fn is node.next_functions[0][0]


def test_parts_of_a_graph():
    def run(scope):
        net, x = small_net()
        with scope():
            loss = net(x).square().mean()
        some = torch.autograd.grad(loss, net[3].weight, retain_graph=True)
        loss.backward(inputs=[net[6].weight, net[1].bias])
        return [*some, net[6].weight.grad, net[1].bias.grad]

    same_with_scope(run)


def test_anomaly_mode():
    def run(scope):
        net, x = small_net()
        with torch.autograd.detect_anomaly(check_nan=True), scope():
            return gradients(net, net(x).square().mean())

    same_with_scope(run)


def test_hooks_of_modules_and_tensors():
    def run(scope):
        net, x = small_net()
        seen = []
        net[2].register_full_backward_hook(lambda module, before, after: seen.append(before[0].clone()))
        with scope():
            y = net[:2](x)
            y.register_hook(lambda grad: seen.append(grad.clone()))
            loss = net[2:](y).square().mean()
        return [*gradients(net, loss), *seen]

    same_with_scope(run)


def test_several_graphs_and_threads():
    def run(scope):
        net, x = small_net()
        with scope():
            first, second = net(x).square().mean(), net(x.flip(0)).square().mean()
        thread = threading.Thread(target=second.backward)
        thread.start()
        thread.join()
        first.backward()
        return [parameter.grad for parameter in net.parameters()]

    same_with_scope(run)


def test_backward_passes_at_once():
    net, x = small_net()
    net.eval()
    with recompute():
        losses = [net(x).square().mean() for _ in range(4)]
    expected = torch.autograd.grad(net(x).square().mean(), list(net.parameters()))
    found = [None] * 4

    def run(i):
        found[i] = torch.autograd.grad(losses[i], list(net.parameters()))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for grads in found:
        for one, other in zip(grads, expected, strict=True):
            assert_same(one, other)


def test_backward_under_autocast():
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            seen.append(ctx.saved_tensors[0])
            return grad

    weight = nn.Parameter(torch.randn(2, 3, 4, 4).bfloat16())
    with Scope() as scope:
        loss = Look.apply(F.pad(Keep.apply(weight * 2), (1, 1, 1, 1), mode="reflect")).float().sum()
    assert scope.count[True]
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    assert seen[0].dtype is torch.bfloat16


def test_an_error_in_backward_leaves_modes_as_they_were():
    x = torch.randn(4, 4, requires_grad=True).cumsum(0)
    with recompute():
        y = F.relu(Keep.apply(x)).sinc().sum()
    with torch.no_grad():
        x.mul_(2)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError, match="inplace"):
            y.backward()
        assert torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


class Dot(torch.autograd.Function):
    """The sum of x * w, whose gradient for w is what it saved."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return (x * w).sum()

    @staticmethod
    def backward(ctx, grad):
        return None, ctx.saved_tensors[0]


def test_a_gradient_that_is_an_input(device):
    """Accumulated in place, it would change the input, which requires no gradient."""

    def run(scope):
        torch.manual_seed(0)
        x, w = torch.randn(64, 64, device=device), torch.zeros(64, 64, device=device, requires_grad=True)
        for _ in range(2):
            with scope():
                loss = Dot.apply(x, w)
            loss.backward()
        return x, w.grad

    same_with_scope(run)


def test_functions_that_are_suspended():
    def generate():
        yield 1

    async def wait():
        pass

    async def stream():
        yield 1

    class Net:
        pass

    for function in generate, wait, stream, Net:
        with pytest.raises(TypeError, match=function.__name__):
            recompute()(function)
    with pytest.raises(TypeError, match="expected a function to decorate, got Tensor: call the model within it"):
        recompute(nn.ReLU())(torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gelu", "silu", "mish", "hardswish"])
def test_second_derivatives_are_added_up_in_the_same_order(name, dtype):
    """Of an input that others read too: PyTorch's own op, this package's, and that within the scope.

    On a GPU PyTorch's own order isn't always the same: the nodes that backward's thread makes have numbers of their own.
    """

    def run(function, scope):
        torch.manual_seed(0)
        x = torch.randn(64, 300, dtype=dtype, requires_grad=True)
        with scope():
            h = x * 1
            normalized = (h - h.mean(-1, keepdim=True)) / h.std(-1, keepdim=True)
            loss = (normalized * normalized.detach().roll(1)).sum() + function(h).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return [grad, *torch.autograd.grad((grad * grad.detach()).sum(), x)]

    expected = run(getattr(F, name), contextlib.nullcontext)
    for context in contextlib.nullcontext, recompute:
        for one, other in zip(run(getattr(activations_cuda, name), context), expected, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("held", ["casts", "tensor"])
def test_a_scope_over_several_steps(held, device):
    """Autocast goes on using its copies of the weights, and the loop a tensor of the first step, as they were."""

    def run(scope):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64)).to(device)
        weight = nn.Parameter(torch.randn(64, 64, device=device))
        optimizer, gradients = torch.optim.SGD([weight, *net.parameters()], 0.1), []
        with torch.autocast(device, torch.bfloat16, enabled=held == "casts"), scope():
            Keep.apply((weight + weight.neg() * 0.5).relu())  # which is verified then
            table = weight + weight.neg() * 0.5
            for i in range(3):
                loss = (net(torch.randn(8, 64, device=device)) @ table.relu()).float().square().mean()
                if i == 0:  # after all that is saved before the backward pass
                    table = weight + weight.neg() * 0.5
                optimizer.zero_grad()
                loss.backward(retain_graph=True)
                optimizer.step()
                gradients += [parameter.grad.clone() for parameter in net.parameters()]
                del loss
        return gradients

    same_with_scope(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_ours", [False, True])
def test_backward_in_inference_mode(is_ours, dtype, device):
    def run(scope):
        net, x = small_net()
        net = net.to(device, dtype)
        if is_ours:
            activations_cuda.convert(net, classes=[nn.SiLU, nn.ReLU])
        with scope():
            loss = net(x.to(device, dtype)).square().mean()
        with torch.inference_mode():
            return torch.autograd.grad(loss, list(net.parameters()))

    same_with_scope(run)


def test_nodes_whose_tensors_were_freed():
    """Their outputs may be read again, as long as nobody differentiates through them."""

    def run(scope, least, is_freed):
        torch.manual_seed(0)
        a, b, c, weight, most = (torch.randn(2, 4, 8, 8, requires_grad=True) for _ in range(5))
        with scope():
            x, top = a * b, most * c
            saved = ((x + top) * c).sum()
            y, pooled = torch.clamp(x, None if least is None else torch.full_like(x, least), top), F.max_pool2d(x, 2)
            if is_freed:
                torch.autograd.grad(y.sum() + pooled.sum(), (x, top))
            loss = (y * weight).sum() + (pooled * weight[:, :, ::2, ::2]).sum()
        return *torch.autograd.grad(loss, weight), saved.detach()

    for least, is_freed in [(None, False), (0.25, False), (0.25, True)]:
        same_with_scope(partial(run, least=least, is_freed=is_freed))


def test_an_operand_that_is_read_before_a_pass_that_makes_a_graph():
    """The node has not saved the one that its gradient doesn't need."""

    def run(scope):
        torch.manual_seed(0)
        parameter, x, weight = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(4, 8)), torch.randn(4, 8)
        with scope():
            (grad,) = torch.autograd.grad((x.tanh() * parameter * weight).sum(), x, create_graph=True)
            grad.square().sum().backward()
        return x.grad, parameter.grad

    same_with_scope(run)
