"""Recipes are verified: a wrong rule isn't used, and a first batch that proves nothing isn't trusted."""

import contextlib
import itertools
import math
import re
import signal
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from activations_cuda import _C, recompute
from activations_cuda.recipes import hook, programs, verification
from activations_cuda.recipes.formulas import same
from activations_cuda.recipes.rules import RULES, op
from activations_cuda.recipes.step import Underivable
from activations_cuda.recipes.verification import Candidates, forget_choices
from recomputing import Keep, Scope, assert_same, copying_hooks, gradients, same_with_scope, small_net, top_hooks

pytestmark = pytest.mark.usefixtures("no_hidden_errors")


def test_first_uses_are_logged(monkeypatch):
    """In one line, and nothing else is."""
    messages = []
    monkeypatch.setattr(hook.log, "info", lambda message, *arguments: messages.append(message % arguments))
    net, x = small_net()
    forget_choices()
    for _ in range(2):
        with recompute():
            loss = net(x).sum()
        loss.backward()
    (message,) = messages
    assert re.fullmatch(r"recompute: verified \d+ recipes at their first use, in \d+\.\d s", message)


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


def test_a_half_is_another_configuration_than_other_parts():
    """A program may read halves in place."""
    x = torch.randn(64, 256, requires_grad=True)

    def verified(start):
        before = len(_C.recipes.chosen())
        with recompute():
            y = torch.relu(x)
            Keep.apply(torch.cat([-y[:, start : start + 128], y[:, :128]], -1))
        return len(_C.recipes.chosen()) - before

    assert verified(64)
    assert not verified(96)
    assert verified(128)


def test_positions_that_change_make_few_configurations():
    x = torch.randn(64, 128, requires_grad=True)
    before = len(_C.recipes.chosen())
    with recompute():
        for shift in range(64):
            Keep.apply(torch.roll(torch.relu(x), shift, 0))
    assert 0 < len(_C.recipes.chosen()) - before <= 2 * 16


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


def test_sums_of_sums():
    """Each of 2 to the power of 30 ways to put them into one program isn't tried."""
    x, k = torch.randn(16, 16, requires_grad=True), torch.ones(16, requires_grad=True)
    with recompute():
        y = x * k
        for _ in range(30):
            y = y + y
        z = y * k
    assert_same(torch.autograd.grad(z.sum(), x)[0], (k * k).detach().expand(16, 16) * 2**30)


def doctor(monkeypatch):
    """A rule whose formula gives something else as soon as the first of a list isn't 0."""
    wrong = [0.0]
    forget_choices()
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


def test_a_step_is_read_while_its_rule_is_asked(monkeypatch):
    steps = []
    monkeypatch.setitem(RULES, "SinBackward0", lambda step: steps.append(step) or (torch.sin, (step.operand(0, "self"),), ()))
    with recompute():
        Keep.apply(torch.randn(64, 64, requires_grad=True).sin())
    with pytest.raises(RuntimeError, match="expected a rule to read its step while it is asked"):
        steps[0].operand(0, "self")


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


class NoMemory(RuntimeError):
    def __str__(self):
        return "DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    ("error", "uses"), [(RuntimeError, 1), (torch.OutOfMemoryError, 3), (RecursionError, 3), (NoMemory, 3)]
)
def test_a_formula_that_raises_is_tried_once(error, uses, monkeypatch):
    """But one that has found no memory or stack, at each use until there is some."""
    calls = []

    def formula(input):
        calls.append(input)
        raise error("not implemented")

    monkeypatch.setitem(RULES, "NegBackward0", op(formula, operands=(None,)))
    forget_choices()
    x = torch.randn(4, requires_grad=True)
    for _ in range(3):
        with recompute():
            loss = Keep.apply(-x).sum()
        loss.backward()
    assert len(calls) == uses
    forget_choices()


def test_no_memory_for_a_trial_says_nothing_of_the_formula():
    def formula(*_):
        raise torch.OutOfMemoryError

    candidates = Candidates((formula,), op=lambda input, weight, bias, statistics: (input,), closest=lambda input: input)
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


