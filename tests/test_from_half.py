"""Residual streams in float32 to which a half type is added, as under autocast: what was added is saved in place of every
second sum."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from activations_cuda import _C, memory_report, recompute
from activations_cuda.recipes.rules import RULES, op
from activations_cuda.recipes.verification import is_identical
from recomputing import Keep, Scope, bytes_of, compare, same_with_scope

pytestmark = pytest.mark.usefixtures("no_hidden_errors")

HALF_TYPES = torch.bfloat16, torch.float16
LARGEST = torch.finfo(torch.float32).max
SPECIAL = 0.0, -0.0, math.inf, -math.inf, math.nan, LARGEST, -LARGEST, 1e-40, -1e-40, 1.0, -1.0, 1 / 3, 65504.0, 2.0**-24
WIDTH = 64


def every_number(dtype, device):
    return torch.arange(2**16, dtype=torch.int32, device=device).to(torch.int16).view(dtype)


def addend(x, total, dtype):
    return _C.recipes.addend(_C.recipes.keep(x, None), total, dtype)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("layout", ["dense", "transposed", "of another width"])
def test_what_was_added_is_found(layout, dtype, device):
    """Of every number of the half type, added to numbers next to it, far above and far below it."""
    torch.manual_seed(0)
    added = every_number(dtype, device)
    exponents = torch.linspace(-140, 127, 90, device=device)
    some = torch.cat([torch.tensor(SPECIAL, device=device), torch.randn(90, device=device).sign() * exponents.exp2() * 1.37])
    near = added.float() * torch.randn(24, 1, device=device).mul_(2)  # sums that cancel, too
    x = torch.cat([some[:, None].expand(-1, 2**16), near])
    if layout == "transposed":
        x = x.t().contiguous().t()
    elif layout == "of another width":
        x = x[:, 5:-6]
        added = added[5:-6]
    total = x + added
    found = addend(x, total, dtype)
    assert found.dtype is dtype and found.stride() == total.stride()
    assert is_identical(x + found, total)


class Block(nn.Module):
    def __init__(self, norm, dropout=0.0):
        super().__init__()
        self.norm, self.dropout = norm, nn.Dropout(dropout)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


class Before(Block):
    """As in GPT-2 and ViT, the norm comes first."""

    def forward(self, x):
        return x + self.dropout(self.mlp(self.norm(x)))


class Behind(Block):
    """As in BERT, the norm comes last."""

    def forward(self, x):
        return self.norm(self.dropout(self.mlp(x)) + x)


class Stochastic(Before):
    """Whole samples are dropped, as in Swin."""

    def forward(self, x):
        d = self.mlp(self.norm(x))
        return x + d * torch.empty(len(x), 1, 1, dtype=d.dtype, device=x.device).bernoulli_(0.8).div_(0.8)


class Shifted(Before):
    """What is known is smaller than the sum, as an embedding of positions."""

    def __init__(self, norm):
        super().__init__(norm)
        self.shift = nn.Parameter(torch.randn(1, 24, WIDTH))

    def forward(self, x):
        return self.norm(self.mlp(x) + self.shift)


class RmsNorm(nn.Module):
    """As transformers composes it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


BLOCKS = {
    "norm before": lambda: Before(nn.LayerNorm(WIDTH)),
    "norm behind": lambda: Behind(nn.LayerNorm(WIDTH)),
    "dropout": lambda: Before(nn.LayerNorm(WIDTH), 0.2),
    "dropout, norm behind": lambda: Behind(nn.LayerNorm(WIDTH), 0.2),
    "stochastic depth": lambda: Stochastic(nn.LayerNorm(WIDTH)),
    "rms norm": lambda: Before(RmsNorm()),
    "positions": lambda: Shifted(nn.LayerNorm(WIDTH)),
}


def stream(name, depth=7, device="cpu"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(99, WIDTH), *(BLOCKS[name]() for _ in range(depth))).to(device)


def loss_under(dtype, device):
    tokens = torch.randint(99, (16, 24), device=device)

    def loss_of(model):
        with torch.autocast(device, dtype):
            return Keep.apply(model(tokens)).float().square().mean()

    return loss_of


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_stream(name, dtype, device):
    before, after, _ = compare(stream(name, device=device), loss_under(dtype, device), steps=3)
    assert after < before


def sums_kept(scope):
    """Of all sums, those that are kept in float32; and what was added to the others."""
    values = {id(value): value for value in scope.values() if value.source == "AddBackward0" and value.sizes}.values()
    kept = [value for value in values if not value.is_recipe]
    roots = {id(root): root for value in values for root in value.roots}.values()
    added = [root for root in roots if getattr(root.held, "dtype", None) in HALF_TYPES]
    return len(kept), len(added)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("name", sorted(set(BLOCKS) - {"positions"}))
