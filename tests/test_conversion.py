"""convert(model, example_inputs=...): it converts what pays and nothing else, in modules of anybody's."""

import copy
import itertools
import logging
import pickle
import random
import signal
import warnings
from functools import partial
from typing import ClassVar

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import activations_cuda
from activations_cuda import conversion
from activations_cuda.conversion import log
from activations_cuda.memory import saved_bytes
from activations_cuda.survey import Survey
from calls import IMAGES, REACHED, ByFunctional, Calls, assert_same_step, step
from test_memory import measure


@pytest.mark.parametrize("kind", REACHED)
def test_reaches_what_a_module_calls(kind):
    """With the bytes that the report says."""
    model = kind()
    x = torch.randn(IMAGES)
    report = activations_cuda.memory_report(model, x)
    converted = activations_cuda.convert(copy.deepcopy(model), example_inputs=(x,))
    assert sum(activations_cuda.converted(converted).values()) == 1
    assert measure(model, x) == report.before
    assert measure(converted, x) == report.after
    assert report.after < 0.7 * report.before
    assert_same_step(converted, model, x)
    activations_cuda.revert(converted)
    assert type(converted) is kind
    assert measure(converted, x) == report.before
    assert vars(converted).keys() == vars(model).keys()


class Mlp(nn.Module):
    """In bfloat16: two matrix products, the second of which saves what the activation returns."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second = nn.Linear(48, 96), nn.Linear(96, 48)
        self.function = function
        self.bfloat16()

    def forward(self, x):
        return self.second(self.function(self.first(x)))


def swiglu(x):
    return F.silu(x) * x.sin()


def tokens():
    return torch.randn(8, 7, 48).bfloat16()


SMOOTH = {
    "gelu": F.gelu,
    "gelu tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "silu in place": partial(F.silu, inplace=True),
    "hardswish": F.hardswish,
    "mish": F.mish,
    "GELU": nn.GELU(),
    "GELU tanh": nn.GELU("tanh"),
    "SiLU in place": nn.SiLU(inplace=True),
    "Hardswish": nn.Hardswish(),
    "Mish": nn.Mish(),
}


@pytest.mark.parametrize("function", SMOOTH.values(), ids=SMOOTH.keys())
def test_a_smooth_activation_whose_output_is_saved(function):
    model, x = Mlp(function), tokens()
    report = activations_cuda.memory_report(model, x)
    converted = activations_cuda.convert(copy.deepcopy(model), example_inputs=(x,))
    assert sum(activations_cuda.converted(converted).values()) == 1
    assert measure(model, x) == report.before
    assert measure(converted, x) == report.after < report.before
    assert_same_step(converted, model, x)
    assert not activations_cuda.converted(activations_cuda.convert(copy.deepcopy(model)))  # by default


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda t: F.gelu(t) + 1, "another layer saves its input, or no other layer saves its output"),
        (swiglu, "another layer saves its input, or no other layer saves its output"),
        (lambda t: F.silu(t).mul_(2), "its output is written to in place"),
        (lambda t: F.dropout(F.mish(t), 0.1, inplace=True), "its output is written to in place"),
        (
            lambda t: F.hardswish(t.float()).bfloat16(),
            "saves less in bfloat16 and float16 only: call convert under the torch.autocast you train with",
        ),
    ],
    ids=["added", "gated", "scaled", "dropped", "float32"],
)
def test_a_smooth_activation_that_does_not_pay(function, reason):
    model, x = Mlp(function), tokens()
    report = activations_cuda.memory_report(model, x)
    (decision,) = report.decisions
    assert (decision.converted, decision.reason) == (False, reason)
    assert measure(model, x) == report.before == report.after
    activations_cuda.convert(model, example_inputs=(x,))
    assert not activations_cuda.converted(model)
    step(model, x)


@pytest.mark.parametrize(
    "drop",
    [
        nn.Dropout(0.5, inplace=True),
        nn.Dropout1d(0.5, inplace=True),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.5, inplace=True), nn.Unflatten(1, (7, 96))),
    ],
    ids=["Dropout", "Dropout1d", "of a view"],
)
def test_a_dropout_in_place_writes_in_training(drop):
    """Though not in eval mode, in which the model is converted."""
    model, x = Mlp(nn.Sequential(nn.SiLU(), drop)).eval(), tokens()
    activations_cuda.convert(model, example_inputs=(x,))
    step(model.train(), x)


def test_what_it_cannot_reach_is_left_alone():
    """A forward of the instance's own, which calls that of its class by another way."""
    model, x = ByFunctional(), torch.randn(IMAGES)
    forward = model.forward
    model.forward = lambda x: forward(x)
    (decision,) = activations_cuda.memory_report(model, x).decisions
    assert not decision.converted
    assert decision.reason == "called where it can't be replaced"
    with pytest.warns(UserWarning, match="nothing to convert: 1 ByFunctional .relu6. left alone: called where"):
        assert not activations_cuda.converted(activations_cuda.convert(model, example_inputs=(x,)))


