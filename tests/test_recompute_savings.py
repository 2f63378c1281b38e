"""What the scope saves: each value once, in its narrowest form, and no longer than PyTorch would."""

import contextlib
import gc
import itertools
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from activations_cuda import _C, convert, recompute
from activations_cuda.recipes import hook
from activations_cuda.recipes.formulas import same
from activations_cuda.recipes.rules import RULES
from recomputing import Keep, Modifies, Plain, Scope, WritesToSaved, assert_same, bytes_of, compare, same_with_scope, small_net

pytestmark = pytest.mark.usefixtures("no_hidden_errors")


HEADS = {
    "in place": lambda x: F.relu(F.group_norm(x, 4), inplace=True),
    "pooled": lambda x: F.max_pool2d(torch.tanh(x), 2),
    "by a mask": lambda x: F.dropout(x, 0.5),
}


# After the scope indices are saved in 8 bytes, too.
@pytest.mark.usefixtures("deterministic")
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


def test_masks_that_somebody_holds_are_kept():
    x = torch.randn(16, 16, requires_grad=True)
    held = torch.rand(16, 16) > 0.5
    large = torch.rand(64, 16) > 0.5
    for mask, bytes in ((held, 32), (held, 256), (large[:16], 1024)):
        with Scope() as scope:
            y = torch.where(mask, x, x * 2)
        assert scope.bytes() == bytes
        y.sum().backward()


def test_an_operand_that_is_read_twice_is_computed_once():
    x, weight = torch.randn(8, 8, requires_grad=True), nn.Parameter(torch.randn(8, 8))
    with recompute(check=True):
        h = x @ weight
        for _ in range(31):
            h = torch.addcmul(h, h, weight)
        h.relu().sum()


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


def test_a_stream_that_nobody_has_saved_is_searched_once(monkeypatch):
    """Not to its beginning at each of its readers, as where autocast's convolutions read a residual stream."""
    sums = []

    def add(step):
        sums.append(step.node)
        return torch.add, (step.operand(0), step.operand(1)), ()

    monkeypatch.setitem(RULES, "AddBackward0", add)
    layers = [nn.Linear(64, 64, bias=False).bfloat16() for _ in range(12)]
    with recompute():
        stream = F.linear(torch.randn(64, 64), torch.randn(64, 64, requires_grad=True))
        for layer in layers:
            stream = stream + layer(stream.bfloat16())
    assert 0 < len(sums) <= len(layers)


def _saves_a_recipe(output):
    (saved,) = output.grad_fn._raw_saved_tensors
    return saved.data.is_recipe


def test_a_linear_layer_without_bias_calls_no_python():
    """Its output is a view of a matrix product, as are grouped queries' keys that were expanded, for which there is a rule."""
    linear, x, called, before = nn.Linear(64, 64, bias=False), torch.randn(8, 32, 64), [], sys.getprofile()
    with recompute():
        y = linear(x)
        sys.setprofile(lambda frame, event, argument: called.append(Path(frame.f_code.co_filename)))
        try:
            z = F.silu(y)
        finally:
            sys.setprofile(before)
    assert z.requires_grad and y.grad_fn.name() == "UnsafeViewBackward0"
    assert called and Path(hook.__file__).parent not in {name.parent for name in called}


def test_what_does_not_follow_yet_may_follow_later():
    a, b = (F.linear(torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)) for _ in range(2))
    with recompute():
        total = a + b
        before = Keep.apply(total.relu())
        kept = Keep.apply(a), Keep.apply(b)
        after = Keep.apply(total.sin())
    assert [_saves_a_recipe(each) for each in (before, *kept, after)] == [False, False, False, True]


def test_what_follows_from_what_was_written_to_may_follow_later():
    with recompute():
        y = F.linear(torch.randn(64, 64), torch.randn(64, 64, requires_grad=True))
        kept = Keep.apply(y)
        with torch.no_grad():
            y.clamp_(-1, 1)
        x = -y
        assert not _saves_a_recipe(Keep.apply(x * 3))
        again = Keep.apply(y)
        assert _saves_a_recipe(Keep.apply(x * 5))
    del kept, again


def test_what_follows_once_strides_are_known_may_follow_later():
    """With an alpha, a sum's bits on the CPU depend on them."""
    with recompute():
        a, b = (F.linear(torch.randn(64, 64), torch.randn(64, 64, requires_grad=True)) for _ in range(2))
        kept, double = [Keep.apply(a), Keep.apply(b)], a * 2
        x = torch.add(double, b, alpha=0.3)
        assert not _saves_a_recipe(Keep.apply(x * 3))
        kept.append(Keep.apply(double))
        assert _saves_a_recipe(Keep.apply(x * 5))


