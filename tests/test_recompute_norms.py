"""Norms in the scope: frozen biases, evaluation mode, how their formulas are compared."""

import copy
import math
import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import activations_cuda
from activations_cuda import _C, recompute
from activations_cuda.recipes import hook, norms, verification
from activations_cuda.recipes.verification import Candidates, forget_choices
from recomputing import Keep, Plain, Scope, same_with_scope
from recomputing import step as run_step

pytestmark = pytest.mark.usefixtures("no_hidden_errors")


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
    forget_choices()
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
    forget_choices()
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
    """Many formulas give the same for zeros, or for NaN."""
    torch.manual_seed(0)
    net = nn.Sequential(NORMS[norm](), nn.ReLU(), nn.Conv2d(8, 4, 1)).to(device, dtype)
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    rows = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 8, 9, 9)  # each of one number
    batches = [rows if first == "rows" else torch.full((4, 8, 9, 9), first), *torch.randn(2, 4, 8, 9, 9)]
    forget_choices()

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
    forget_choices()
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


LAYOUTS = {"transposed": lambda x: x.transpose(1, 2), "every second": lambda x: x.transpose(1, 2)[:, ::2]}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_batch_norm_of_a_half_type_with_wide_statistics(dtype, layout, training, device):
    """Without weight and bias, by whose dtype an op would know. The first batch, all zeros, shows nothing of it."""
    torch.manual_seed(0)
    weight = torch.randn(32, device=device, dtype=dtype, requires_grad=True)
    batches = [torch.zeros(32, 64, 32, device=device, dtype=dtype), *torch.randn(2, 32, 64, 32, device=device).to(dtype)]
    forget_choices()

    def run(scope):
        torch.manual_seed(1)
        result = []
        for batch in batches:
            x = LAYOUTS[layout](batch * weight)
            norm = nn.BatchNorm1d(x.shape[1], affine=False).to(device).train(training)
            nn.init.normal_(norm.running_mean)
            factor = torch.ones_like(x, requires_grad=True)
            with scope():
                product = norm(LAYOUTS[layout](batch * weight)) * factor
                loss = product.tanh().float().sum()
            if scope is recompute:
                assert product.grad_fn._raw_saved_self.data.is_recipe
            result += torch.autograd.grad(loss, [weight, factor])
        return result

    same_with_scope(run)


@pytest.fixture
def trials(monkeypatch):
    """The norms for which a formula was chosen by trials."""
    made, choose = [], Candidates.choose
    monkeypatch.setattr(Candidates, "choose", lambda self, *operands: made.append(self) or choose(self, *operands))
    forget_choices()
    yield made
    forget_choices()


@pytest.mark.parametrize("behind", ["residual", "bias"])
def test_a_weight_of_zero_proves_no_norm(behind, trials):
    """As residual blocks begin: any formula gives the bias."""
    torch.manual_seed(0)
    norm, first, last = nn.BatchNorm2d(8), nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)
    nn.init.zeros_(norm.weight)
    nn.init.normal_(norm.bias)

    def step():
        x = first(torch.randn(4, 3, 8, 8))
        with recompute():
            z = norm(x)
            loss = last(torch.relu(z + x) if behind == "residual" else z).square().mean()
        loss.backward()
        return norms.batch_norm_affine in _C.recipes.chosen().values()

    assert not step() and not step()
    nn.init.normal_(norm.weight)
    assert step()
    assert len(trials) == 1


def test_a_norm_that_nothing_proves_is_taken_on_trial(trials, monkeypatch):
    monkeypatch.setattr(verification, "MAX_UNPROVEN", 3)
    norm, last = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
    nn.init.zeros_(norm.weight)
    are_recipes = []
    for _ in range(6):
        with recompute():
            loss = last(norm(torch.randn(4, 8, 8, 8, requires_grad=True)))
        are_recipes.append(loss.grad_fn._raw_saved_input.data.is_recipe)
    assert are_recipes == [True] * 6
    assert len(trials) == 1 and norms.batch_norm_affine in _C.recipes.chosen().values()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_group_norm_of_single_elements(dtype, device):
    """Whose variance is 0: with some eps all formulas give the bias."""
    torch.manual_seed(0)
    x = torch.randn(2048, 2, 1, device=device).to(dtype)
    scale, weight, bias = ((torch.randn(2, device=device) * by).to(dtype).requires_grad_() for by in (1, 1, 1e-4))
    factor = torch.randn_like(x, requires_grad=True)
    forget_choices()

    def run(scope):
        result = []
        for eps in 1e-6, 1.0, 1e-5, 1e-3:
            with scope():
                loss = (F.group_norm(x * scale.view(2, 1), 2, weight, bias, eps) * factor).float().sum()
            result += torch.autograd.grad(loss, [factor])
        return result

    same_with_scope(run)