def test_a_graph_module_is_left_alone():
    """Its class is made from its graph, whenever it is copied."""
    model, x = torch.fx.symbolic_trace(ByFunctional()), torch.randn(IMAGES)
    assert not activations_cuda.converted(activations_cuda.convert(model, example_inputs=(x,)))
    assert copy.deepcopy(model)(x).shape == model(x).shape


WRAPPERS = {"DataParallel": partial(nn.DataParallel, device_ids=[0]), "compile": partial(torch.compile, backend="eager")}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrapped_models(wrap):
    model, x = ByFunctional(), torch.randn(IMAGES)
    wrapped = wrap(model)
    assert activations_cuda.convert(wrapped, example_inputs=(x,)) is wrapped
    assert activations_cuda.converted(model) == {"ByFunctional": 1}
    x = x.to(model.conv.weight.device)  # where DataParallel has moved it
    assert torch.equal(wrapped(x), activations_cuda.revert(copy.deepcopy(model))(x))


class Random(Calls):
    def act(self, x):
        self.seen.append(x)
        return F.relu6(x) if random.random() < 2 and numpy.random.random() < 2 else x

    def __init__(self):
        super().__init__()
        self.seen = []


def test_random_numbers_and_lists_are_left_alone():
    model, x = Random(), torch.randn(IMAGES)
    states = random.getstate(), torch.get_rng_state(), numpy.random.get_state()
    activations_cuda.convert(model, example_inputs=(x,))
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert all(map(numpy.array_equal, numpy.random.get_state(), states[2]))
    assert model.seen == []


def test_checkpointed_calls_save_nothing_until_backward():
    class Checkpointed(ByFunctional):
        def act(self, x):
            return checkpoint(super().act, x, use_reentrant=False)

    model, x = Checkpointed(), torch.randn(IMAGES)
    report = activations_cuda.memory_report(model, x)
    assert measure(model, x) == report.before == report.after


