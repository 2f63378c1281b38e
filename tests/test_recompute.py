"""The scope recompute(): autograd in full, hooks and checkpoints around and within, what lives how long, what is an error."""

import contextlib
import copy
import dataclasses
import gc
import itertools
import math
import os
import re
import threading
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import activations_cuda
from activations_cuda import _C, GELU, SiLU, convert, recompute
from activations_cuda.recipes import hook, norms, programs, scope
from activations_cuda.recipes.formulas import FORMULAS, same
from activations_cuda.recipes.rules import RULES, op
from activations_cuda.recipes.step import Underivable
from activations_cuda.recipes.verification import Candidates
from recomputing import Keep, Plain, Scope, assert_same, bytes_of, compare, same_with_scope, small_net
from recomputing import step as run_step

pytestmark = pytest.mark.usefixtures("no_hidden_errors")


def gradients(net, loss):
    net.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in net.parameters()]


def top_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def copying_hooks(memory_format=torch.preserve_format):
    """As those that offload."""
    return torch.autograd.graph.saved_tensors_hooks(partial(torch.clone, memory_format=memory_format), lambda tensor: tensor)


# Autograd


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


HEADS = {
    "in place": lambda x: F.relu(F.group_norm(x, 4), inplace=True),
    "pooled": lambda x: F.max_pool2d(torch.tanh(x), 2),
    "by a mask": lambda x: F.dropout(x, 0.5),
}


# After the scope indices are saved in 8 bytes, too.
@pytest.mark.parametrize(("body", "within"), [*itertools.product(HEADS, [True]), ("in place", False), ("by a mask", False)])
def test_passes_that_make_graphs_save_no_more(body, within, device):
    """Each pass is given what the one before was, if the graph that it made has saved it."""

    def run(scope):
        torch.manual_seed(0)
        conv, heads = nn.Conv2d(3, 16, 3).to(device), nn.ModuleList(nn.Conv2d(16, 4, 3) for _ in range(3)).to(device)
        x, after = torch.randn(8, 3, 24, 24, device=device, requires_grad=True), Plain()
        with scope:
            y = HEADS[body](conv(x))
            outputs, loss = [head(y) for head in heads], 0
        with scope if within else after:
            for output in outputs:
                (grad,) = torch.autograd.grad(output.sin().sum(), x, create_graph=True)
                loss = loss + grad.square().sum()
        kept = bytes_of([*scope.tensors(), *after.tensors()])
        loss.backward()
        return [*(parameter.grad for parameter in (*conv.parameters(), *heads.parameters())), x.grad], kept

    (expected, before), (gradients, after) = run(Plain()), run(Scope())
    for one, other in zip(expected, gradients, strict=True):
        assert_same(one, other)
    assert after <= before


class Modifies(torch.autograd.Function):
    """Its backward modifies what it alone has saved, which somebody holds from then on."""

    @staticmethod
    def forward(ctx, x, modify, held):
        ctx.save_for_backward(x)
        ctx.modify, ctx.held = modify, held
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        ctx.held.append(saved)
        gradient = grad * saved
        ctx.modify(saved)
        return gradient, None, None


def test_what_a_pass_was_given_is_written_to():
    """The next pass isn't given that again."""
    held, x = [], torch.randn(64, 128, requires_grad=True)
    with recompute():
        loss = Modifies.apply(torch.relu(torch.sigmoid(x)), lambda saved: saved.mul_(2), held)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(first, second) and len(held) == 2


def test_a_clone_of_what_an_op_in_place_wrote():
    """Its version is not the clone's."""

    def run(scope):
        torch.manual_seed(0)
        net = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        with scope():
            h = torch.relu_(net[0](torch.randn(2, 8, 24, 24)))
            loss = (net[1](h) + net[2](h.clone())).square().sum()
        del h
        loss.backward()
        return [parameter.grad for parameter in net.parameters()]

    same_with_scope(run)


@pytest.mark.parametrize("around", ["nothing", "identity"])
def test_versions_stay_as_they_are(around):
    """Of what somebody else holds: PyTorch's own checks read them."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    weight = torch.randn(64, 128, requires_grad=True)
    with torch.no_grad():
        weight.mul_(2)
    outside = weight.cos().sum()  # saves it at version 1
    with hooks if around == "identity" else contextlib.nullcontext(), recompute():
        loss = weight.clone().sin().sum() + weight.cos().sum()
    loss.backward()
    assert weight._version == 1
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outside.backward()


@pytest.mark.parametrize(
    "function", [torch.relu, lambda x: x.sigmoid() + Keep.apply(x.sigmoid()), lambda x: Keep.apply(x.relu().view(128, 64))]
)
def test_outer_hooks_that_give_inference_tensors(function):
    def pack(tensor):
        with torch.inference_mode():
            return tensor.clone()

    def run(scope):
        torch.manual_seed(0)
        x = torch.randn(64, 128, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), scope():
            loss = function(x @ torch.eye(128)).sin().sum()
        loss.backward()
        return [x.grad]

    same_with_scope(run)


def test_outer_hooks_give_a_mask_back_once():
    """To the pass of their scope, and not to another scope's."""
    store = {}

    def pack(tensor):
        store[len(store) + 1000] = tensor.clone()
        return max(store)

    x, weight = (torch.randn(64, 512, requires_grad=True) for _ in range(2))
    mask = torch.rand(64, 512) > 0.5
    with torch.autograd.graph.saved_tensors_hooks(pack, store.pop), recompute():
        y = torch.where(mask, x, 0.0)
    with recompute():
        (grad,) = torch.autograd.grad(y, x, weight, create_graph=True)
    del y
    (result,) = torch.autograd.grad(grad.sum(), weight)
    assert torch.equal(result, mask.float())


COPIES = {
    "of half the width": (lambda h: F.layer_norm(h.float(), (128,)).sum() + Keep.apply(h).sum(), 1),
    "of a part": (lambda h: Keep.apply(torch.cat([h, h.relu(), h.tanh()], 1)).sum() + Keep.apply(h).sum(), 2.5),
}


@pytest.mark.parametrize(("function", "times"), COPIES.values(), ids=COPIES)
def test_what_is_kept_as_a_copy_is_saved_later(function, times):
    """Once, then."""

    def kept(scope):
        linear = nn.Linear(128, 128).bfloat16()
        with scope:
            loss = function(linear(torch.randn(256, 128).bfloat16()))
        result = scope.bytes()
        loss.backward()
        return result

    h, inputs = 2 * 256 * 128, 2 * 256 * 128 + 2 * 128 * 128
    assert kept(Scope()) < inputs + (times + 0.2) * h < kept(Plain())


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


def test_what_a_pass_was_given_is_freed():
    """Which changes no version."""
    held = []

    def run(scope):
        torch.manual_seed(0)
        x = torch.randn(64, 512, requires_grad=True)
        with scope():
            y = x.sigmoid()
            z = y * y
            freed = Modifies.apply(z, lambda saved: saved.untyped_storage().resize_(0), held)
            other = (z - y).sin().sum()
        del y, z
        (first,) = torch.autograd.grad(freed, x, retain_graph=True)
        return [first, *torch.autograd.grad(other, x)]

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


# Checkpoints and other hooks


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_within(reentrant):
    def run(scope):
        net, x = small_net()
        x.requires_grad_()
        with scope():
            loss = net[4:](checkpoint(net[1:4], net[0](x), use_reentrant=reentrant)).square().mean()
        return [*gradients(net, loss), x.grad]

    same_with_scope(run)


@pytest.mark.parametrize("backward_within", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_scope_within_a_checkpoint(reentrant, backward_within):
    def run(scope):
        net, x = small_net()
        x.requires_grad_()

        def part(x):
            with scope():
                return net(x)

        with scope() if backward_within else contextlib.nullcontext():
            loss = checkpoint(part, x, use_reentrant=reentrant).square().mean()
            return [*gradients(net, loss), x.grad]

    same_with_scope(run)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inplace", [True, False])
def test_smooth_activations_in_a_checkpoint_within(reentrant, inplace):
    """They save the same in the forward pass and when it runs again, which is outside of the scope."""
    torch.manual_seed(0)
    part = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), SiLU(inplace), GELU())
    part.to(torch.bfloat16)
    x = torch.randn(2, 3, 8, 8, dtype=torch.bfloat16, requires_grad=True)

    def run(scope):
        with scope():
            loss = checkpoint(part, x, use_reentrant=reentrant).float().square().mean()
        return gradients(part, loss)

    same_with_scope(run)


def test_selective_checkpoint_within():
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.convolution.default])

    def run(scope):
        net, x = small_net()
        net[1].track_running_stats = net[4].track_running_stats = False
        x.requires_grad_()
        with scope():
            loss = checkpoint(net, x, use_reentrant=False, context_fn=contexts).square().mean()
        return [*gradients(net, loss), x.grad]

    same_with_scope(run)


def test_save_on_cpu_within():
    def run(scope):
        net, x = small_net()
        with scope():
            y = net[:3](x)
            with torch.autograd.graph.save_on_cpu():
                y = net[3:5](y)
            loss = net[5:](y).square().mean()
        return gradients(net, loss)

    same_with_scope(run)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_outer_hooks_get_what_is_kept(layout):
    def run(scope, given):
        net, x = small_net()

        def pack(tensor):
            given.append(tensor.numel() * tensor.element_size())
            return tensor.detach().clone(memory_format=torch.contiguous_format)

        x = x.contiguous(memory_format=layout)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor) if given is not None else scope(), scope():
            loss = net(x).square().mean()
        return gradients(net, loss)

    without, within = [], []
    run(contextlib.nullcontext, without)
    run(recompute, [])  # tries the recipes
    for one, other in zip(run(contextlib.nullcontext, None), run(recompute, within), strict=True):
        assert torch.equal(one, other)
    assert sum(within) < 0.8 * sum(without)


@pytest.mark.parametrize("of", [lambda t: t[:1, :8].expand(64, 8), lambda t: t[:, ::100]], ids=["expanded", "gaps"])
def test_outer_hooks_need_not_restore_strides_that_are_not_dense(of):
    other, x = of(torch.randn(64, 800)), torch.randn(64, 8, requires_grad=True)
    kept = []

    def run(scope):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t), scope():
            product = x * other
        kept.append(product.grad_fn._saved_other.untyped_storage().nbytes())
        return torch.autograd.grad(product.square().sum(), x)

    same_with_scope(run)
    assert kept[0] == kept[-1]


def test_an_error_of_outer_hooks():
    for inner in contextlib.nullcontext, recompute:
        x, calls = torch.randn(8, 8, requires_grad=True), []

        def pack(tensor, calls=calls):
            calls.append(tensor)
            if len(calls) == 2:
                raise ValueError("once")
            return tensor

        outer = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with outer, inner(), pytest.raises(ValueError, match="once"):
            x @ x
        assert len(calls) == 2


def test_save_on_cpu_around():
    def run(scope):
        net, x = small_net()
        with torch.autograd.graph.save_on_cpu(), scope():
            loss = net(x).square().mean()
        return gradients(net, loss)

    same_with_scope(run)


class Offloaded(torch.autograd.graph.saved_tensors_hooks):
    """As fine-tuning libraries offload: by a stream of its own, and a number stands for a tensor, which is fetched once."""

    def __init__(self, device):
        super().__init__(self.pack, self.fetch)
        self.there, self.numbers, self.bytes = {}, itertools.count(), 0
        self.stream = torch.cuda.Stream() if device == "cuda" else None

    def pack(self, tensor):
        number = next(self.numbers)
        self.bytes += tensor.nbytes
        if self.stream is None:
            self.there[number] = tensor.detach().clone()
            return number
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.there[number] = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)
        return number

    def fetch(self, number):
        tensor = self.there.pop(number)
        if self.stream is None:
            return tensor
        with torch.cuda.stream(self.stream):
            tensor = tensor.to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(self.stream)
        tensor.record_stream(torch.cuda.current_stream())
        return tensor