def test_what_another_thread_saves_may_be_followed():
    a = F.linear(torch.randn(64, 64), torch.randn(64, 64, requires_grad=True))
    x, kept = -a, []

    def save():
        with recompute():
            kept.append(Keep.apply(a))

    with recompute():
        assert not _saves_a_recipe(Keep.apply(x * 3))
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
        assert _saves_a_recipe(Keep.apply(x * 5))


def test_pooling_beside_what_does_not_follow_saves_short_indices(device):
    conv = nn.Conv2d(16, 16, 1).to(device)

    def run(scope):
        torch.manual_seed(0)
        x = torch.randn(4, 16, 64, 64, device=device, requires_grad=True)
        with scope:
            s = conv(torch.randn(4, 16, 32, 32, device=device))
            loss = Keep.apply(-s).sum() + Keep.apply((F.max_pool2d(x * 2, 2) + s) * 3).sum()
        dtypes = {tensor.dtype for tensor in scope.tensors()}
        return dtypes, torch.autograd.grad(loss, [x, conv.weight])

    (plain, expected), (within, found) = run(Plain()), run(Scope())
    assert torch.int64 in plain and torch.int64 not in within
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other)


def test_what_is_too_deep_for_one_reader_may_do_for_another():
    with recompute():
        steps = [F.silu(torch.randn(64, 64, requires_grad=True))]
        for _ in range(40):
            steps.append(-steps[-1])
        assert not _saves_a_recipe(Keep.apply(steps[-1]))
        assert _saves_a_recipe(Keep.apply(steps[16]))


def test_what_does_not_follow_by_some_rules_may_by_others():
    conv = nn.Conv2d(16, 16, 3, groups=16)
    with recompute():
        h = conv(torch.randn(4, 16, 16, 16))
        assert not _saves_a_recipe(Keep.apply(h * 3))
        with recompute(convolutions=True):
            assert _saves_a_recipe(Keep.apply(-h))


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


@pytest.mark.parametrize("function", [torch.addcmul, torch.addcdiv], ids=["addcmul", "addcdiv"])
def test_tensors_that_need_no_gradient_are_not_saved(function):
    """By the op, which the rule then doesn't have: no error that is hidden."""
    x, one, two = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64), torch.rand(64, 64)

    def run(scope):
        with scope():
            loss = Keep.apply(function(x * 2, one, two)).sin().sum()
        return torch.autograd.grad(loss, x)

    same_with_scope(run)


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


@pytest.mark.parametrize(("dtype", "wide"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
def test_an_empty_part_widens_what_is_joined(dtype, wide):
    """As a cache does that begins empty. The other part, which two nodes save, is narrower."""

    def run(scope):
        torch.manual_seed(0)
        a, b = (torch.randn(8, 16, dtype=dtype, requires_grad=True) for _ in range(2))
        with scope():
            part = a + b
            loss = (torch.cat([torch.empty(0, 16, dtype=wide), part]).sin() * 3).sum() + torch.relu(part).square().sum()
        return torch.autograd.grad(loss, (a, b))

    same_with_scope(run)


def test_a_value_is_small():
    """Up to 512 bytes Python has arenas; more is a call of malloc for each saved tensor."""
    assert _C.recipes.Value.__basicsize__ <= 512


@pytest.mark.parametrize("sum_of", [torch.add, torch.sub, lambda x, y: x + y + 1, lambda x, y: (x + y).relu() * y])
@pytest.mark.parametrize("is_differentiated", [False, True])
def test_a_deleted_model_is_freed(sum_of, is_differentiated, device):
    """Although the search for a recipe of the sum has ended at layers, of which nodes may be remembered within a scope."""
    model = nn.ModuleList(nn.Conv2d(3, 4, 3, padding=1) for _ in range(2)).append(nn.Conv2d(4, 4, 1)).to(device)
    x = torch.randn(2, 3, 8, 8, device=device)
    alive = [weakref.ref(parameter) for parameter in model.parameters()]
    with recompute():
        loss = model[2](sum_of(model[0](x), model[1](x))).sum()
    if is_differentiated:
        loss.backward()
    del model, loss
    gc.collect()
    assert not any(reference() is not None for reference in alive)