def test_a_bias_that_differs_between_steps():
    """That of the second half of the channels is another in each step."""
    torch.manual_seed(0)
    x, w = torch.randn(2, 16, 5, 5, requires_grad=True), torch.randn(2, 8, 1, 1, requires_grad=True)
    forget_choices()

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


def test_trials_tell_formulas_apart_whatever_the_variance():
    layer_norm = norms.LAYER_NORM.formula
    for seed in range(8):
        torch.manual_seed(seed)
        x, w, b = (torch.randn(32, 16) * 1e-2).bfloat16(), torch.ones(16), torch.zeros(16)
        _, mean, rstd = torch.native_layer_norm(x, (16,), w, b, 1e-12)
        assert layer_norm.choose(x, w, b, mean, rstd, (16,)) == (None, None)


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


UNDER_VMAP = {  # whose rules call the op without weight and bias, and apply those themselves
    "group norm": (lambda x, w, b: F.group_norm(x, 4, w, b), (2, 2, 32, 8, 8), torch.bfloat16),
    "batch norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (1, 2, 32, 16, 16), torch.float32),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (32,), w, b), (2, 16, 32), torch.float32),
}


def test_a_frozen_bias_beside_statistics_under_vmap(device):
    forget_choices()

    def run(scope):
        torch.manual_seed(0)
        w, result = torch.ones(32, device=device, requires_grad=True), []
        for number in (0.0, 3.0):
            x = torch.randn(2, 32, 16, 16, device=device, requires_grad=True)
            b, statistics = torch.full((32,), number, device=device), torch.ones(1, 32, device=device)
            with scope():
                y = torch.vmap(lambda mean, var, x=x, b=b: F.batch_norm(x, mean, var, w, b, True))(statistics - 1, statistics)
                loss = y.square().sum()
            result += torch.autograd.grad(loss, [x, w])
        return result

    same_with_scope(run)


@pytest.mark.parametrize("batched", ["input", "all"])
@pytest.mark.parametrize("norm", UNDER_VMAP)
def test_a_frozen_bias_under_vmap(norm, batched, device):
    forget_choices()
    function, shape, dtype = UNDER_VMAP[norm]
    dims = (0, 0, 0) if batched == "all" else (0, None, None)
    vectors = (shape[0], 32) if batched == "all" else (32,)

    def run(scope):
        torch.manual_seed(0)
        w, result = torch.ones(vectors, dtype=dtype, device=device, requires_grad=True), []
        for number in (0.0, 3.0):
            x, b = torch.randn(shape, device=device).to(dtype), torch.full(vectors, number, dtype=dtype, device=device)
            with scope():
                loss = torch.vmap(function, dims)(x.requires_grad_(), w, b).float().square().sum()
            result += torch.autograd.grad(loss, [x, w])
        return result

    same_with_scope(run)


def test_a_function_that_was_replaced_before_the_import():
    """Its variables are its own, whatever their names."""
    program = """if True:
        import contextlib, torch, torch.nn.functional as F
        F.group_norm = lambda input, num_groups, weight=None, bias=None, eps=1e-5: torch.group_norm(
            input, num_groups, weight, bias * 0.5, eps
        )
        import activations_cuda

        activations_cuda._C.recipes.set_smallest(0, 0)

        def run(scope):
            norm = torch.nn.GroupNorm(2, 8)
            norm.bias.requires_grad_(False)
            for step in range(3):
                torch.manual_seed(step)
                x, weight = (torch.randn(8, 8, 4, 4, requires_grad=True) for _ in range(2))
                norm.bias.fill_(step // 2)  # a zero is the same as its half
                with scope():
                    loss = (norm(x.exp()) * weight).sum()
                yield from torch.autograd.grad(loss, (x, weight))

        for one, other in zip(run(contextlib.nullcontext), run(activations_cuda.recompute)):
            assert torch.equal(one, other)
    """
    subprocess.run([sys.executable, "-c", program], check=True)