def test_asynchronous_offloading_around(device, deterministic):
    given = {}

    def run(scope):
        net, x = small_net()
        net, x = net.to(device), x.to(device)
        result = []
        for _ in range(2):
            offloaded = Offloaded(device)
            with offloaded, torch.autocast(device, torch.bfloat16), scope():
                loss = net(x).float().square().mean()
            result += gradients(net, loss)
            assert not offloaded.there  # all came back
        given[scope] = offloaded.bytes
        return result

    same_with_scope(run)
    assert given[recompute] < 0.8 * given[contextlib.nullcontext]


def test_outer_hooks_that_give_nothing_back_before_backward():
    """Then no recipe is tried; without them it is, as ever."""
    is_backward = False

    def unpack(tensor):
        if not is_backward:
            raise RuntimeError("not yet")
        return tensor

    _C.recipes.forget_chosen()
    x, counts = torch.randn(4, 8, requires_grad=True), []
    for hooks in torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, unpack), contextlib.nullcontext():
        is_backward = False
        with hooks, Scope() as scope:
            y = x.cumsum(0)
            loss = Keep.apply(y).sum() + Keep.apply(y.neg()).sum()
        is_backward = True
        loss.backward()
        counts.append(scope.count[True])
    assert counts[0] == 0 < counts[1]


def test_outer_hooks_need_no_parameters():
    """Of a linear layer whose weight is saved as a view."""
    given, layer = [], nn.Linear(64, 64)
    x = torch.randn(2, 64, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: given.append(tensor.shape) or tensor, lambda tensor: tensor)
    with hooks, recompute():
        loss = layer(x).sum()
    assert [*given] == [x.shape]
    with torch.no_grad():
        layer.weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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


def test_nested_scopes_know_the_outer_hooks():
    given = []
    net, x = small_net()

    def pack(tensor):
        given.append(tensor)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), recompute():
        y = net[:3](x)
        before = len(given)
        with recompute():
            loss = net[3:](y).sum()
        assert len(given) > before
    loss.backward()


def test_nested_scopes():
    def run(scope):
        net, x = small_net()
        entered = scope()
        with entered:
            y = net[:3](x)
            with scope():
                y = net[3:6](y)
            with entered:
                y = net[6:](y)
            loss = y.square().mean()
        return gradients(net, loss)

    same_with_scope(run)
    assert top_hooks() is None


def test_decorator():
    net, x = small_net()

    @recompute()
    def loss(depth):
        """Calls itself."""
        return net(x).square().mean() + (loss(depth - 1) if depth else 0)

    assert loss.__name__ == "loss" and loss.__doc__ == "Calls itself."
    loss(2).backward()
    assert top_hooks() is None


def test_first_uses_are_logged(monkeypatch):
    """In one line, and nothing else is."""
    messages = []
    monkeypatch.setattr(hook.log, "info", lambda message, *arguments: messages.append(message % arguments))
    net, x = small_net()
    _C.recipes.forget_chosen()
    for _ in range(2):
        with recompute():
            loss = net(x).sum()
        loss.backward()
    (message,) = messages
    assert re.fullmatch(r"recompute: verified \d+ recipes at their first use, in \d+\.\d s", message)


def test_an_error_within_leaves_the_scope():
    with pytest.raises(ZeroDivisionError), recompute():
        raise ZeroDivisionError
    assert top_hooks() is None and not scope._entered.hooks


def test_a_scope_that_another_thread_ends():
    def steps():
        with recompute():
            yield

    generator, errors = steps(), []
    next(generator)

    def close():
        try:
            generator.close()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    scope._autograd._pop_saved_tensors_default_hooks()  # as it was left
    scope._entered.hooks.pop()
    assert errors == ["recompute: expected a scope to end in the thread in which it began"]


def test_it_is_the_threads_own():
    seen = []
    with recompute():
        thread = threading.Thread(target=lambda: seen.append(top_hooks()))
        thread.start()
        thread.join()
    assert seen == [None]


# Compilers and transforms


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend):
    torch._dynamo.reset()

    def run(scope):
        net, x = small_net()
        part = torch.compile(net[:4], backend=backend)
        with scope():
            loss = net[4:](part(x)).square().mean()
        return gradients(net, loss)

    same_with_scope(run)
    net, x = small_net()

    @torch.compile(backend=backend, fullgraph=True)
    def whole(x):
        with recompute():
            return net(x)

    @torch.compile(backend=backend, fullgraph=True)
    @recompute()
    def decorated(x):
        return net(x)

    for function in (whole, decorated):
        function(x).sum().backward()


def test_transforms():
    def function(weight):
        return torch.relu(weight @ weight).sum()

    def within(weight):
        with recompute():
            return function(weight)

    weight = torch.randn(3, 3)
    with recompute():
        with pytest.raises(RuntimeError, match="saved tensor hooks"):  # PyTorch's own, of any hooks
            torch.func.grad(function)(weight)
        torch.func.vmap(torch.relu)(torch.randn(3, 3, requires_grad=True)).sum().backward()
    assert torch.equal(torch.func.grad(within)(weight), torch.func.grad(function)(weight))


def test_forward_mode():
    with recompute(), torch.autograd.forward_ad.dual_level():
        x = torch.randn(3, requires_grad=True)
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(3))
        y = dual.exp() * dual
        _, tangent = torch.autograd.forward_ad.unpack_dual(y)
        y.sum().backward()
    torch.testing.assert_close(x.grad, tangent)


# Other kinds of tensors


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


def test_modes_see_no_verification():
    class Counts(torch.overrides.TorchFunctionMode):
        count = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.count += function in (torch.sin, torch.Tensor.sub, torch.Tensor.aminmax)
            return function(*args, **(kwargs or {}))

    x = torch.randn(64, 131, requires_grad=True)
    with Counts() as mode, recompute():
        Keep.apply(torch.sin(x.abs()))
    assert mode.count == 1


def test_other_data():
    """Of the same layout and version."""
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


def test_a_frozen_bias_that_is_swapped():
    """Nobody's counts of what refers to it are ours to raise."""

    def run(scope):
        torch.manual_seed(0)
        norm, x = nn.BatchNorm2d(16), torch.randn(8, 16, 12, 12, requires_grad=True)
        norm.bias.requires_grad_(False)
        with scope():
            y = torch.relu(norm(x))
        if scope is recompute:
            assert y.grad_fn._raw_saved_result.data.is_recipe
        torch.utils.swap_tensors(norm.bias, nn.Parameter(torch.ones(16), requires_grad=False))
        y.sum().backward()
        return [x.grad]

    same_with_scope(run)


def test_a_frozen_bias_in_a_dry_run():
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))
    net[1].bias.requires_grad_(False)
    x = torch.randn(16, 3, 24, 24)
    _, kept = run_step(net, lambda net: net(x).sum(), Scope(net))
    assert activations_cuda.memory_report(net, x, recompute=True).recompute == kept


def test_positions_that_change_make_few_configurations():
    x = torch.randn(64, 128, requires_grad=True)
    before = len(_C.recipes.chosen())
    with recompute():
        for shift in range(64):
            Keep.apply(torch.roll(torch.relu(x), shift, 0))
    assert 0 < len(_C.recipes.chosen()) - before <= 2 * 16


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


# What lives how long


def shared_silu():
    x, weight = torch.randn(64, 64), nn.Parameter(torch.randn(64, 64))
    with Scope() as scope:
        y = Keep.apply(x @ weight)
        z = F.silu(y)
        loss = (z @ weight + (z @ weight).relu()).sum()
    return scope, loss, y


def test_recipes_that_nobody_gets_read_nothing():
    x, weight, w = torch.randn(64, 64), nn.Parameter(torch.randn(64)), nn.Parameter(torch.randn(64, 64))
    with recompute():
        norm = F.layer_norm(x, (64,), weight)
        y = norm.relu()
        z = (norm * 2 + x @ w).relu()  # the product has no recipe, and so the sum has none
    value = y.grad_fn._raw_saved_result.data
    assert value.is_recipe and not z.grad_fn._raw_saved_result.data.is_recipe
    assert value.operands[0].readers == 1


def test_a_hook_that_raises_before_a_write():
    x, w = torch.randn(64, 64), nn.Parameter(torch.randn(64, 64))

    def fail(tensor):
        raise RuntimeError("mine")

    with recompute():
        y = x @ w
        _, unpack = top_hooks()
        torch._C._autograd._push_saved_tensors_default_hooks(fail, unpack)
        with pytest.raises(RuntimeError, match="mine"):
            activations_cuda.silu(y, inplace=True)
        torch._C._autograd._pop_saved_tensors_default_hooks()
        z = Keep.apply(w)  # saved as it is
    assert z.grad_fn._raw_saved_tensors[0].data.held is w


@pytest.mark.parametrize("rows", [slice(3, 9), slice(None, None, 2)])
def test_hooks_that_give_back_other_strides(rows):
    """A view of what has gaps, and is no view itself."""

    def run(scope):
        torch.manual_seed(0)
        w, p = torch.randn(64, 256, requires_grad=True), torch.randn(128, 128, requires_grad=True)
        with copying_hooks(torch.contiguous_format), scope():
            a, b = torch.unsafe_chunk(torch.randn(128, 64) @ w, 2, 1)
            loss = a.sin().sum() + (a[rows] @ p).square().sum() + b.sum()
        loss.backward()
        return w.grad, p.grad

    same_with_scope(run)


def test_the_output_that_was_written_to_is_named():
    x = torch.randn(128, 64, requires_grad=True)
    with recompute():
        _, b = torch.unsafe_chunk(x, 2)
        loss = b.sin().sum()
    with torch.no_grad():
        b.mul_(2)
    with pytest.raises(RuntimeError, match="which is output 1 of UnsafeSplitBackward0, is at version 1; expected version 0"):
        loss.backward()


def test_softshrink_of_a_layout_that_hooks_change():
    """In vectors its zeros have other signs on the CPU. In the first step there are none."""

    def run(scope):
        torch.manual_seed(0)
        p, c = torch.randn(128, 128, requires_grad=True), torch.randn(128, 128, requires_grad=True)
        for far in (5, 0):
            with copying_hooks(torch.contiguous_format), scope():
                x = torch.empty_strided((128, 128), (300, 2)).fill_(1.0)
                y = F.softshrink(x.mul_(p + far * p.detach().sign()), 0.5)
                loss = (y.reciprocal().clamp(-1.0, 1.0) * c).sum()
            loss.backward()
        return p.grad, c.grad

    same_with_scope(run)


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


@pytest.mark.parametrize("writes", [False, True])
def test_a_leaf_that_was_detached_from_what_is_written_to(writes):
    def run(scope):
        torch.manual_seed(0)
        w = torch.randn(64, 64, requires_grad=True)
        with scope():
            h = w * 1.5
            leaf = h.detach().requires_grad_()
            y = leaf.roll(3, 1)
            h = h.mul_(0.5) if writes else h * 0.5
            loss = y.square().sum() + h.sum()
        loss.backward()
        return leaf.grad, w.grad

    same_with_scope(run)


def test_what_is_remembered_is_let_go():
    scope, loss, _ = shared_silu()
    loss.backward(retain_graph=True)
    assert any(value.is_recipe and value.readers > 1 for value in scope.values())
    assert not any(value.remembers for value in scope.values())