class Several(nn.Module):
    """Some of its calls pay and some don't, and one module is called twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.last = nn.Linear(64, 64)
        self.shared = nn.ReLU()

    def forward(self, x):
        x = F.relu6(self.norm(self.first(x)))  # whose input nobody else saves
        x = F.relu(self.first(x))  # whose output the next layer saves
        x = self.shared(self.last(x)) + 1
        return self.last(self.shared(self.norm(x)))


def test_each_function_is_decided_on_its_own():
    model, x = Several(), torch.randn(4096, 64)
    decisions = {(d.module, d.function): d for d in activations_cuda.memory_report(model, x).decisions}
    assert {key: d.converted for key, d in decisions.items()} == {
        ("", "relu6"): True,
        ("", "relu"): False,
        ("shared", "relu"): True,
    }
    assert decisions["", "relu"].reason == "another layer saves the same tensor"
    activations_cuda.convert(model, example_inputs=(x,))
    assert repr(model).startswith("Several[activations_cuda.relu6](")
    assert type(model.shared) is activations_cuda.ReLU


def test_only_what_is_asked_for():
    model, x = Several(), torch.randn(4096, 64)
    activations_cuda.convert(model, x, classes=nn.ReLU)
    assert activations_cuda.converted(model) == {"ReLU": 1}
    activations_cuda.convert(model, example_inputs=(x,))  # anew
    assert activations_cuda.converted(model) == {"Several": 1, "ReLU": 1}
    with pytest.raises(
        ValueError, match=r"convert: expected a model with Hardtanh to convert, got one with .*relu.* left alone"
    ):
        activations_cuda.convert(Several(), x, classes=[nn.Hardtanh])
    with pytest.raises(ValueError, match=r"convert: expected classes of torch\.nn among"):
        activations_cuda.convert(Several(), x, classes=[nn.Tanh])
    with pytest.raises(ValueError, match=r"convert: expected a model with Hardtanh to convert"):
        activations_cuda.convert(model, x, classes=[nn.Hardtanh])
    assert activations_cuda.converted(model) == {"Several": 1, "ReLU": 1}  # as before


def test_a_discriminator_is_left_as_it_is():
    """LeakyReLU in place saves what the next convolution saves."""
    layers = (layer for width in (3, 8, 8) for layer in (nn.Conv2d(width, 8, 3), nn.LeakyReLU(0.2, inplace=True)))
    model = nn.Sequential(*layers, nn.Conv2d(8, 1, 3))
    report = activations_cuda.memory_report(model, torch.randn(IMAGES))
    assert report.before == report.after
    assert not activations_cuda.converted(activations_cuda.convert(model, example_inputs=torch.randn(IMAGES)))


class Clipped(nn.Module):
    """As torchaudio's DeepSpeech: hardtanh's input is relu's output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return self.linear(F.hardtanh(F.relu(self.linear(x)), 0.0, 0.5))


def test_calls_that_pay_together_are_converted_together():
    model, x = Clipped(), torch.randn(4096, 64)
    report = activations_cuda.memory_report(model, x)
    assert [d.converted for d in report.decisions] == [True, True]
    assert measure(activations_cuda.convert(model, example_inputs=x), x) == report.after < report.before


class OfNested(nn.Sequential):
    def forward(self, x):
        return super().forward(x).to_padded_tensor(0.0)


def test_nested_tensors_are_left_to_pytorch():
    x = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)])
    model = activations_cuda.convert(OfNested(nn.Linear(8, 8), nn.ReLU()), example_inputs=(x,))
    assert not activations_cuda.converted(model)
    step(model, x)


def test_what_it_depends_on():
    """Autocast and frozen parameters count as they are around the call."""
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Hardtanh(), nn.Conv2d(8, 8, 3)), torch.randn(IMAGES)
    whole = activations_cuda.memory_report(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = activations_cuda.memory_report(model, x)
        assert measure(model, x) == half.before
    assert half.before < whole.before
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    frozen = activations_cuda.memory_report(model, x)
    assert frozen.before == 0
    assert {decision.reason for decision in frozen.decisions} == {"saves nothing for backward"}


def test_says_what_it_did(monkeypatch):
    messages = []
    monkeypatch.setattr(log, "hasHandlers", lambda: True)
    monkeypatch.setattr(log, "info", lambda message, *arguments: messages.append(message % arguments))
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU6(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    activations_cuda.convert(model, example_inputs=torch.randn(99, 8))
    assert messages == ["convert: 1 ReLU6 converted; 1 ReLU left alone: another layer saves the same tensor"]
    messages.clear()
    activations_cuda.convert(nn.Sequential(nn.ReLU6()), classes=[])
    activations_cuda.convert(nn.ReLU6(), recompute=True)
    assert type(activations_cuda.convert(nn.ReLU(), recompute=True)) is nn.ReLU
    assert messages == ["convert: 1 ReLU6 left alone", "convert: 1 ReLU6 converted", "convert: 1 ReLU left alone"]
    messages.clear()
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU6()), nn.Linear(8, 8))
    activations_cuda.convert(model[0], recompute=True)
    activations_cuda.convert(model, torch.randn(9, 8))
    activations_cuda.convert(model, recompute=True)
    whose = "the model's forward runs", "forwards of submodules run", "the model's forward runs"
    assert messages == [f"convert: 1 ReLU6 converted; {each} within recompute()" for each in whose]