def test_every_second_sum_is_kept(name, dtype, device):
    model, loss_of = stream(name, device=device), loss_under(dtype, device)
    with Scope() as scope:
        loss = loss_of(model)
    assert sums_kept(scope) == (4, 3)
    loss.backward()


# How many sums of three are kept.
SUMS = {
    "in this order": (lambda x, d: x + d, 0),
    "in the other order": (lambda x, d: d + x, 0),
    "transposed": (lambda x, d: x.transpose(0, 1) + d.transpose(0, 1), 3),  # which nobody else proves
    "scaled": (lambda x, d: torch.add(x, d, alpha=2), 3),
    "difference": (lambda x, d: x - d, 0),  # of another name
    "in float64": (lambda x, d: x.double() + d, 3),
    "in a half type": (lambda x, d: x.bfloat16() + d, 3),
    "in place": (lambda x, d: x.mul(1).add_(d), 3),
    "of one that is broadcast": (lambda x, d: x[:, :1] + d, 3),
    "by one that is broadcast": (lambda x, d: x + d[:, :1], 3),
    "of two layouts": (lambda x, d: x.transpose(1, 2).contiguous().transpose(1, 2) + d, 3),
}


@pytest.mark.parametrize(("add", "expected"), SUMS.values(), ids=SUMS)
def test_sums_of_other_kinds(add, expected, device):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            others = 0.0
            for _ in range(3):
                x = Keep.apply(x).float().reshape(16, 24, WIDTH)
                others = others + Keep.apply(x).sum()
                x = add(x, self.linear(x))
            return Keep.apply(x) * others

    x = torch.randn(16, 24, WIDTH, device=device)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Net()).to(device)

    def loss_of(model):
        with torch.autocast(device, torch.bfloat16):
            return model(x).double().mean()

    compare(net, loss_of, steps=2)
    with Scope() as scope:
        loss = loss_of(net)
    assert sums_kept(scope)[0] == expected and loss.requires_grad


def test_hooks_around_the_scope_get_whole_sums(device):
    """A sum that follows from what they have stays a sum: they would have to give that back in the forward pass."""
    model, loss_of = stream("norm before", device=device), loss_under(torch.bfloat16, device)
    given, back = [], []

    def unpack(tensor):
        back.append(tensor)
        return tensor

    def run(scope):
        for _ in range(2):  # the first finds out which formulas fit
            back.clear()
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: given.append(tensor) or tensor, unpack), scope():
                loss = loss_of(model)
        assert not back
        return torch.autograd.grad(loss, list(model.parameters()))

    same_with_scope(run)
    assert given


def test_sums_that_somebody_holds_stay_as_well(device):
    """E.g. who collects hidden states: beside them, what was added takes memory of its own."""
    model, loss_of = stream("norm before", device=device), loss_under(torch.bfloat16, device)
    sums = []
    for block in model[1:]:
        block.register_forward_hook(lambda module, inputs, output: sums.append(output.detach()))

    def held(scope):
        sums.clear()
        with scope:
            loss = loss_of(model)
        assert loss.requires_grad
        return bytes_of([*scope.tensors(), *sums])

    for _ in range(2):  # the first finds out which formulas fit
        collected = held(Scope())
    saved = bytes_of(sums)
    sums.clear()
    with Scope() as scope:
        loss = loss_of(model)
    sums.clear()
    alone = scope.bytes()
    assert loss.requires_grad and alone + saved // 7 * 3 == collected


def test_passes_that_make_graphs(device):
    """And second derivatives."""

    def run(scope):
        model, loss_of = stream("norm before", depth=4, device=device).float(), loss_under(torch.bfloat16, device)
        with scope():
            loss = loss_of(model)
            grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            sum(grad.float().square().sum() for grad in grads).backward()
        return [parameter.grad for parameter in model.parameters()]

    same_with_scope(run)


def test_several_passes(device):
    def run(scope):
        model, loss_of = stream("dropout", device=device), loss_under(torch.bfloat16, device)
        torch.manual_seed(1)
        with scope():
            loss = loss_of(model)
        passes = [torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for _ in range(2)]
        return [*passes[0], *passes[1]]

    same_with_scope(run)


def test_what_a_sum_was_added_to_may_not_be_written_to(device):
    """The second sum follows from the first."""
    model, loss_of = stream("norm before", depth=2, device=device), loss_under(torch.bfloat16, device)
    sums = []
    model[1].register_forward_hook(lambda module, inputs, output: sums.append(output))
    with recompute():
        loss = loss_of(model)
    sums[0].detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_sum_that_was_written_to_is_kept(device):
    """Since its op, unseen by autograd: what was read before the write doesn't follow from what is saved after it."""
    linear = nn.Linear(64, 64).to(device)

    def run(scope):
        torch.manual_seed(0)
        x = torch.randn(64, 64, device=device, requires_grad=True)
        with torch.autocast(device, torch.bfloat16), scope():
            known = Keep.apply(x).mul(1.0)
            kept = Keep.apply(known)
            total = known + linear(x)
            before = F.relu(total)
            with torch.no_grad():
                total.add_(1)
            loss = (Keep.apply(total) + kept).sum() + Keep.apply(before).sum()
        return torch.autograd.grad(loss, [x, linear.weight])

    same_with_scope(run)
    same_with_scope(run)