def test_a_failed_backward_forgets():
    scope, loss, y = shared_silu()

    def fail(grad):
        raise ZeroDivisionError

    y.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    assert scope.values() and not any(value.remembers for value in scope.values())


@pytest.mark.parametrize("backward", [True, False])
def test_nothing_leaks(backward):
    net, x = small_net()

    def objects():
        gc.collect()
        return sum(type(each) is weakref.ref or isinstance(each, torch.Tensor) for each in gc.get_objects())

    counts = []
    gc.disable()  # which nothing may need
    try:
        for i in range(10_000 if backward else 1_000):
            with recompute():
                loss = net(x).square().mean()
            if backward:
                net.zero_grad()
                loss.backward()
            if i in (100, 999, 9_999):
                del loss
                counts.append(objects())
    finally:
        gc.enable()
    assert max(counts) <= counts[0] + 5
    assert _C.recipes.packed_masks() == 0


@pytest.mark.parametrize("backward", [True, False])
def test_values_die_with_their_graph(backward):
    weight = nn.Parameter(torch.randn(4, 4))
    gc.collect()
    gc.disable()
    try:
        with Scope() as scope:
            loss = F.relu(Keep.apply((weight @ weight).cumsum(0).exp())).sinc().sum()
        assert scope.values()
        if backward:
            loss.backward()
        else:
            del loss
        assert not scope.values()
    finally:
        gc.enable()


def test_a_value_that_outlives_its_node_is_not_found():
    """Another node may have the same address."""
    pack = hook.Hook(None, check=False, outer=None).pack
    weight = nn.Parameter(torch.randn(4, 4))
    held = []
    for i in range(200):
        y = (weight * i).sinc()
        held.append(pack(y))
        assert torch.equal(held[-1].tensor(), y)


# What is written to


def broken(change):
    net, x = small_net()
    with recompute():
        c = net[0](x)
        y = net[2](net[1](c))
        loss = net[3](y).square().mean()
    with torch.no_grad():
        change(c, y, net)
    loss.backward()


def test_written_to():
    broken(lambda c, y, net: None)
    message = "modified by an inplace operation.*{}"
    with pytest.raises(RuntimeError, match=message.format("Convolution")):
        broken(lambda c, y, net: c.mul_(2))
    with pytest.raises(RuntimeError, match=message.format("SiluBackward0")):
        broken(lambda c, y, net: y.mul_(2))  # nobody keeps it
    for parameter in ("weight", "bias"):
        with pytest.raises(RuntimeError, match=message.format("a leaf")):
            broken(lambda c, y, net, parameter=parameter: getattr(net[1], parameter).mul_(2))


def written_view(x):
    y = x.softmax(-1) * 2
    z = y.view(8, 32).sin().sum()
    y.add_(1)
    return z + y.sum()


def written_mask(x):
    mask = x > 0
    y = torch.where(mask, x, 2 * x)
    mask.logical_not_()
    return y.sum()


@pytest.mark.parametrize("function", [written_view, written_mask])
@pytest.mark.parametrize("scope", [contextlib.nullcontext, recompute])
def test_what_a_view_or_a_mask_is_of_is_written_to(function, scope):
    x = torch.randn(16, 16, requires_grad=True)
    with scope():
        loss = function(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def inplace(function):
    """A net whose smooth activation, this package's, overwrites its input."""

    def run(context):
        torch.manual_seed(0)
        conv, norm = nn.Conv2d(3, 8, 3).bfloat16(), nn.BatchNorm2d(8).bfloat16()
        x = torch.randn(2, 3, 8, 8, dtype=torch.bfloat16, requires_grad=True)
        return function(context, x, conv, norm)

    return run


def test_written_to_by_an_activation():
    """Its input is a recipe, or a copy where it is kept."""

    def follows(context, x, conv, norm):
        with context() as entered:
            y = _C.silu_(norm(Keep.apply(conv(x))))
            loss = Keep.apply(y).float().sum()
        if isinstance(entered, Scope):
            recipes = {value.source for value in entered.values() if value.is_recipe}
            assert recipes >= {"NativeBatchNormBackward0", "SmoothBackward"}
        return torch.autograd.grad(loss, (x, conv.weight, norm.weight))

    def kept(context, x, conv, norm):
        with context():
            y = conv(x)
            before = y.detach().clone()
            _C.silu_(y)
            loss = Keep.apply(y).float().sum()
        assert torch.equal(y, F.silu(before))
        return torch.autograd.grad(loss, (x, conv.weight))

    def part(context, x, conv, norm):
        with context():
            y = norm(Keep.apply(conv(x)))
            _C.hardswish_(y[1:])
            loss = Keep.apply(y).float().sum()
        return torch.autograd.grad(loss, (x, conv.weight, norm.weight))

    def part_of_what_is_kept(context, x, conv, norm):
        with context():
            y = conv(x)
            _C.gelu_(y.view(2, -1)[:1], "tanh")
            loss = Keep.apply(y).float().sum()
        return torch.autograd.grad(loss, (x, conv.weight))

    def channels(context, x, conv, norm):
        with context():
            y = norm(Keep.apply(conv(x)))
            _C.silu_(y[:, ::2])  # not dense
            loss = Keep.apply(y).float().sum()
        return torch.autograd.grad(loss, (x, conv.weight, norm.weight))

    for function in follows, kept, part, part_of_what_is_kept, channels:
        for context in recompute, Scope:
            for one, other in zip(inplace(function)(context), inplace(function)(contextlib.nullcontext), strict=True):
                assert_same(one, other)


def test_what_an_activation_copies_is_what_its_output_follows_from():
    """After a convolution, whose output is kept by nobody else: one copy, and no output."""
    conv = nn.Conv2d(8, 8, 1).bfloat16()
    x = torch.randn(2, 8, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    with Scope() as entered:
        loss = Keep.apply(_C.silu_(conv(Keep.apply(x)))).float().sum()
    assert entered.bytes(conv) == 3 * x.nbytes  # x, the convolution's input, and the copy of its output
    loss.backward()


def test_written_to_by_an_activation_what_somebody_saved():
    def run(context, x, conv, norm):
        with context():
            z = norm(Keep.apply(conv(x)))
            saved = Keep.apply(z)
            (_C.silu_(z) + saved).float().sum().backward()

    for context in recompute, contextlib.nullcontext:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            inplace(run)(context)


def test_derivatives_of_an_activation_that_wrote():
    """Twice, of a graph that is kept, after the graph was freed, and where a hook is on top of the scope's."""

    def twice(context, x, conv, norm):
        with context():
            y = _C.silu_(norm(conv(x) * 1))
            (grad,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.float().square().sum(), (x, conv.weight, norm.weight))

    def again(context, x, conv, norm):
        with context():
            loss = _C.mish_(norm(Keep.apply(conv(x)))).float().square().sum()
        first = torch.autograd.grad(loss, x, retain_graph=True)
        second = torch.autograd.grad(loss, x)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, x)
        return *first, *second

    def offloaded(context, x, conv, norm):
        with context(), torch.autograd.graph.save_on_cpu():
            loss = _C.silu_(norm(conv(x))).float().square().sum()
        return torch.autograd.grad(loss, (x, norm.weight))

    def around(context, x, conv, norm):
        with torch.autograd.graph.save_on_cpu(), context():
            loss = _C.silu_(norm(conv(x))).float().square().sum()
        return torch.autograd.grad(loss, (x, norm.weight))

    for function in twice, again, offloaded, around:
        same_with_scope(inplace(function))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_activation_that_writes_copies_nothing(dtype, device):
    torch.manual_seed(0)
    x = torch.randn(4, 8, 6, 6, device=device).to(memory_format=torch.channels_last).requires_grad_()  # else cuDNN normalizes
    norm = nn.BatchNorm2d(8).to(device)
    profile = torch.profiler.profile(acc_events=True)
    for profiled in (contextlib.nullcontext(), profile):  # tables and formulas are found first
        with torch.autocast(device, torch.bfloat16, enabled=dtype is torch.bfloat16), recompute():
            z = norm(Keep.apply(x.to(dtype)))
            with profiled:
                y = _C.silu_(z)
        grad = torch.ones_like(y)
        with profiled:
            torch.autograd.grad(y, x, grad)
    names = {event.name for event in profile.events()}
    assert "aten::clone" not in names and ("aten::silu_backward" in names) == (device == "cpu"), names


def test_written_to_and_saved_again():
    """The second value isn't the first."""

    def run(scope):
        torch.manual_seed(0)
        weight, other = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.ones(4, 4))
        with scope():
            x = F.silu(Keep.apply(weight * 2))
            first = Keep.apply(x)  # its value is alive
            with torch.no_grad():
                x.mul_(3)
            loss = (x * other).sum()
        del first
        return torch.autograd.grad(loss, other)

    same_with_scope(run)


@pytest.mark.parametrize("function", [F.silu, lambda x: F.silu(F.hardswish(x))])
def test_written_to_under_no_grad_before_it_is_saved(function):
    def run(scope):
        torch.manual_seed(0)
        weight, other = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        with scope():
            F.silu(Keep.apply(weight * 2).clone(), inplace=True) @ other  # which has a version of 1 as well
            x = function(Keep.apply(weight * 2))
            with torch.no_grad():
                x.mul_(3)
            loss = (x @ other).sum()
        return torch.autograd.grad(loss, other)

    same_with_scope(run)


def test_written_to_under_no_grad_while_hooks_around_have_a_copy():
    def run(scope):
        torch.manual_seed(0)
        weight, other = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        grads = []
        for factor in (1, 3):
            with copying_hooks(), scope():
                x = weight @ weight
                kept = Keep.apply(x)
                with torch.no_grad():
                    x.mul_(factor)
                loss = (kept + torch.tanh(x) * other).sum()
            grads += torch.autograd.grad(loss, [weight, other])
        return grads

    same_with_scope(run)


def test_a_number_that_was_saved_before_the_scope_and_written_to():
    def run(scope):
        torch.manual_seed(0)
        x, other, grads = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True), []
        for factor in (1, 3):
            number, exponential = torch.tensor(2), torch.exp(x)
            product = exponential * number
            number.mul_(factor)
            with scope():
                kept = Keep.apply(exponential)
                loss = (product * other).sum()
            del kept
            grads += torch.autograd.grad(loss, [other])
        return grads

    same_with_scope(run)


def test_a_write_that_changed_nothing_proves_nothing():
    def run(scope):
        torch.manual_seed(0)
        weight, other = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
        grads = []
        for factor in (1, 3):
            with scope():
                x = F.mish(Keep.apply(weight * 2))
                with torch.no_grad():
                    x.mul_(factor)
                loss = (x @ other).sum()
            grads += torch.autograd.grad(loss, other)
        return grads

    same_with_scope(run)


def test_an_operand_that_was_written_to_is_none():
    def run(scope):
        torch.manual_seed(0)
        weight, other = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        with scope():
            x = Keep.apply(weight * 2)
            side = x * x  # noqa: F841, saves x
            with torch.no_grad():
                x.mul_(3)
            loss = (F.relu(x) @ other).sum() + (torch.tanh(x) * other).sum()
        return torch.autograd.grad(loss, other)

    same_with_scope(run)


def test_mask_that_is_written_to():
    def run(scope):
        torch.manual_seed(0)
        one, other = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16))
        mask = torch.rand(16, 16) > 0.5
        with scope():
            side = torch.where(mask, one, 0.0)  # noqa: F841, saves the mask
            mask.logical_not_()
            loss = torch.where(mask, one * 2, other).sum()
        return torch.autograd.grad(loss, [one, other])

    same_with_scope(run)