def test_a_warning_that_is_an_error_changes_nothing():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    activations_cuda.convert(model, classes=nn.ReLU)
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="nothing to convert"):
        warnings.simplefilter("error")
        activations_cuda.convert(model, torch.randn(9, 8))
    assert activations_cuda.converted(model) == {"ReLU": 1}


@pytest.mark.parametrize("is_converted", [False, True], ids=["", "converted"])
@pytest.mark.parametrize("at", range(4))
def test_an_interrupt_leaves_a_model_as_it_was(at, is_converted, monkeypatch):
    set_class, calls = conversion.set_class, itertools.count()

    def interrupted(module, kind):
        set_class(module, kind)
        if next(calls) == at:
            monkeypatch.undo()
            raise KeyboardInterrupt

    model = nn.Sequential(nn.ReLU6(), nn.Hardtanh(), nn.Hardsigmoid(), nn.Hardshrink())
    other = nn.Sequential(model[0])
    if is_converted:
        activations_cuda.convert(model)
    before = [(module, type(module)) for module in model.modules()]
    monkeypatch.setattr(conversion, "set_class", interrupted)
    with pytest.raises(KeyboardInterrupt):
        activations_cuda.convert(model, recompute=True)
    assert [(module, type(module)) for module in model.modules()] == before
    assert type(other[0]) is nn.ReLU6
    activations_cuda.revert(model)
    assert model[0] is other[0] and activations_cuda.converted(model) == {}


PASSED = []


class InterruptedModule(nn.Module):
    def __init__(self, interrupts):
        super().__init__()
        self.interrupts = interrupts

    def forward(self, x):
        for i in range(self.interrupts):
            signal.raise_signal(signal.SIGINT)
            PASSED.append(i)
        return F.relu6(x)


@pytest.mark.parametrize("interrupts", [1, 2])
def test_an_interrupt_waits_for_the_pass_on_fake_tensors(interrupts):
    """In which it could leave PyTorch's modes on; if it comes twice, it doesn't."""
    model = InterruptedModule(interrupts)
    PASSED.clear()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # where it is ignored, there is nothing to wait for
    try:
        with pytest.raises(KeyboardInterrupt):
            activations_cuda.convert(model, torch.randn(9, 8))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert PASSED == [0]
    assert type(model) is InterruptedModule


class HasOptions(nn.Module):
    def forward(self, x, *, check=True, **others):
        return x * check


def test_options_of_the_scope_are_no_inputs():
    for options in {"check": True}, {"convolutions": True}, {"x": torch.ones(3), "check": True}:
        for function in activations_cuda.convert, activations_cuda.memory_report:
            with pytest.raises(TypeError, match=r"an argument of recompute\(\): pass recompute=activations_cuda"):
                function(nn.ReLU(), recompute=True, **options)
    activations_cuda.convert(HasOptions(), torch.ones(3), check=False, convolutions=True)
    with pytest.raises(TypeError, match="convolutions, an argument of recompute"):
        activations_cuda.convert(HasOptions(), recompute=True, convolutions=True)


def test_a_scope_is_a_bool_or_one():
    for other in "no", 1, None, activations_cuda.recompute:
        for function in activations_cuda.convert, activations_cuda.memory_report:
            with pytest.raises(TypeError, match=f"{function.__name__}: expected recompute to be a bool or a scope"):
                function(nn.Sequential(nn.ReLU()), torch.ones(3), recompute=other)


@pytest.mark.parametrize("level, is_said", [(logging.NOTSET, True), (logging.WARNING, False)])
def test_where_nothing_handles_logs_it_is_printed(level, is_said, monkeypatch, capsys):
    monkeypatch.setattr(log, "hasHandlers", lambda: False)
    monkeypatch.setattr(log, "level", level)
    activations_cuda.convert(nn.ReLU6())
    assert ("activations_cuda.convert: 1 ReLU6" in capsys.readouterr().err) == is_said