def test_an_addend_makes_up_for_no_wrong_formula(monkeypatch, device):
    """It would as long as what is added is next to nothing, as at first in nets that begin as the identity. The formula would
    be taken for right.
    """

    def nearly(input):
        return torch.atan(input) * (1 + 2**-20)

    monkeypatch.setitem(RULES, "AtanBackward0", op(nearly))
    linear, x = nn.Linear(WIDTH, WIDTH).to(device), torch.randn(64, WIDTH, device=device, requires_grad=True)

    def run(scope):
        gradients = []
        for bound in (0.0, 0.0, 1.0):
            torch.manual_seed(0)
            for parameter in linear.parameters():
                nn.init.uniform_(parameter, -bound, bound)
            with torch.autocast(device, torch.bfloat16), scope():
                loss = Keep.apply(torch.atan(Keep.apply(x)) + linear(x)).square().sum()
            gradients += torch.autograd.grad(loss, [x, *linear.parameters()])
        return gradients

    same_with_scope(run)


def test_what_is_known_is_computed_below_autocast(monkeypatch, device):
    under_autocast = []

    def atan(input):
        under_autocast.append(torch.is_autocast_enabled(device))
        return torch.atan(input)

    monkeypatch.setitem(RULES, "AtanBackward0", op(atan))
    linear, x = nn.Linear(WIDTH, WIDTH).to(device), torch.randn(64, WIDTH, device=device, requires_grad=True)

    def run(scope):
        with torch.autocast(device, torch.bfloat16), scope():
            known = torch.atan(Keep.apply(x))
            scaled = Keep.apply(known * 3.0)  # whose recipe proves the formula
            loss = (Keep.apply(known + linear(x)) + scaled).square().sum()
        return torch.autograd.grad(loss, [x, *linear.parameters()])

    for _ in range(2):
        same_with_scope(run)
    with torch.autocast(device, torch.bfloat16), Scope() as scope:
        known = torch.atan(Keep.apply(x))
        loss = Keep.apply(known * 3.0).sum() + Keep.apply(known + linear(x)).sum()
    assert sums_kept(scope)[0] == 0 and loss.requires_grad
    assert under_autocast and not any(under_autocast)


@pytest.mark.parametrize("name", ["norm before", "norm behind", "dropout"])
def test_report(name):
    """On fake tensors, and what the forward pass saves in earnest."""
    model, tokens = stream(name), torch.randint(99, (16, 24))
    with torch.autocast("cpu", torch.bfloat16):
        report = memory_report(model, tokens, recompute=True)
        for _ in range(2):  # the first finds out which formulas fit
            with Scope() as scope:
                output = model(tokens)
    assert output.requires_grad
    assert report.recompute == scope.bytes(model)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("name", ["norm before", "norm behind"])
def test_it_is_not_interpreted(name, dtype):
    model, loss_of = stream(name, device="cuda"), loss_under(dtype, "cuda")
    for _ in range(2):  # the first step tries formulas
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            with recompute():
                loss = loss_of(model)
            loss.backward()
    kernels = [event.name for event in profiler.events() if "run_kernel" in event.name]
    assert kernels and not any("interpreted" in kernel for kernel in kernels)


@pytest.mark.parametrize("retain_graph", [False, True])
def test_what_a_loss_reads_in_float32_is_there_once(retain_graph, device):
    """Where it is computed, the step is often at its peak. But another pass needs the half type again."""
    torch.manual_seed(0)
    model, x = nn.Linear(WIDTH, WIDTH).to(device, torch.bfloat16), torch.randn(64, WIDTH, device=device, dtype=torch.bfloat16)
    for _ in range(2):
        with Scope() as scope:
            loss = model(x).float().square().sum()
        seen = []
        square = loss.grad_fn.next_functions[0][0]
        square.register_hook(lambda *_: seen.append([tensor.dtype for tensor in scope.tensors() if tensor.shape[0] == 64]))  # noqa: B023
        grads = [torch.autograd.grad(loss, model.weight, retain_graph=retain_graph)[0] for _ in range(1 + retain_graph)]
        (expected,) = torch.autograd.grad(model(x).float().square().sum(), model.weight)
        assert all(torch.equal(grad, expected) for grad in grads)
    wide = torch.bfloat16 if retain_graph else torch.float32
    assert seen == [[torch.bfloat16, wide]] * len(grads)