def test_an_interrupt_leaves_the_modes_as_they_were():
    """Whatever function it comes in."""
    net, x = small_net()
    before = sys.gettrace()

    def interrupt(frame, event, _):
        nonlocal left
        left -= "recipes" in frame.f_code.co_filename or frame.f_code.co_filename.endswith(("contextlib.py", "grad_mode.py"))
        if left == 0:
            raise KeyboardInterrupt

    for count in itertools.count(1):
        left = count
        forget_choices()
        try:
            with recompute(check=True):
                sys.settrace(interrupt)
                net(x).sum()
                sys.settrace(before)
        except KeyboardInterrupt:
            sys.settrace(before)
        assert torch.is_grad_enabled() and torch._C._is_fwd_grad_enabled() and torch._C._is_torch_function_enabled()
        if left > 0:
            break
    assert count > 10


class Handler:
    def __init__(self, error):
        self.error = error

    def __call__(self, *_):
        raise self.error("time is up")

    def method(self, *_):
        raise self.error("time is up")


def function_of(error):
    def handler(*_):
        raise error("time is up")

    return handler


@pytest.mark.parametrize("error", [TimeoutError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["_tells", "_fits"])
@pytest.mark.parametrize(
    "handler_of",
    [function_of, Handler, lambda error: Handler(error).method, lambda error: partial(function_of(error), None)],
    ids=["function", "callable", "method", "partial"],
)
def test_what_a_handler_raises_while_a_recipe_is_verified(handler_of, place, error, monkeypatch):
    """As it would be raised from anywhere; and it says nothing of the formula."""

    def interrupted(*arguments):
        monkeypatch.undo()
        signal.raise_signal(signal.SIGUSR1)
        return getattr(verification, place)(*arguments)

    net, x = small_net()

    def step():
        with recompute():
            loss = net(x).square().mean()
        return gradients(net, loss)

    forget_choices()
    before = signal.signal(signal.SIGUSR1, handler_of(error))
    try:
        monkeypatch.setattr(verification, place, interrupted)
        with pytest.raises(error, match="time is up"):
            step()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert None not in _C.recipes.chosen().values()
    assert top_hooks() is None
    for one, other in zip(step(), gradients(net, net(x).square().mean()), strict=True):
        assert_same(one, other)


def test_an_error_that_cannot_be_logged(monkeypatch):
    """Not in the stack that is left, for one. The op is done, and so is the graph."""

    def fails(*_):
        raise RecursionError

    monkeypatch.setitem(RULES, "NegBackward0", fails)
    monkeypatch.setattr(hook.log, "debug", fails)
    x = torch.randn(4, requires_grad=True)
    with recompute():
        loss = Keep.apply(-x).sum()
    assert_same(torch.autograd.grad(loss, x)[0], torch.autograd.grad(Keep.apply(-x).sum(), x)[0])


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


def test_zeros_prove_no_rule(monkeypatch):
    """Nor does NaN: a wrong one is found out as soon as there are other numbers."""
    monkeypatch.setitem(RULES, "NegBackward0", op(lambda input: input * -1.5, operands=(None,)))
    forget_choices()
    w = torch.ones(64, requires_grad=True)
    for x in torch.zeros(64), torch.full((64,), math.nan), torch.randn(64):
        with recompute():
            loss = (-x.clone().requires_grad_() * w).sum()
        (grad,) = torch.autograd.grad(loss, w)
        assert_same(grad, -x)
    forget_choices()


@pytest.mark.parametrize("function", [torch.sigmoid, torch.tanh, torch.exp], ids=lambda function: function.__name__)
def test_zeros_at_first_prove_no_function(function):
    """The CPU computes these otherwise in vectors than one by one, so that layouts count that nobody saves."""
    x, w = torch.randn(1001, 64, requires_grad=True), torch.randn(32, requires_grad=True)
    forget_choices()

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
    forget_choices()

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
    forget_choices()

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
    forget_choices()

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
    forget_choices()

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
    forget_choices()

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
    forget_choices()
    with recompute():
        y = (torch.neg(x) + x @ x).float()
        Keep.apply(y)
    assert torch.neg not in _C.recipes.chosen().values()


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


def test_arguments():
    with pytest.raises(TypeError, match=r"recompute: expected a torch.nn.Module, got function"):
        recompute(lambda: None)
    with pytest.raises(TypeError):
        recompute(nn.ReLU(), True)


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
    forget_choices()

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


@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float64)]
)
@pytest.mark.parametrize("name", ["add_", "sub_", "mul_", "div_", "addcmul_", "addcdiv_"])
def test_an_op_in_place_with_a_wider_operand(name, dtypes, device):
    """Its result is rounded, which doesn't show as long as it is exact, as with a gate that is 0 or 1 at first."""
    narrow, wide = dtypes
    forget_choices()

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