@pytest.mark.parametrize("arguments", [{}, {"classes": [nn.ReLU6, nn.ReLU]}, {"recompute": True}], ids=str)
def test_a_second_call_changes_nothing(arguments):
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(inplace=True), nn.ReLU(), nn.Sequential(nn.ReLU6()))
    activations_cuda.convert(model, **arguments)
    kinds = [type(module) for module in model.modules()]
    activations_cuda.convert(model, **arguments)
    assert [type(module) for module in model.modules()] == kinds


def test_heads_on_one_trunk():
    trunk = nn.Sequential(nn.Linear(8, 8), nn.SiLU(inplace=True))
    models = [nn.Sequential(trunk, nn.Linear(8, size)) for size in (1, 4)]
    for model in models:
        activations_cuda.convert(model, recompute=True)
    assert all(activations_cuda.converted(model)["SiLU"] == 1 for model in models)


class Borrows(nn.Module):
    """Calls a function of whoever calls it."""

    def __init__(self, pays):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.pays = pays

    def forward(self, x, act):
        for layer in self.layers:
            x = layer(act(x) + 1 if self.pays else act(x))
        return F.hardtanh(x)


class Lends(nn.Module):
    def __init__(self, pays, pays_itself):
        super().__init__()
        self.linear, self.act, self.borrows = nn.Linear(64, 64), F.relu, Borrows(pays)
        self.pays_itself = pays_itself

    def forward(self, x):
        y = self.act(self.linear(x))
        y = y + 1 if self.pays_itself else self.linear(y)
        return y.sum() + self.borrows(self.linear(x), self.act).mean()


@pytest.mark.parametrize("pays", [False, True])
@pytest.mark.parametrize("pays_itself", [False, True])
def test_a_function_that_is_lent_counts_where_it_is_called(pays, pays_itself):
    expected = {("", "relu"): pays_itself, ("borrows", "relu"): pays, ("borrows", "hardtanh"): True}
    model, x = Lends(pays, pays_itself), torch.randn(512, 64)
    report = activations_cuda.memory_report(model, x)
    assert measure(model, x) == report.before
    assert {(d.module, d.function): d.converted for d in report.decisions} == expected
    assert measure(activations_cuda.convert(model, example_inputs=x), x) == report.after < report.before


@pytest.mark.filterwarnings("error:convert")  # that nothing pays
def test_ours_called_by_name_stay():
    """They are the model's own choice: before is what PyTorch's would save, after what they do."""

    class Own(Calls):
        def act(self, x):
            return activations_cuda.hardsigmoid(activations_cuda.relu6(x), alpha=0.2, beta=0.5)

    model, x = Own(), torch.randn(IMAGES)
    report = activations_cuda.memory_report(model, x)
    assert measure(model, x) == report.after < report.before
    assert type(activations_cuda.convert(model, example_inputs=x)) is Own


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.sampled_from(["relu", "relu6", "leaky", "leaky_", "hardtanh", "linear", "add", "branch", "norm"]),
        min_size=1,
        max_size=7,
    )
)
def test_never_worse_and_as_predicted(layers):
    """Of nets put together at random: what is predicted is what is saved, and no other choice of modules saves less."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            make = {
                "relu": nn.ReLU,
                "relu6": nn.ReLU6,
                "leaky": nn.LeakyReLU,
                "leaky_": partial(nn.LeakyReLU, inplace=True),
                "hardtanh": nn.Hardtanh,
                "linear": partial(nn.Linear, 64, 64),
                "norm": partial(nn.LayerNorm, 64),
            }
            self.layers = nn.ModuleDict({f"{i}_{name}": make[name]() for i, name in enumerate(layers) if name in make})

        def forward(self, x):
            y = x * 1
            for i, name in enumerate(layers):
                if name == "add":
                    y = y + 1
                elif name == "branch":
                    y = y + x * y.clone()
                else:
                    y = self.layers[f"{i}_{name}"](y)
            return y

    model = Net()
    x = torch.randn(64, 64, requires_grad=True)
    survey = Survey(model, (x,), {}, frozenset({"relu", "relu6", "leaky_relu", "hardtanh"}))
    before = measure(model, x)
    least = survey.saved(survey.chosen).total()
    assert survey.saved(frozenset()).total() == before
    assert measure(activations_cuda.convert(copy.deepcopy(model), example_inputs=x), x) == least <= before
    units = {survey._unit(call) for call in survey.calls}
    for size in range(len(units) + 1):
        for others in itertools.combinations(units, size):
            assert survey.saved(set(others)).total() >= least


class NoGlobals(nn.Module):
    """A loop that nobody edits calls it as it is."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x):
        return self.second(F.relu6(F.gelu(self.norm(self.first(x)))))