def test_mask_is_packed_once():
    mask = torch.rand(64, 64) > 0.5
    x = torch.randn(64, 64, requires_grad=True)
    with Scope() as scope:
        y = sum(torch.where(mask, x * i, x) for i in range(4))
    assert scope.bytes() == 64 * 8
    y.sum().backward()


@pytest.mark.parametrize("around", [recompute, contextlib.nullcontext])
def test_mask_of_several_scopes_is_packed_once(around):
    mask = torch.rand(64, 64) > 0.5
    x = torch.randn(64, 64, requires_grad=True)
    scopes = []
    with around():
        for i in range(3):
            with Scope() as scope:
                x = torch.where(mask, x * i, x)
            scopes.append(scope)
    assert {root.data_ptr() for scope in scopes for root in scope.tensors()} == {scopes[0].tensors()[0].data_ptr()}
    x.sum().backward()


def test_mask_of_several_scopes_is_given_back_once_by_each():
    """As by an offloader that forgets what it has given back."""

    class Offloader:
        def __init__(self):
            self.store = {}

        def pack(self, tensor):
            self.store[len(self.store)] = tensor.clone()
            return len(self.store) - 1

        def unpack(self, key):
            return self.store.pop(key)

    def run(scope):
        torch.manual_seed(0)
        offloader, x = Offloader(), torch.randn(64, 64, requires_grad=True)
        mask, losses = torch.rand(64, 64) > 0.5, []
        for i in range(2):
            with torch.autograd.graph.saved_tensors_hooks(offloader.pack, offloader.unpack), scope():
                losses.append(torch.where(mask, x * i, x).sum())
        for loss in losses:
            loss.backward()
        return [x.grad]

    same_with_scope(run)


@pytest.mark.parametrize("numel", [64, 65, 71, 4096, 10007])
def test_masks_are_found_again(numel, device):
    torch.manual_seed(0)
    mask = torch.rand(numel, device=device) > 0.5
    scope = hook.Hook(None, check=False, outer=None)
    value = scope.pack(mask)
    assert value.is_recipe and value.roots[0].held.numel() == -(-numel // 8)
    assert torch.equal(value.tensor(), mask)
    if numel % 2 == 0:
        transposed = mask.view(2, -1).t().contiguous().t()
        assert_same(scope.pack(transposed).tensor(), transposed)


def test_temporaries_are_written_to(set_facts):
    """A chain of recipes needs no memory for what is between, and writes to nothing else."""
    written = []

    def relu_(x):
        written.append(x)
        return torch.relu_(x)

    set_facts({torch.relu: dataclasses.replace(FORMULAS[torch.relu], in_place=relu_)})

    def run(scope):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(16, 16))
        with scope():
            x = Keep.apply(weight * 2)
            loss = Keep.apply(F.relu(x)) + Keep.apply(F.relu(F.silu(x))) + Keep.apply(F.relu(x.view(16, 16)))
            kept = x.clone()
        grads = torch.autograd.grad(loss.sum(), weight)
        assert torch.equal(x, kept)
        return grads

    same_with_scope(run)
    written.clear()
    run(recompute)
    assert len(written) == 1


def test_masks_that_somebody_holds_are_kept():
    x = torch.randn(16, 16, requires_grad=True)
    held = torch.rand(16, 16) > 0.5
    large = torch.rand(64, 16) > 0.5
    for mask, bytes in ((held, 32), (held, 256), (large[:16], 1024)):
        with Scope() as scope:
            y = torch.where(mask, x, x * 2)
        assert scope.bytes() == bytes
        y.sum().backward()


# What a review found


def test_batch_norm_in_evaluation_then_in_training():
    """Which writes to the statistics unnoticed."""

    def run(scope):
        torch.manual_seed(0)
        first, norm, last = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)
        with scope():
            loss = last(norm.eval()(first(torch.randn(32, 16)))).square().sum()
            loss = loss + last(norm.train()(first(torch.randn(32, 16) + 3))).square().sum()
        loss.backward()
        return [first.weight.grad, last.weight.grad]

    same_with_scope(run)


@pytest.mark.parametrize("training", ["recorded", "not recorded", "frozen", "in a checkpoint"])
def test_batch_norm_in_training_before_its_output_is_saved(training):
    """Of an output in evaluation mode; training writes to the statistics that it depends on."""

    def train(net, x):
        net.train()
        if training == "in a checkpoint":
            return checkpoint(net, x, use_reentrant=False)
        with torch.set_grad_enabled(training != "not recorded"):
            if training != "frozen":
                return net(x)
            net.requires_grad_(False)
            y = net(x)
            net.requires_grad_(True)
            return y

    def run(scope):
        torch.manual_seed(0)
        net, result = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(2))), []
        gate = torch.ones(32, 16, requires_grad=True)
        for _ in range(3):
            x = torch.randn(32, 16)
            with scope():
                y = net.eval()(x)
                other = train(net, x + 3)
                loss = (y * gate).square().sum() + other.square().sum()
            result += torch.autograd.grad(loss, [*net.parameters(), gate])
        return result

    same_with_scope(run)


def test_batch_norm_in_evaluation_of_few_samples():
    """Copies of its statistics would take more than its output."""
    norm = nn.BatchNorm1d(2**12).eval()
    kept = []
    for counted in Plain(), Scope():
        with counted:
            y = Keep.apply(norm(Keep.apply(torch.randn(2, 2**12, requires_grad=True))))
        kept.append(counted.bytes(norm))
        y.sum().backward()
    assert kept[1] <= kept[0]


@pytest.mark.parametrize("alpha", [0.3, 1])
@pytest.mark.parametrize("op", [torch.add, torch.sub])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_of_multiples(op, dtype, alpha):
    """The CPU rounds them otherwise in vectors, and at first there is nothing to add."""

    def run(scope):
        torch.manual_seed(0)
        w, k, b = torch.randn(64, 128), torch.ones(1), torch.zeros(64, 64)
        w, k, b = (each.to(dtype).requires_grad_() for each in (w, k, b))
        result = []
        for _ in range(3):
            with scope():
                x = (w * k)[:, ::2].contiguous()
                loss = (op(x, b * k, alpha=alpha) ** 3).sum()
            result += torch.autograd.grad(loss, [b, k])
            with torch.no_grad():
                b += 0.1 * torch.randn(64, 64).to(dtype)
        return result

    same_with_scope(run)


@pytest.mark.parametrize("weight", [None, torch.ones(144)], ids=["plain", "scaled"])
def test_the_sign_of_a_zero_behind_layer_norm(weight):
    """Where the variance overflows."""
    x = torch.randn(192, 144)
    for value in 1.0, 3e19, 1e20:
        x[0, 0] = value
        with Scope(check=False) as scope:
            y = F.layer_norm(Keep.apply(x.clone().requires_grad_()), (144,), weight)
            loss = Keep.apply(y).sum()
        (recipe,) = (each for each in scope.values() if each.is_recipe)
        assert torch.equal(recipe.tensor().view(torch.int32), y.detach().view(torch.int32))
        assert value == 1 or torch.equal(y[0], torch.zeros(144))
        loss.backward()


def test_sums_of_sums():
    """Each of 2 to the power of 30 ways to put them into one program isn't tried."""
    x, k = torch.randn(16, 16, requires_grad=True), torch.ones(16, requires_grad=True)
    with recompute():
        y = x * k
        for _ in range(30):
            y = y + y
        z = y * k
    assert_same(torch.autograd.grad(z.sum(), x)[0], (k * k).detach().expand(16, 16) * 2**30)


@pytest.fixture
def compared(monkeypatch):
    """What recipes are verified with."""
    calls = []
    monkeypatch.setattr(hook, "verify", lambda *given, verify=hook.verify: calls.append(given) or verify(*given))
    return calls


NORMS_THAT_SAVE_LESS = {
    "evaluated": lambda: nn.BatchNorm1d(16).eval(),
    "of an instance": lambda: nn.InstanceNorm1d(16, affine=True, track_running_stats=True).eval(),
    "frozen": lambda: nn.BatchNorm1d(16).requires_grad_(False),
    "frozen and evaluated": lambda: nn.BatchNorm1d(16).requires_grad_(False).eval(),
    "of frozen groups": lambda: nn.GroupNorm(2, 16).requires_grad_(False),
    "plain": lambda: nn.BatchNorm1d(16, affine=False),
    "plain, of an instance": lambda: nn.InstanceNorm1d(16),
    "plain, of groups": lambda: nn.GroupNorm(2, 16, affine=False),
}


@pytest.mark.parametrize("name", NORMS_THAT_SAVE_LESS)
def test_norms_are_compared_once(name, compared):
    _C.recipes.forget_chosen()
    norm = NORMS_THAT_SAVE_LESS[name]()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    for is_expected in True, False, False:
        compared.clear()
        with Scope() as scope:
            y = Keep.apply(norm(Keep.apply(torch.randn(4, 16, 8, requires_grad=True))))
        assert any(value.is_recipe for value in scope.values()) and bool(compared) == is_expected
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batch_norm_in_evaluation_is_fused(dtype, device):
    _C.recipes.forget_chosen()
    norm = nn.BatchNorm2d(16, device=device)
    norm(torch.randn(4, 16, 8, 8, device=device))
    norm.eval()
    x = torch.randn(4, 16, 8, 8, device=device).to(dtype).requires_grad_()
    with Scope() as scope:
        loss = Keep.apply(F.relu(norm(Keep.apply(x)))).float().sum()
    recipes = [value for value in scope.values() if value.is_recipe]
    assert recipes and all(value.fuses for value in recipes)
    assert norms.batch_norm_evaluated not in _C.recipes.chosen().values()
    loss.backward()


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, partial(nn.GroupNorm, 2)])
@pytest.mark.parametrize("bias_of", ["own", "tied", "other", "written to", "gone", "unknown"])
def test_frozen_biases(kind, bias_of):
    def other(norm, x):
        bias = norm.bias if bias_of == "written to" else norm.bias + 1
        if kind is not nn.BatchNorm1d:
            y = (torch if bias_of == "unknown" else F).group_norm(x, 2, norm.weight, bias)
        elif bias_of == "unknown":
            y = torch.batch_norm(x, norm.weight, bias, None, None, True, 0.0, 1e-5, False)
        else:
            y = F.batch_norm(x, None, None, norm.weight, bias, True)
        if bias_of == "written to":
            with torch.no_grad():
                norm.bias += 1
        return y, bias if bias_of == "other" else None

    def run(scope):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 16), kind(16), nn.Linear(16, 16), kind(16), nn.Linear(16, 8))
        for norm in (net[1], net[3]):
            nn.init.normal_(norm.bias).requires_grad_(False)
        if bias_of == "tied":
            net[3].weight = net[1].weight
        with scope():
            result = other(net[1], net[0](torch.randn(32, 16)))
            loss = net(torch.randn(32, 16)).square().sum() + net[4](result[0]).square().sum()
        loss.backward()
        return [each.grad for each in net.parameters() if each.requires_grad]

    for _ in range(2):
        same_with_scope(run)


def test_a_function_in_place_of_the_op(monkeypatch):
    """Which calls it with another bias than it was given."""
    group_norm, added = torch.group_norm, []
    monkeypatch.setattr(torch, "group_norm", lambda x, n, w, b, *others: group_norm(x, n, w, b + added[-1], *others))

    def run(scope):
        torch.manual_seed(0)
        net, result = nn.Sequential(nn.Linear(16, 16), nn.GroupNorm(2, 16).requires_grad_(False), nn.Linear(16, 8)), []
        for step in range(3):
            added.append(step)
            with scope():
                loss = net(torch.randn(32, 16)).square().sum()
            result += torch.autograd.grad(loss, list(net[0].parameters()) + list(net[2].parameters()))
        return result

    same_with_scope(run)