def test_numbers_are_rounded_once():
    """An int that a double can't hold."""
    for factor in 3, 2**60 + 2**36 + 1, 2**63:

        def run(scope, factor=factor):
            torch.manual_seed(0)
            a, b, weight = (torch.randn(8, 8, requires_grad=True) for _ in range(3))
            with scope():
                loss = (torch.relu((a + b) * factor) @ weight).sum()
            return torch.autograd.grad(loss, weight)

        same_with_scope(run)


@pytest.mark.cuda
def test_no_formula_writes_a_wider_result_into_its_operand():
    """On the CPU nothing complex is computed again in a layout that isn't known."""
    for has_two_readers in True, False:

        def run(scope, has_two_readers=has_two_readers):
            torch.manual_seed(0)
            a, b, weight = (torch.randn(64, 64, device="cuda", requires_grad=True) for _ in range(3))
            with scope():
                x = a + b
                loss = (x * 1j * weight).abs().sum()
                if has_two_readers:
                    loss = loss + torch.relu(x).square().sum()
            return torch.autograd.grad(loss, (a, b, weight))

        same_with_scope(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("value", [1, 0.3])
def test_addcmul_of_factors_of_two_sizes(value, dtype, device):
    """In either order."""

    def run(scope):
        torch.manual_seed(0)
        sizes = (64, 64), (64, 64), (64, 1), (64, 64)
        addend, factor, column, weight = (torch.randn(size, device=device, dtype=dtype, requires_grad=True) for size in sizes)
        with scope():
            sums = [torch.addcmul(addend, *factors, value=value) for factors in ((factor, column), (column, factor))]
            loss = sum((each * weight).abs().sum() for each in sums)
        return torch.autograd.grad(loss, (addend, factor, column, weight))

    same_with_scope(run)


def test_dropout_with_other_probabilities(device):
    """Whose scales GPUs round twice: to float32, and its reciprocal. native_dropout is what F.dropout calls there."""

    def run(scope, dtype, p):
        torch.manual_seed(0)
        x, weight = (torch.randn(64, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
        with scope():
            loss = (torch.native_dropout(x.exp(), p, True)[0] * weight).sum()
        return torch.autograd.grad(loss, (x, weight))

    for dtype in torch.float32, torch.bfloat16, torch.float64:
        for p in 0.5, 0.1, 0.15, 0.3, 0.45:
            same_with_scope(partial(run, dtype=dtype, p=p))


def test_dropout_of_ones_proves_no_scale(device):
    """They are the scale itself afterwards, in whichever way it is rounded."""

    def run(scope, ones):
        torch.manual_seed(0)
        x, weight = (torch.randn(64, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        with scope():
            h = x.exp() * (1 - ones) + ones
            loss = (torch.native_dropout(h.sqrt(), 0.3, True)[0].float().sin() * weight).sum()
        return torch.autograd.grad(loss, (x, weight))

    forget_choices()
    for ones in True, False:
        same_with_scope(partial(run, ones=ones))


def test_padding_is_the_ops_own(monkeypatch):
    """Whatever somebody puts in place of torch.nn.functional's later."""
    pad = F.pad

    def run(scope):
        torch.manual_seed(0)
        x, weight = torch.randn(2, 3, 4, 4, requires_grad=True), torch.randn(2, 3, 7, 6, requires_grad=True)
        with scope():
            loss = (pad(x.exp(), (2, 0, 1, 2), value=0.5) * weight).sum()
        monkeypatch.setattr(F, "pad", None)
        return torch.autograd.grad(loss, (x, weight))

    same_with_scope(run)