def test_recompute_in_a_models_forward():
    torch.manual_seed(0)
    model = NoGlobals()
    plain = copy.deepcopy(model)
    x = torch.randn(64, 8)
    before = saved_bytes(plain, x)
    assert activations_cuda.convert(model, x, recompute=True) is model
    assert "activations_cuda.recompute" in repr(model)
    model(x)  # tries the recipes
    count = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: count.append(tensor.nbytes) or tensor, lambda tensor: tensor):
        loss = model(x).square().mean()
    assert sum(count) < 0.8 * before
    loss.backward()
    plain(x).square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for made in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert repr(made) == repr(model) and torch.equal(made(x), plain(x))
    assert activations_cuda.revert(model) is model and type(model) is NoGlobals
    assert list(model.state_dict()) == list(plain.state_dict())


def test_recompute_converts_smooth_activations():
    """All: they save their input then, and in place no copy of it, which costs nothing anywhere."""
    layers = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8), nn.ReLU6(), nn.BatchNorm1d(8), nn.SiLU(True), nn.Linear(8, 8)
    for dtype, kind in (
        (torch.bfloat16, activations_cuda.GELU),
        (torch.float32, activations_cuda.GELU),
        (torch.float64, nn.GELU),
    ):
        model, x = nn.Sequential(*copy.deepcopy(layers)).to(dtype), torch.randn(64, 8, dtype=dtype)
        activations_cuda.convert(model, x, recompute=True)
        assert type(model[1]) is kind and type(model[3]) is activations_cuda.ReLU6
        nodes = []
        model[5].register_forward_hook(lambda module, args, output, nodes=nodes: nodes.append(output.grad_fn.name()))
        model(x)
        assert nodes == ["SiluBackward0" if dtype is torch.float64 else "SmoothBackward"]
        assert type(activations_cuda.convert(nn.Sequential(nn.SiLU()), recompute=True)[0]) is activations_cuda.SiLU


def test_recompute_without_inputs():
    model = activations_cuda.convert(nn.Sequential(nn.Linear(8, 32), nn.ReLU6(), nn.Linear(32, 8)), recompute=True)
    assert type(model[1]) is activations_cuda.ReLU6 and "activations_cuda.recompute" in repr(model)
    activations_cuda.convert(model)
    model.forward = lambda x: x
    with pytest.raises(ValueError, match="expected a model that calls its class's forward"):
        activations_cuda.convert(model, recompute=True)


class CallsWhatIsNotItsOwn(nn.Module):
    """Calls of an activation that no conversion of this module reaches."""

    ways: ClassVar = {
        "in a list": lambda module, y: module.listed[0](y),
        "made there": lambda module, y: nn.ReLU6()(y),
        "of the class": lambda module, y: module.of_class(y),
        "mapped": lambda module, y: torch.vmap(F.relu6)(y),
        "in a hook": lambda module, y: y,
    }
    of_class = nn.Hardtanh()

    def __init__(self, way):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.way = way
        self.listed = [nn.Hardtanh()]
        if way == "in a hook":
            self.register_forward_hook(relu6_of_output)

    def forward(self, x):
        return self.ways[self.way](self, self.norm(x))