def test_statistics_that_are_no_plain_tensors():
    class Statistics(nn.Parameter):
        pass

    def run(scope):
        torch.manual_seed(0)
        norm, gate = nn.BatchNorm1d(16), torch.ones(32, 16, requires_grad=True)
        del norm.running_mean
        norm.running_mean = Statistics(torch.zeros(16), requires_grad=False)
        with scope():
            y = norm.eval()(torch.randn(32, 16))
            norm.train()(torch.randn(32, 16) + 3)
            loss = (y * gate).sum()
        return torch.autograd.grad(loss, [gate])

    same_with_scope(run)


def test_a_bias_made_in_inference_mode(no_hidden_errors):
    with torch.inference_mode():
        bias = torch.randn(16)

    def run(scope):
        torch.manual_seed(0)
        x = torch.randn(32, 16, requires_grad=True)
        with scope():
            loss = torch.relu(F.group_norm(x, 2, None, bias)).sum()
        return torch.autograd.grad(loss, [x])

    same_with_scope(run)


def test_a_frozen_bias_that_is_written_to_before_backward():
    norm = nn.GroupNorm(2, 16).requires_grad_(False)
    with Scope() as scope:
        y = Keep.apply(norm(Keep.apply(torch.randn(8, 16, requires_grad=True))))
    assert any(value.is_recipe for value in scope.values())
    with torch.no_grad():
        norm.bias += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_layer_norm_of_another_eps():
    def run(scope):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 8))
        with scope():
            loss = net(torch.randn(32, 16)).square().sum()
            x = F.layer_norm(net[0](torch.randn(32, 16)), (64,), net[1].weight, net[1].bias, 0.1)
            (loss + net[2](x).square().sum()).backward()
        return [each.grad for each in net.parameters()]

    same_with_scope(run)


def test_hooks_of_others_are_not_called():
    calls = []

    def part(x):
        calls.append(x)
        return x.sin().masked_fill(x > 0.5, 0.0)

    def run(scope):
        torch.manual_seed(0)
        x = torch.randn(16, 16, requires_grad=True)
        with scope():
            y = checkpoint(part, x, use_reentrant=False)
            loss = (Keep.apply(y) + torch.tanh(y) + Keep.apply(y.relu())).sum()
        assert len(calls) == 1
        grad = torch.autograd.grad(loss, x)
        calls.clear()
        return grad

    same_with_scope(run)


def test_hooks_that_unpack_once():
    def run(scope):
        torch.manual_seed(0)
        x, stored = torch.randn(16, 16, requires_grad=True), {}

        def pack(tensor):
            stored[len(stored)] = tensor.detach()
            return len(stored) - 1

        with scope():
            y = x * 2
            with torch.autograd.graph.saved_tensors_hooks(pack, stored.pop):
                z = F.dropout(F.batch_norm(y, None, None, training=True), 0.2).masked_fill(x > 1, 0)
            loss = (z.exp() * z.relu()).sum()
        return torch.autograd.grad(loss, x)

    same_with_scope(run)


def test_a_backward_that_writes_to_what_is_saved():
    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return x.mul_(grad)

    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(16, 16))

    def loss(kind):
        x = Keep.apply(weight * 2)
        kept = Keep.apply(x)
        y = F.relu(x)
        return Keep.apply(y).sum() + kind.apply(y).sum() * 3 + Keep.apply(y).sum() + kept.sum()

    class Reads(Writes):
        @staticmethod
        def backward(ctx, grad):
            return ctx.saved_tensors[0] * grad

    (expected,) = torch.autograd.grad(loss(Reads), weight)
    with recompute():
        of_writes = loss(Writes)
    assert_same(torch.autograd.grad(of_writes, weight)[0], expected)


def test_an_operand_that_is_read_twice_is_computed_once():
    x, weight = torch.randn(8, 8, requires_grad=True), nn.Parameter(torch.randn(8, 8))
    with recompute(check=True):
        h = x @ weight
        for _ in range(31):
            h = torch.addcmul(h, h, weight)
        h.relu().sum()


# Verification


def doctor(monkeypatch):
    """A rule whose formula gives something else as soon as the first of a list isn't 0."""
    wrong = [0.0]
    _C.recipes.forget_chosen()
    monkeypatch.setitem(RULES, "SiluBackward0", op(lambda x: F.silu(x) + wrong[0]))
    return wrong


def test_a_wrong_rule_is_not_used(monkeypatch):
    wrong = doctor(monkeypatch)
    wrong[0] = 1e-3

    def run(scope):
        net, x = small_net()
        with scope():
            loss = net(x).square().mean()
        return gradients(net, loss)

    same_with_scope(run)
    assert None in _C.recipes.chosen().values()


def test_check(monkeypatch):
    wrong = doctor(monkeypatch)
    net, x = small_net()
    with recompute():
        expected = gradients(net, net(x).square().mean())
    wrong[0] = 1e-3
    with (
        pytest.raises(RuntimeError, match=r"recompute: SiluBackward0, shape \[2, 8, 6, 6\], torch.float32, saved by Conv2d"),
        recompute(check=True),
    ):
        loss = net(x).square().mean()
    for one, other in zip(gradients(net, loss), expected, strict=True):
        assert_same(one, other)
    wrong[0] = 0
    with recompute(check=True):
        net(x).square().mean().backward()


@pytest.mark.parametrize(("error", "uses"), [(RuntimeError, 1), (torch.OutOfMemoryError, 3)])
def test_a_formula_that_raises_is_tried_once(error, uses, monkeypatch):
    """But one that has found no memory, at each use until there is some."""
    calls = []

    def formula(input):
        calls.append(input)
        raise error("not implemented")

    monkeypatch.setitem(RULES, "NegBackward0", op(formula, operands=(None,)))
    _C.recipes.forget_chosen()
    x = torch.randn(4, requires_grad=True)
    for _ in range(3):
        with recompute():
            loss = Keep.apply(-x).sum()
        loss.backward()
    assert len(calls) == uses
    _C.recipes.forget_chosen()


def test_no_memory_for_a_trial_says_nothing_of_the_formula():
    def formula(*_):
        raise torch.OutOfMemoryError

    candidates = Candidates((formula,), op=lambda input, weight, bias: (input,), closest=lambda input: input)
    with pytest.raises(torch.OutOfMemoryError):
        candidates.choose(torch.randn(4), None, None)


def test_what_cannot_be_derived_is_tried_once(monkeypatch):
    """Of several rules, or several operands, each would try it again, and so would each in front of it."""
    tried = []

    def rule(step):
        tried.append(step.node)
        with contextlib.suppress(Underivable):
            step.operand(0)
        return same, (step.operand(0),), ()

    monkeypatch.setitem(RULES, "NegBackward0", rule)
    x = torch.randn(4, 4, requires_grad=True)
    y = x @ x  # not saved by anybody
    for _ in range(10):
        y = -y
    with recompute():
        Keep.apply(y)
    assert len(tried) == 10


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_a_signal_raises_is_raised(error, monkeypatch):
    def interrupted(step):
        raise error

    monkeypatch.setitem(RULES, "NegBackward0", interrupted)
    x = torch.randn(4, requires_grad=True)
    with pytest.raises(type(error)) as raised, recompute():
        Keep.apply(-x)
        sum(range(100))
    assert raised.value is error
    assert top_hooks() is None


def test_an_argument_that_changes_makes_few_tables():
    tables = len(programs._tables)
    x = torch.randn(64, dtype=torch.bfloat16, requires_grad=True)
    for step in range(2 * programs.MAX_TABLES):

        def run(scope, slope=step / 100):
            with scope():
                y = Keep.apply(F.leaky_relu(x * 2, slope) * 3)
            return [torch.autograd.grad(y.sum(), x)[0]]

        same_with_scope(run)
    assert len(programs._tables) <= tables + programs.MAX_TABLES


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


def test_a_scope_that_fails_to_begin_leaves_no_hook(monkeypatch):
    def fail():
        raise RuntimeError

    monkeypatch.setattr(scope, "sharding", fail)
    with pytest.raises(RuntimeError), recompute():
        pass
    assert top_hooks() is None
    monkeypatch.undo()
    with recompute():
        assert top_hooks() is not None
    assert top_hooks() is None


NORMS = {
    "layer": lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(8 * 81), nn.Unflatten(1, (8, 9, 9))),
    "batch": lambda: nn.BatchNorm2d(8),
    "group": lambda: nn.GroupNorm(2, 8),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True),
}


@pytest.mark.parametrize("first", [0.0, 1.0, math.nan, "rows"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_first_batch_that_proves_nothing(norm, first, dtype, device, deterministic):
    """Of zeros, or of NaN, many formulas give the same."""
    torch.manual_seed(0)
    net = nn.Sequential(NORMS[norm](), nn.ReLU(), nn.Conv2d(8, 4, 1)).to(device, dtype)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    rows = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 8, 9, 9)  # each of one number
    batches = [rows if first == "rows" else torch.full((4, 8, 9, 9), first), *torch.randn(2, 4, 8, 9, 9)]
    _C.recipes.forget_chosen()

    def run(scope):
        result = []
        for batch in batches:
            with scope():
                loss = net(batch.to(device, dtype)).float().square().mean()
            result += torch.autograd.grad(loss, net.parameters())
        return result

    same_with_scope(run)


@pytest.mark.parametrize(
    "net",
    [
        lambda: nn.Sequential(nn.GroupNorm(1, 4), nn.GroupNorm(1, 4)),
        lambda: nn.Sequential(nn.LayerNorm((4, 32, 32)), nn.GroupNorm(1, 4)),
        lambda: nn.BatchNorm2d(4).half(),
    ],
    ids=["group", "layer, group", "batch"],
)
def test_a_first_batch_that_is_centered(net, device, deterministic):
    """As it is behind another normalization: some formulas of the next one agree on it."""
    _C.recipes.forget_chosen()
    norms = net().to(device)
    dtype = next(norms.parameters()).dtype

    def run(scope):
        own, generator, result = copy.deepcopy(norms), torch.Generator().manual_seed(3), []
        gate = torch.ones(2, 4, 32, 32, device=device, dtype=dtype, requires_grad=True)
        for step in range(20):
            x = (torch.randn(gate.shape, generator=generator) + (step > 0)).to(gate).requires_grad_()
            with scope():
                loss = (own(x) * gate).sum()
            result += torch.autograd.grad(loss, [gate])
            with torch.no_grad():
                for parameter in own.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.1)
        return result

    same_with_scope(run)


def test_zeros_prove_no_rule(monkeypatch):
    """Nor does NaN: a wrong one is found out as soon as there are other numbers."""
    monkeypatch.setitem(RULES, "NegBackward0", op(lambda input: input * -1.5, operands=(None,)))
    _C.recipes.forget_chosen()
    w = torch.ones(64, requires_grad=True)
    for x in torch.zeros(64), torch.full((64,), math.nan), torch.randn(64):
        with recompute():
            loss = (-x.clone().requires_grad_() * w).sum()
        (grad,) = torch.autograd.grad(loss, w)
        assert_same(grad, -x)
    _C.recipes.forget_chosen()


