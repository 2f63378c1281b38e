"""What is written to between the forward and the backward pass: an error, or no matter."""

import contextlib
import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from activations_cuda import _C, recompute
from activations_cuda.recipes.formulas import FORMULAS
from recomputing import Keep, Modifies, Scope, WritesToSaved, assert_same, copying_hooks, same_with_scope, small_net

pytestmark = pytest.mark.usefixtures("no_hidden_errors")


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


def test_the_output_that_was_written_to_is_named():
    x = torch.randn(128, 64, requires_grad=True)
    with recompute():
        _, b = torch.unsafe_chunk(x, 2)
        loss = b.sin().sum()
    with torch.no_grad():
        b.mul_(2)
    with pytest.raises(RuntimeError, match="which is output 1 of UnsafeSplitBackward0, is at version 1; expected version 0"):
        loss.backward()


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


@pytest.mark.parametrize(
    "write",
    [lambda y: y.clamp_(max=1), lambda y: y.detach().mul_(2), lambda y: torch._foreach_mul_([y], 2)],
    ids=["no_grad", "detached", "foreach"],
)
def test_what_reads_a_recipes_tensor_after_it_was_written_to(write):
    """What saved it before is never differentiated, so the write is no error."""

    def run(scope, is_written):
        x = torch.linspace(-1, 1, 64 * 64).view(64, 64).requires_grad_()
        with scope():
            y = x.exp() + 1 * x
            logged = (y * y).mean()
            if is_written:
                with torch.no_grad():
                    write(y)
            loss = (y * 2).square().sum()
        (grad,) = torch.autograd.grad(loss, x)
        return grad, logged.detach()

    run(recompute, is_written=False)  # chooses the recipes
    same_with_scope(partial(run, is_written=True))


@pytest.mark.parametrize("function", [F.relu, lambda x: x.exp() * F.silu(x)], ids=["relu", "product"])
def test_a_graph_that_lives_on_while_leaves_are_written_to(function):
    """By what counts no version, as fused optimizers: its recipes have the value before, and a later graph's the one after."""

    def run(scope):
        torch.manual_seed(0)
        weight, grads = nn.Parameter(torch.randn(64, 128)), []
        optimizer = torch.optim.SGD([weight], 0.5, fused=True)
        for _ in range(3):
            with scope():
                loss = (function(weight) * function(weight)).sum()  # the graph before it is alive until here
            (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
            weight.grad = grad.detach().clone()
            grads.append(weight.grad)
            optimizer.step()
        return grads

    same_with_scope(run)


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


def test_an_optimizers_step_between_two_passes_under_autocast(device):
    """PyTorch saves copies of the weights there; the scope recomputes them."""
    model, x = nn.Linear(1024, 1024, device=device), torch.randn(8, 1024, device=device, requires_grad=True)
    for scope in contextlib.nullcontext, recompute:
        with scope(), torch.autocast(device, torch.bfloat16):
            y = model(x).float()
            first, second = y.square().sum(), y.abs().sum()
        first.backward(retain_graph=True)
        torch.optim.SGD(model.parameters(), 1e-3).step()
        is_error = scope is recompute
        with pytest.raises(RuntimeError, match="modified by an inplace") if is_error else contextlib.nullcontext():
            second.backward()


class FailsOnce(torch.autograd.Function):
    """Its node is not released by the pass that fails."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.fails = True
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if ctx.fails:
            ctx.fails = False
            raise ValueError
        return grad * x


@pytest.mark.parametrize("is_written", [False, True])
def test_what_was_let_go_of_is_still_checked(is_written, device):
    """A recipe that was read holds what it gave, and the tensor that it replaces may be written to later."""
    model, x = nn.Linear(64, 64).to(device, torch.bfloat16), torch.randn(64, 64, device=device, dtype=torch.bfloat16)
    for scope in contextlib.nullcontext, recompute, recompute:
        with scope():
            wide = model(x).float()
            loss = FailsOnce.apply(wide).sum()
        with pytest.raises(ValueError):
            loss.backward()
        if is_written:
            with torch.no_grad():
                wide.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace") if is_written else contextlib.nullcontext():
            loss.backward()