def relu6_of_output(module, args, output):
    return F.relu6(output)


@pytest.mark.parametrize("way", CallsWhatIsNotItsOwn.ways)
def test_a_call_that_conversion_does_not_reach(way):
    model, x = CallsWhatIsNotItsOwn(way), torch.randn(1024, 8)
    report = activations_cuda.memory_report(model, x)
    assert report.before == report.after and not any(decision.converted for decision in report.decisions)
    with pytest.warns(UserWarning, match="nothing to convert"):
        activations_cuda.convert(model, x)
    assert not activations_cuda.converted(model)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda net: activations_cuda.convert(net, classes="ReLU6"), ValueError, "expected classes .*, got 'ReLU6'"),
        (lambda net: activations_cuda.convert(net, classes=3), ValueError, "expected classes .*, got 3"),
        (lambda net: activations_cuda.ConvertMode("relu"), ValueError, "ConvertMode: expected classes .*, got 'relu'"),
        (lambda net: activations_cuda.recompute(len), TypeError, r"got builtin_function_or_method: .*@recompute\(\)"),
        (lambda net: activations_cuda.convert(nn.ModuleList([net]), recompute=True), ValueError, "whose class has a forward"),
        (
            lambda net: activations_cuda.convert(torch.fx.symbolic_trace(net), recompute=True),
            ValueError,
            "whose class has a forward, got a torch.fx.GraphModule",
        ),
        (
            lambda net: activations_cuda.hardtanh(torch.ones(2), "a"),
            TypeError,
            "hardtanh: expected a number as parameter, got str",
        ),
        (lambda net: activations_cuda.threshold(torch.ones(2), None, 0), TypeError, "threshold: expected a number .* NoneType"),
    ],
)
def test_errors_say_what_was_expected(call, error, message):
    with pytest.raises(error, match=message):
        call(nn.Sequential(nn.ReLU6()))


def test_no_classes_are_none():
    model = nn.Sequential(nn.ReLU6())
    activations_cuda.convert(model, classes=[])
    assert not activations_cuda.converted(model)


def test_inputs_after_recompute():
    """The survey is one of what is saved in the scope, which stays."""

    class Net(nn.Sequential):
        def forward(self, x):
            return F.hardtanh(super().forward(x))

    model, x = Net(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 8)), torch.randn(2, 8)
    for arguments, classes in ((x,), None), ((), None), ((), nn.SiLU):
        activations_cuda.convert(model, x, recompute=True)
        activations_cuda.convert(model, *arguments, classes=classes)
        assert activations_cuda.converted(model) == {"Net": 1, "SiLU": 1}
        assert str(model).startswith("Net[activations_cuda.hardtanh, activations_cuda.recompute]")


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda net: activations_cuda.convert(net, torch.ones(1), torch.ones(1)), r"too many positional arguments\)$"),
        (
            lambda net: activations_cuda.convert(net, [torch.ones(1), torch.ones(1)]),
            r"\); one list stands for several",
        ),
    ],
)
def test_a_hint_for_one_container_alone(call, message):
    with pytest.raises(TypeError, match=message):
        call(nn.ReLU6())


class Hundredfold(torch.Tensor):
    """Whose relu6 is another function."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.relu6:
            with torch._C.DisableTorchFunctionSubclass():
                return args[0] * 100
        return super().__torch_function__(func, types, args, kwargs)


def test_a_rule_of_a_subclass_is_followed():
    model, x = ByFunctional(), torch.randn(IMAGES)
    expected = model(x.as_subclass(Hundredfold))
    activations_cuda.convert(model, x)
    assert activations_cuda.converted(model)
    assert torch.equal(model(x.as_subclass(Hundredfold)), expected)


def test_an_input_by_another_name():
    with activations_cuda.ConvertMode([nn.ReLU]):
        assert torch.relu(x=torch.tensor(-1.0)) == 0