@pytest.mark.parametrize("function", [torch.sigmoid, torch.tanh, torch.exp], ids=lambda function: function.__name__)
def test_zeros_at_first_prove_no_function(function):
    """The CPU computes these otherwise in vectors than one by one, so that layouts count that nobody saves."""
    x, w = torch.randn(1001, 64, requires_grad=True), torch.randn(32, requires_grad=True)
    _C.recipes.forget_chosen()

    def run(scope):
        result = []
        for step in range(3):
            with scope():
                h = x * step
                loss = (function(h[:, ::2].contiguous()) * w).square().sum() + h.square().sum()
            result += torch.autograd.grad(loss, [x, w])
        return result

    same_with_scope(run)


def test_complex_numbers_in_a_layout_that_nobody_saves():
    """The CPU multiplies them differently in vectors than one by one."""
    phase = torch.polar(torch.ones(64, 96), torch.randn(64, 96))
    _C.recipes.forget_chosen()

    def run(scope):
        w, gate = (torch.ones(*sizes, dtype=torch.cfloat, requires_grad=True) for sizes in ((96, 64), (64, 96)))
        result = []
        for step in range(3):
            x = torch.randn(64, 96, dtype=torch.cfloat, generator=torch.Generator().manual_seed(step))
            with scope():
                loss = ((w.t().contiguous() * phase) * gate * x).abs().square().mean()
            grads = torch.autograd.grad(loss, [w, gate])
            result += map(torch.view_as_real, grads)
            with torch.no_grad():
                w.sub_(grads[0])
        return result

    same_with_scope(run)


def test_rrelu_in_half_types_multiplies_by_what_it_does_not_save(device):
    batches = [torch.randn(128, 128).sign(), torch.randn(128, 128)]
    _C.recipes.forget_chosen()

    def run(scope):
        torch.manual_seed(0)
        gate, result = torch.ones(128, 128, dtype=torch.bfloat16, device=device, requires_grad=True), []
        for batch in batches:
            with scope():
                loss = (F.rrelu(batch.to(gate).requires_grad_(), training=True) * gate).sum()
            result += torch.autograd.grad(loss, [gate])
        return result

    same_with_scope(run)


@pytest.mark.parametrize("seed", range(4))
def test_a_layout_that_nobody_saves(seed):
    torch.manual_seed(seed)
    conv, norm = nn.Conv2d(3, 13, 3), nn.LayerNorm(13)
    x, w = torch.randn(3, 3, 21, 23), torch.randn(13, requires_grad=True)
    _C.recipes.forget_chosen()

    def run(scope):
        with scope():
            loss = (torch.sigmoid(norm(conv(x).permute(0, 2, 3, 1))) * w).square().sum()
            loss = loss + (torch.sigmoid(conv(x).contiguous(memory_format=torch.channels_last)) * w.view(-1, 1, 1)).sum()
        return torch.autograd.grad(loss, [*conv.parameters(), *norm.parameters(), w])

    same_with_scope(run)


@pytest.mark.parametrize("hooks", [contextlib.nullcontext, copying_hooks])
def test_a_part_in_another_layout(hooks):
    """What is kept of it isn't strided as it was, and so says nothing of how an op has read it."""
    torch.manual_seed(0)
    rows, columns = 64, 513
    eye, w = torch.eye(2 * columns, requires_grad=True), torch.randn(columns, requires_grad=True)
    batches = torch.randn(2, rows, 2 * columns)
    batches[0] = (batches[0] > 0) * 100  # of which any formula makes the same
    _C.recipes.forget_chosen()

    def run(scope):
        result = []
        for batch in batches:
            with hooks(), scope():
                whole = batch @ eye
                part, _ = whole.chunk(2, 1)
                joined = torch.cat([part, torch.tanh(whole)], 1) * w.repeat(3)
                loss = joined.sum() + (torch.sigmoid(part) * w).sum()
            result += torch.autograd.grad(loss, [eye, w])
        return result

    same_with_scope(run)


@pytest.mark.parametrize("hooks", [contextlib.nullcontext, copying_hooks])
def test_a_half_in_another_layout(hooks):
    """The same of what was cast to float32."""
    torch.manual_seed(0)
    lin, w = nn.Linear(16, 2 * 2049).bfloat16(), torch.randn(2, 2049, requires_grad=True)
    batches = torch.randn(40, 2, 16).bfloat16()
    _C.recipes.forget_chosen()

    def run(scope):
        result = []
        for batch in batches:
            with hooks(), scope():
                part, _ = lin(batch).chunk(2, 1)
                loss = (part.float() * w).sum()
                sums = torch.add(part, torch.exp(w.bfloat16()), alpha=0.3)
                loss = loss + (sums * w.bfloat16()).float().sum()
            result += torch.autograd.grad(loss, [*lin.parameters(), w])
        return result

    same_with_scope(run)


def test_a_bias_that_differs_between_steps():
    """That of the second half of the channels is another in each step."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 16, 5, 5, requires_grad=True), torch.randn(2, 8, 1, 1, requires_grad=True)
    _C.recipes.forget_chosen()

    def run(scope):
        result = []
        for step in range(3):
            bias = torch.zeros(16)
            bias[8:] = step
            with scope():
                y, z = F.batch_norm(x, None, None, None, bias, True).chunk(2, 1)
                loss = (torch.relu(y) * w[0]).square().sum() + (torch.tanh(z) * w[1]).square().sum()
            result += torch.autograd.grad(loss, [x, w])
        return result

    same_with_scope(run)


def test_what_an_earlier_scope_computed():
    """With a parameter that the optimizer has written to since."""
    p, q = torch.randn(2, 64, 64).unbind()
    p, q = nn.Parameter(p), nn.Parameter(q)

    def run(scope):
        with torch.no_grad():
            p.fill_(0.5)
        result = []
        for step in range(4):
            with scope():
                if step % 2 == 0:
                    y = p * 2.0
                loss = (y * q).sum()
            result += torch.autograd.grad(loss, [q])
            with torch.no_grad():
                p.add_(1)
        return result

    same_with_scope(run)


def test_what_an_earlier_scope_computed_beside_a_new_reader():
    torch.manual_seed(0)
    w, b = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64))
    x = torch.randn(64, 64, requires_grad=True)

    def run(scope):
        with torch.no_grad():
            b.fill_(1.0)
        with scope():
            y = x * 2 + b
        with torch.no_grad():
            b.add_(10)
        with scope():
            loss = ((x * 3 + b) * w).sum() + (y * w).sum()
        return torch.autograd.grad(loss, [w])

    same_with_scope(run)


def test_a_parameter_that_the_node_of_an_earlier_scope_has_saved():
    norm, linear = nn.LayerNorm(16), nn.Linear(16, 16)
    with recompute():
        y = norm(torch.randn(4, 16, requires_grad=True))
    assert norm.weight._version > 0
    with Scope() as scope:
        output = linear(y)
    assert output.grad_fn and any(value.source == "NativeLayerNormBackward0" and value.is_recipe for value in scope.values())


def test_what_a_failed_attempt_derived_is_not_proven():
    """A cast whose operand doesn't follow is its half copy: the comparison says nothing of what was found on the way."""
    x = torch.randn(16, 16, requires_grad=True).bfloat16()
    _C.recipes.forget_chosen()
    with recompute():
        y = (torch.neg(x) + x @ x).float()
        Keep.apply(y)
    assert torch.neg not in _C.recipes.chosen().values()


def test_trials_tell_formulas_apart_whatever_the_variance():
    layer_norm = norms.LAYER_NORM.formula
    for seed in range(8):
        torch.manual_seed(seed)
        x, w, b = (torch.randn(32, 16) * 1e-2).bfloat16(), torch.ones(16), torch.zeros(16)
        _, mean, rstd = torch.native_layer_norm(x, (16,), w, b, 1e-12)
        assert layer_norm.choose(x, w, b, mean, rstd, (16,)) == (None, None)


@pytest.mark.parametrize("line", ["convert", "recompute"])
def test_a_model_that_keeps_an_output_is_freed(line):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, x):
            self.features = torch.relu(self.norm(self.first(x)))
            return self.last(self.features)

    net = Net()
    if line == "convert":
        convert(net, recompute=True)(torch.randn(4, 8))
    else:
        with recompute(net):
            net(torch.randn(4, 8))
    reference = weakref.ref(net)
    del net
    gc.collect()
    assert reference() is None


def test_check_finds_a_write_that_autograd_does_not_record():
    p, q = (torch.randn(64, requires_grad=True) for _ in range(2))

    def relu_of_sum(is_clamped):
        y = p + q
        with torch.no_grad():
            y.clamp_(-1, 0.5) if is_clamped else None
        return Keep.apply(torch.relu(y))

    with recompute():
        relu_of_sum(is_clamped=False)
    with recompute(check=True):
        relu_of_sum(is_clamped=False)
    with pytest.raises(RuntimeError, match=r"ReluBackward0, shape \[64\]"), recompute(check=True):
        relu_of_sum(is_clamped=True)

    class Net(nn.Module):
        def forward(self):
            return relu_of_sum(is_clamped=True)

    net = nn.Sequential(nn.Sequential(Net()))
    with pytest.raises(RuntimeError, match="saved by Net:"), recompute(check=True):
        net[0][0]()
    with pytest.raises(RuntimeError, match=r"saved by 0\.0 \(Net\):"), recompute(net, check=True):
        net[0][0]()


def test_check_takes_a_nan_for_a_nan():
    x = torch.tensor([0xFFC0 - 2**16, 0x7F81, 0], dtype=torch.int16).view(torch.bfloat16).requires_grad_()
    with recompute(check=True):
        Keep.apply(x.float().flip(0).bfloat16()).sum().backward()


def test_the_hook_never_raises(monkeypatch):
    def fail(step):
        raise ZeroDivisionError

    monkeypatch.setattr(hook.log, "debug", lambda *_, **__: None)
    for name in RULES:
        monkeypatch.setitem(RULES, name, fail)

    def run(scope):
        net, x = small_net()
        with scope():
            loss = net(x).square().mean()
        return gradients(net, loss)

    same_with_scope(run)


def test_arguments(monkeypatch):
    with pytest.raises(TypeError, match=r"recompute: expected a torch.nn.Module, got function"):
        recompute(lambda: None)
    with pytest.raises(TypeError):
        recompute(nn.ReLU(), True)
    monkeypatch.setattr(scope, "IS_AVAILABLE", False)
    with pytest.raises(RuntimeError, match=r"recompute: expected torch 2.11 or newer, got 2"):
        recompute()


# Programs at random

UNARY = [
    F.relu,
    F.silu,
    F.gelu,
    torch.tanh,
    torch.sigmoid,
    torch.neg,
    F.hardswish,
    lambda x: x * 0.5,
    lambda x: x + 1,
    lambda x: x * x,
    lambda x: F.relu6(x.clone(), inplace=True),
    lambda x: x.mul_(1.5),
    lambda x: F.relu(x, inplace=True),
    lambda x: x.transpose(0, 1),
    lambda x: x.view(4, 2, 8).reshape(8, 8).contiguous(),
    lambda x: x.chunk(2, 1)[0].repeat(1, 2),
    lambda x: F.layer_norm(x, (8,)),
    lambda x: x.bfloat16(),
    lambda x: x.float(),
    lambda x: x[:, None].expand(-1, 2, -1)[:, 1],
    lambda x: x.t().clone(),
    lambda x: F.dropout(x, 0.2),
    lambda x: torch.native_dropout(x, 0.2, True)[0],
    lambda x: x.masked_fill(x > 1, 0),
    lambda x: F.threshold(x, 0.1, 7),
    lambda x: x.cumsum(0) * 0.1,
    lambda x: x.softmax(1),
    lambda x: x.detach() * x,
    lambda x: x.roll(1, 0),
    lambda x: x.flip(1),
]
BINARY = [
    torch.add,
    torch.mul,
    torch.sub,
    torch.maximum,
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: torch.cat([a, b], 0)[::2].contiguous(),
    lambda a, b: a.add_(b),
    lambda a, b: torch.lerp(a, b.to(a.dtype), 0.3),
]
NUMBER = st.integers(0, 99)
KINDS = "unary", "unary", "unary", "binary", "matmul", "convolution", "keep"
INSTRUCTION = st.tuples(st.sampled_from(KINDS), NUMBER, NUMBER, NUMBER)


def interpret(program, model, dtype):
    tensors = [Keep.apply(model.a @ model.b).to(dtype)]
    for kind, number, i, j in program:
        x, y = tensors[i % len(tensors)], tensors[j % len(tensors)]
        if kind == "unary":
            result = UNARY[number % len(UNARY)](x)
        elif kind == "binary":
            result = BINARY[number % len(BINARY)](x, y)
        elif kind == "matmul":
            result = (x.float() @ model.b).tanh()
        elif kind == "convolution":
            result = F.conv2d(x.float()[None, None], model.b[:3, :3][None, None], padding=1)[0, 0]
        else:
            result = Keep.apply(x)
        tensors.append(result)
    # All is differentiated: of a branch that isn't, a recipe may keep what the branch saved.
    return sum((each.float() * torch.linspace(0, 1, 8)).sum() for each in tensors)


@settings(max_examples=int(os.environ.get("EXAMPLES", "300")), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(INSTRUCTION, min_size=3, max_size=16),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.sampled_from([0, 200]),  # bytes: tensors of half types are smaller
    st.booleans(),
)
def test_programs(program, dtype, smallest, has_outer_hooks):
    torch.manual_seed(1)
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def run(scope):
        torch.manual_seed(0)
        model.zero_grad()
        with outer if isinstance(scope, Scope) else contextlib.nullcontext(), scope:
            loss = interpret(program, model, dtype)
        kept = scope.bytes(model) if isinstance(scope, Plain) else None
        loss.backward()
        return [loss.detach(), model.a.grad, model.b.grad], kept

    outer = contextlib.nullcontext()
    if has_outer_hooks:
        outer = copying_hooks()
    try:
        expected, _ = run(contextlib.nullcontext())
    except RuntimeError:
        return  # no program, or it writes to what is saved
    _, before = run(Plain())
    _C.recipes.set_smallest(smallest, smallest)
    try:
        found, after = run(Scope())
    finally:
        _C.recipes.set_smallest(0, 0)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    assert has_outer_hooks or after <= before


# On a GPU


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def big_net():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.SiLU(), nn.Conv2d(64, 64, 1), nn.BatchNorm2d(64), nn.ReLU(True)
    return nn.Sequential(*layers, nn.Conv2d(64, 4, 1)).cuda(), torch.randn(16, 3, 32, 32, device="cuda")


@pytest.mark.cuda
def test_cuda_graph_of_a_whole_step(deterministic):
    def run(scope):
        net, x = big_net()
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)

        def step():
            optimizer.zero_grad(set_to_none=False)
            with scope():
                loss = net(x).square().mean()
            loss.backward()
            optimizer.step()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(3):
            graph.replay()
        return [*net.parameters(), *net.buffers()]

    same_with_scope(run)


@pytest.mark.cuda
def test_make_graphed_callables(deterministic):
    def run(scope):
        net, x = big_net()
        x.requires_grad_()

        class Scoped(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = net

            def forward(self, x):
                with scope():
                    return self.net(x)

        graphed = torch.cuda.make_graphed_callables(Scoped().eval(), (x,))
        for _ in range(2):
            graphed(x).square().mean().backward()
        return [parameter.grad for parameter in net.parameters()]

    same_with_scope(run)


@pytest.mark.cuda
def test_side_streams(deterministic):
    def run(scope):
        net, x = big_net()
        side = torch.cuda.Stream()
        for _ in range(5):
            with scope():
                y = net[:2](x)
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    z = net[2:5](y)
                torch.cuda.current_stream().wait_stream(side)
                loss = net[5:](z).square().mean()
            loss.backward()
            del y, z, loss
            torch.randn(16, 64, 32, 32, device="cuda")  # over what was freed
        torch.cuda.synchronize()
        return [parameter.grad for parameter in net.parameters()]

    same_with_scope(run)


@pytest.mark.cuda
def test_grad_scaler(deterministic):
    def run(scope):
        net, x = big_net()
        optimizer, scaler = torch.optim.SGD(net.parameters(), 1e-2), torch.amp.GradScaler("cuda")
        for _ in range(4):
            with torch.autocast("cuda", torch.float16), scope():
                loss = net(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [*net.parameters(), *net.buffers()]

    same_with_scope(run)


@pytest.mark.cuda
def test_memory_is_constant_on_a_gpu():
    gc.collect()  # what other tests have left
    net, x = big_net()
    used = []
    for i in range(300):
        with recompute():
            loss = net(x).square().mean()
        if i % 2:
            loss.backward()
        net.zero_grad()
        del loss
        used.append(torch.cuda.memory_allocated())
    assert used[-1] == used[20]


@pytest.mark.cuda(gpus=2)
def test_two_gpus_in_a_process(deterministic):
    def run(scope):
        net, x = big_net()
        first, second = net[:3], net[3:].to("cuda:1")
        with scope():
            loss = second(first(x).to("cuda:1")).square().mean()
        loss.backward()
        return [parameter.grad for part in (first, second) for parameter in part.parameters()]

    same_with_scope(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_depthwise_convolutions(dtype, device):
    """Recomputed only if they are asked for, and no others."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.ReLU6(), nn.Conv2d(16, 16, 3, padding=1, groups=16)
    net = nn.Sequential(*layers, nn.BatchNorm2d(16), nn.ReLU6(), nn.Conv2d(16, 8, 1)).to(device, dtype)
    images = torch.randn(4, 3, 16, 16, device=device, dtype=dtype)

    def step(**options):
        model = copy.deepcopy(net)
        with recompute(check=True, **options):
            hook = torch._C._autograd._top_saved_tensors_default_hooks(True)[0].__self__
            loss = model(images).float().square().mean()
        sources = {value.source for value in map(unpacked, nodes_of(loss)) if value is not None and value.is_recipe}
        loss.backward()
        assert hook.mismatch is None
        return [parameter.grad for parameter in model.parameters()], sources

    plain, sources = step()
    assert "ConvolutionBackward0" not in sources
    found, sources = step(convolutions=True)
    assert "ConvolutionBackward0" in sources
    assert all(map(torch.equal, plain, found))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("bias", [None, 0.0, 1.0])
def test_depthwise_convolutions_with_a_frozen_bias(bias, device):
    """Which autograd's graph doesn't have; 0 at first it would look like none."""
    _C.recipes.forget_chosen()

    def run(scope):
        torch.manual_seed(0)
        result = []
        for number in (0.0, bias):
            norm, conv = nn.BatchNorm2d(8).to(device), nn.Conv2d(8, 8, 3, groups=8, bias=number is not None).to(device)
            if number is not None:
                nn.init.constant_(conv.bias, number).requires_grad_(False)
            with recompute(convolutions=True) if scope is recompute else scope():
                y = conv(norm(Keep.apply(torch.randn(2, 8, 9, 9, device=device, requires_grad=True))))
                loss = Keep.apply(y.sin()).sum()
            result += torch.autograd.grad(loss, [y, norm.weight])
        return result

    same_with_scope(run)


def nodes_of(tensor):
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            yield node
            nodes += [each for each, _ in node.next_functions if each is not None]


def unpacked(node):
    """What a batch norm has saved of its input."""
    raw = getattr(node, "_raw_saved_input", None)
    return None if raw is None or not hasattr(raw.data, "is_recipe") else raw.data


@pytest.fixture
def with_small_ones_kept():
    _C.recipes.set_smallest(hook.SMALLEST, hook.SMALLEST_COPY_OF_PARAMETER)
    yield
    _C.recipes.set_smallest(0, 0)


@pytest.mark.usefixtures("with_small_ones_kept")
@pytest.mark.parametrize("numel", [hook.SMALLEST // 4 - 1, hook.SMALLEST // 4])
def test_next_to_nothing_is_kept(numel, device):
    x = torch.randn(numel, device=device, requires_grad=True)
    with Scope() as scope:
        y = x.neg()
        Keep.apply(y[:4])  # whose memory is all of it
        Keep.apply(y)
    assert scope.count[True] == (2 if 4 * numel >= hook.SMALLEST else 0)


@pytest.mark.usefixtures("with_small_ones_kept")
@pytest.mark.parametrize("width", [512, 1024])
def test_small_parameters_are_cast_once(width, device):
    layer, x = nn.Linear(width, width, device=device), torch.randn(2, width, device=device, requires_grad=True)
    with Scope() as scope, torch.autocast(device, torch.bfloat16):
        output = layer(x)
    assert output.requires_grad  # and the graph is there
    casts = [value for value in scope.values() if value.is_recipe and value.sizes == [width, width]]
    assert bool(casts) == (2 * width**2 >= hook.SMALLEST_COPY_OF_PARAMETER)


# What the first batch didn't show


class WritesToSaved(torch.autograd.Function):
    """As a kernel that needs no other memory for its gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x.numpy(force=True)[:] *= 2  # unnoticed by autograd
        return x * grad


@pytest.mark.parametrize(
    "copied",
    [
        torch.clone,
        lambda x: x.to(x.dtype, copy=True),
        lambda x: x.clone().view(-1),
        lambda x: x.bfloat16().float().bfloat16().float(),
    ],
)
@pytest.mark.parametrize("of_parameter", [True, False])
def test_what_a_copy_was_made_of_is_not_written_to(copied, of_parameter):
    weight = torch.randn(64, 16).bfloat16().float()

    def run(scope):
        parameter = weight.clone().requires_grad_()
        with scope():
            x = parameter if of_parameter else parameter @ torch.eye(16)
            loss = x.sin().sum() + WritesToSaved.apply(copied(x)).sum()
        loss.backward()
        return parameter.detach(), parameter.grad

    same_with_scope(run)


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


def same_in_each_step(*steps):
    """Each with a function of a batch; the first doesn't tell the rule's formula from another."""

    def run(scope):
        result = []
        for function, x in steps:
            torch.manual_seed(0)
            y = x.clone().requires_grad_()
            with scope():
                loss = Keep.apply(function(y * 1)).sum()
            loss.backward()
            result.append(y.grad)
        return result

    same_with_scope(run)


def test_rrelu_in_training_and_then_not(device):
    x = torch.randn(64, 16, device=device)
    same_in_each_step(*((partial(F.rrelu, training=training), x) for training in (True, False, True)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bound", [0.1, 0.3, -0.7])
def test_threshold_between_two_numbers(dtype, bound, device):
    function = partial(F.threshold, threshold=bound, value=0.0)
    at_bound = torch.tensor([-1.0, bound], dtype=dtype, device=device).repeat_interleave(32)
    same_in_each_step((function, torch.randn(64, dtype=dtype, device=device)), (function, at_bound))


@pytest.mark.parametrize("factor", [3, 41, 47, 64])
def test_upsampling_rounds_as_pytorch(factor, device):
    function = partial(F.interpolate, scale_factor=factor)
    by_channel = torch.randn(1, 4, 1, 1, device=device).expand(2, 4, 3, 3).contiguous()
    same_in_each_step((function, by_channel), (function, torch.randn(2, 4, 3, 3, device=device)))


def test_an_optimizer_that_counts_no_version():
    def run(scope):
        torch.manual_seed(0)
        weight, x = torch.randn(64, 16, requires_grad=True), torch.randn(64, 16, requires_grad=True)
        optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
        with scope():
            y = x.exp() + weight
            (y * y).mean().backward()  # proves the recipe
        with scope():
            y = x.exp() + weight
            first = y.mean()
        first.backward(retain_graph=True)
        optimizer.step()
        with scope():
            second = (y * y).mean()
        second.backward()
        return weight.grad, x.grad

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


INTERMEDIATES = [
    lambda a, b: a * b * torch.ones(1, 3, 1, 1),
    lambda a, b: a.to(torch.float32, memory_format=torch.channels_last) * 2.0,
    lambda a, b: b.to(torch.float64, memory_format=torch.contiguous_format).float(),
    lambda a, b: b.clone(memory_format=torch.contiguous_format),
    lambda a, b: (b * 2.0).contiguous() * 3.0,
    lambda a, b: F.avg_pool2d(b, 3, 1, 1) * 2.0,
    lambda a, b: F.logsigmoid(b) * 2.0,
    lambda a, b: F.group_norm(b, 1),
    lambda a, b: F.batch_norm(b, None, None, training=True),
]


@pytest.mark.parametrize("intermediate", INTERMEDIATES)
@pytest.mark.parametrize("inplace", [False, True])
def test_layouts_of_intermediates(intermediate, inplace):
    """On the CPU the bits of some ops depend on where in memory their operands' elements are."""
    scale = torch.randn(7, requires_grad=True)
    _C.recipes.forget_chosen()

    def run(scope):
        result = []
        for seed in range(12):
            torch.manual_seed(seed)
            a = torch.randn(3, 3, 5, 7, requires_grad=True)
            b = torch.randn(3, 3, 5, 7).contiguous(memory_format=torch.channels_last).requires_grad_()
            with scope():
                x = intermediate(a, b.exp())
                y = F.silu(x, inplace=True) if inplace else torch.sigmoid(x)
                loss = (y * scale).square().sum()
            result += torch.autograd.grad(loss, [scale, b], allow_unused=True)
        return result

    same_with_scope(run)


def test_a_copy_for_a_function_of_ones_own_is_no_larger():
    strides = []

    class Looks(WritesToSaved):
        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            strides.append((x.stride(), x.untyped_storage().nbytes()))
            return grad * x

    weight = torch.randn(64, 16, requires_grad=True)
    for context in contextlib.nullcontext, recompute:
        for view in (lambda x: x[:, ::2], lambda x: x.expand(50, 64, 16)):
            with context():
                loss = Looks.apply(view(weight.clone())).sum()
            loss.backward()
    assert strides[:2] == strides[2:]


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


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float64)]
)
@pytest.mark.parametrize("name", ["add_", "sub_", "mul_", "div_", "addcmul_", "addcdiv_"])
def test_an_op_in_place_with_a_wider_operand(name, dtypes, device):
    """Its result is rounded, which doesn't show as long as it is exact, as with a gate that is 0 or 1 at first."""
    narrow, wide = dtypes
    _C.recipes.forget_chosen()

    def run(scope):
        result = []
        for number in (1.0 if name in ("mul_", "div_") else 0.0, 0.7):
            torch.manual_seed(0)
            x = torch.randn(32, 64, device=device, dtype=narrow, requires_grad=True)
            others = [torch.full((64,), number, device=device, dtype=wide, requires_grad=True)]
            others += [torch.ones_like(others[0])] * name.startswith("addc")
            with scope():
                h = getattr(torch.relu(x) * 2, name)(*others)
                loss = h.to(wide).sin().sum()
            result += torch.autograd.grad(loss, [x, others[0]])
        return result

    same_with_scope(run)


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


class Dense(nn.Module):
    """Each layer reads all that was computed before: a list that it joins, or a tensor that has grown."""

    def __init__(self, grows, layers=6):
        super().__init__()
        self.grows, self.stem = grows, nn.Conv2d(3, 16, 3, padding=1)
        widths = range(16, 16 + 8 * layers, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, 8, 3, padding=1)) for width in widths
        )

    def forward(self, x):
        parts = [self.stem(x)]
        for layer in self.layers:
            joined = parts[0] if self.grows else torch.cat(parts, 1)
            parts = [torch.cat([joined, layer(joined)], 1)] if self.grows else [*parts, layer(joined)]
        return torch.cat(parts, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("grows", [False, True], ids=["list", "tensor"])
def test_dense_blocks_save_each_part_once(grows, layout, dtype, device):
    torch.manual_seed(0)
    images = torch.randn(4, 3, 16, 16, device=device).contiguous(memory_format=layout)
    model = Dense(grows).to(device, memory_format=layout)

    def loss(model):
        with torch.autocast(device, dtype, enabled=dtype is not torch.float32):
            return model(images).float().square().mean()

    before, after, _ = compare(model, loss, steps=3)
    assert after < 0.4 * before


def test_parts_that_were_written_to(device):
    """After cat the output isn't them any more, and before it they are their last version."""
    x = torch.randn(4, 8, 32, device=device, requires_grad=True)

    def run(scope):
        with scope():
            known, part = x.exp(), (x[:, :4] * 2).cumsum(0)  # only the first is saved by its op
            after = torch.cat([known, part], 1)
            with torch.no_grad():
                after[:, -1] = 3
            part = part.exp_()
            loss = Keep.apply(after).sum() + Keep.apply(torch.cat([known, part], 1)).sum() + Keep.apply(part).sum()
        return torch.autograd.grad(loss, x)

    same_with_scope(run)


def test_a_part_that_was_saved_and_written_to(device):
    """What was saved of it is outdated, and isn't read for what is joined then."""
    x = torch.randn(4, 8, 32, device=device, requires_grad=True)

    def run(scope):
        with scope():
            Keep.apply(torch.cat([x.exp(), (x[:, :4] * 2).cumsum(0)], 1))  # which is verified then
            known, part = x.exp(), (x[:, :4] * 2).cumsum(0)  # only the first is saved by its op
            saved = Keep.apply(part)
            with torch.no_grad():
                part.add_(1)
            joined = Keep.apply(torch.cat([known, part], 1))
        del saved  # whose backward would be an error
        return torch.autograd.grad(joined.sum(), x)

    same_with_scope(run)


def test_a_clone_of_what_came_from_a_half_type(device):
    """As group norm makes one under autocast of what is channels-last."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3))
    net = net.to(device, memory_format=torch.channels_last)
    images = torch.randn(4, 3, 16, 16, device=device).contiguous(memory_format=torch.channels_last)
    with torch.autocast(device, torch.bfloat16), Scope() as scope:
        loss = net(images).float().square().mean()
    clones = [value for value in scope.values() if value.is_recipe and value.source == "CloneBackward0"]
    assert [root.held.dtype for value in clones for root in value.roots] == ([torch.bfloat16] if device == "cuda" else [])
    loss.backward()


def test_what_several_ops_compute_of_the_same_is_computed_once(device):
    """As autocast's casts of one tensor for query, key and value."""
    torch.manual_seed(0)
    norm, layers = nn.LayerNorm(64).to(device), nn.ModuleList(nn.Linear(64, 64) for _ in range(3)).to(device)
    x = torch.randn(16, 32, 64, device=device, requires_grad=True)

    def run(scope):
        with torch.autocast(device, torch.bfloat16), scope():
            h = norm(Keep.apply(x).float()).float()
            loss = sum(layer(h).float().square().mean() for layer in layers)
        return torch.autograd.grad(loss, [x, *norm.parameters(), *layers.parameters()])

    same_with_scope(run)
    with torch.autocast(device, torch.bfloat16), Scope() as scope:
        h = norm(Keep.apply(x).float()).float()
        loss = sum(layer(h).float().square().mean() for layer in layers)
    casts = [value.operands[0] for value in scope.values() if value.is_recipe and value.sizes == [512, 64]]
    first, *others = casts
    assert [cast.formula for cast in others] == [same, same] and {cast.operands[0] for cast in others} == {first}
    del loss


def test_the_same_of_what_was_written_to_since(device):
    """Each is its own tensor: a write to one is an error for its saver alone."""
    x = torch.randn(64, 64, device=device, requires_grad=True)

    def run(scope):
        with scope():
            h = Keep.apply(x)
            first, second = h.to(torch.bfloat16), h.to(torch.bfloat16)
            one, other = Keep.apply(first), Keep.apply(second)
            with torch.no_grad():
                first.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(one.sum(), x, retain_graph=True)
        return torch.autograd.grad(other.sum(), x)

    same_with_scope(run)


FUNCTIONS_OF_A_NUMBER = {
    "leaky_relu": lambda x, number: F.leaky_relu(x, number),
    "elu": lambda x, number: F.elu(x, number),
    "softplus": lambda x, number: F.softplus(x, 1 + number),
    "hardtanh": lambda x, number: F.hardtanh(x, -number, number),
    "clamp": lambda x, number: x.clamp(min=number),
    "pow": lambda x, number: x.abs().pow(2 + number),
    "addcmul": lambda x, number: torch.addcmul(x, x, x, value=number),
    "add": lambda x, number: x.add(x, alpha=number),
    "mul": lambda x, number: x * number,
}


@pytest.mark.parametrize("name", FUNCTIONS_OF_A_NUMBER)
def test_what_differs_in_a_number_is_not_the_same(name, device):
    x = torch.randn(128, 64, device=device, requires_grad=True)
    function = FUNCTIONS_OF_A_NUMBER[name]
    for numbers in (0.25, 0.25), (0.25, 0.5), (0.0, -0.0), (1, 1.0):  # an equal pair is verified first

        def run(scope, numbers=numbers):
            with scope():
                h = Keep.apply(x)
                loss = sum(Keep.apply(function(h, number)).sum() for number in numbers)
            return torch.autograd.grad(loss, x)

        same_with_scope(run)


@pytest.mark.parametrize("distance", [1, 100])
def test_what_is_the_same_far_away_is_computed_again(distance):
    """Or it would be held from one to the other."""
    x = torch.randn(64, 64, requires_grad=True)
    with Scope(check=False) as scope:
        h = Keep.apply(x)
        between = Keep.apply(F.silu(h))
        for _ in range(distance):
            between = between + 1
        loss = (between + Keep.apply(F.silu(h))).sum()
    outputs = [value for value in scope.values() if value.source == "SiluBackward0" and value.is_recipe]
    assert [value.formula is same for value in outputs] == [False, distance == 1]
    del loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("strided", ["statistics", "weight"])
def test_batch_norm_of_columns_of_a_table(strided, dtype, device):
    """PyTorch's op on the CPU has other bits then. The first batch, all zeros, shows nothing of it."""
    table = torch.rand(64, 2, dtype=dtype, device=device)
    weight = torch.randn(64, 2, dtype=dtype, device=device)[:, 0] if strided == "weight" else torch.ones_like(table[:, 0])
    weight = nn.Parameter(weight)
    numbers = torch.randn(3, 256, 64, device=device).to(dtype)

    def run(scope):
        mean, var = table.clone().unbind(1) if strided == "statistics" else table.t().clone()
        results = []
        for i in range(3):
            x = (numbers[i] * (i > 0)).requires_grad_()
            with scope():
                if strided == "statistics":
                    Keep.apply(F.batch_norm(x * 1.5, mean.clone(), var.clone(), weight, training=True).sigmoid())
                y = F.batch_norm(x * 1.5, mean, var, weight, training=True)
                loss = Keep.apply(y.sigmoid()).float().square().mean() + (y * y).float().mean()
            results += torch.autograd.grad(loss, [x, weight])
        return results

    same_with_scope(run)
