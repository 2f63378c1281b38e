"""convert(model, example_inputs=...): it converts what pays and nothing else, in modules of anybody's."""

import copy
import copyreg
import gc
import inspect
import io
import itertools
import logging
import pickle
import random
import subprocess
import sys
import textwrap
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque, namedtuple
from functools import cache, lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, Generic, Protocol, TypeVar

import numpy
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import MultivariateNormal
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import hardtanh
from torch.utils.checkpoint import checkpoint

import activations_cuda
from activations_cuda.conversion import log
from activations_cuda.memory import saved_bytes
from activations_cuda.survey import Survey
from family import assert_same_values
from test_memory import measure

IMAGES = 4, 3, 32, 32


def helper(x):
    return hardtanh(x) * 2


def decorator(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def recursive(x, depth):
    return F.relu6(recursive(x, depth - 1)) if depth else x * 1


class Calls(nn.Module):
    """A convolution, a norm, whose output nobody else saves, and a function of them."""

    def __init__(self, function=None):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.function = function

    def forward(self, x):
        return self.act(self.norm(self.conv(x))).mean((2, 3))


class ByFunctional(Calls):
    def act(self, x):
        return F.relu6(x)


class ByLongName(Calls):
    def act(self, x):
        return torch.nn.functional.leaky_relu(x, negative_slope=0.2)


class ByNn(Calls):
    def act(self, x):
        return nn.functional.threshold(x, 0.1, 0.2)


class ByTorch(Calls):
    def act(self, x):
        return torch.hardshrink(x)


class ByName(Calls):
    def act(self, x):
        return hardtanh(x, 0.0, 1.0)


class InPlace(Calls):
    def act(self, x):
        return F.hardtanh_(x)


class ByHelper(Calls):
    def act(self, x):
        return helper(x)


class ByRecursion(Calls):
    def act(self, x):
        return recursive(x, 1)


class ByAttribute(Calls):
    def __init__(self):
        super().__init__(F.hardsigmoid)

    def act(self, x):
        return self.function(x)


class ByPartial(Calls):
    def __init__(self):
        super().__init__(partial(F.leaky_relu, negative_slope=0.3))

    def act(self, x):
        return self.function(x)


class ByStaticMethod(Calls):
    @staticmethod
    def act(x):
        return F.softshrink(x)


class ByClassMethod(Calls):
    @classmethod
    def act(cls, x):
        return F.relu6(x)


class ByClassAttribute(Calls):
    act = staticmethod(F.relu6)


class Decorated(Calls):
    @decorator
    def act(self, x):
        return F.relu6(x)


class Nested(Calls):
    def act(self, x):
        return sum((lambda t: F.relu6(t))(t) for t in (x, x + 1))


class ByDefault(Calls):
    def act(self, x, function=F.relu6):
        return function(x)


class BySuper(ByFunctional):
    def forward(self, x):
        return super().forward(x) + 1


class OfItsBase(ByFunctional):
    def act(self, x):
        return super().act(x)


class OfTwoBases(OfItsBase, BySuper):
    """Methods of three classes, each found by super()."""

    def act(self, x):
        return super().act(F.relu6(x) - 1)


class Directly(Calls):
    """Past the hooks of the module that it calls."""

    def __init__(self):
        super().__init__(nn.ReLU6())

    def act(self, x):
        return self.function.forward(x)


class WithOut(Calls):
    def act(self, x):
        with torch.no_grad():
            torch.threshold(x, 0, 0, out=torch.empty_like(x))
        return torch.threshold(x, 0.1, 0)


class OwnHardtanh(nn.Hardtanh):
    """Whose forward is torch.nn's."""


class CallsHardtanh(nn.Hardtanh):
    def forward(self, x):
        return super().forward(x) + 1


class OwnClass(Calls):
    def __init__(self):
        super().__init__()
        self.act = OwnHardtanh(-0.5, 0.5)


class OwnForward(Calls):
    def __init__(self):
        super().__init__()
        self.act = CallsHardtanh(-0.5, 0.5)


class Relu(Calls):
    """Nobody else saves its output."""

    def act(self, x):
        return F.relu(x, inplace=True) + 1


class ByBuiltinClassAttribute(Calls):
    act = torch.relu


class ByMethod(Calls):
    def act(self, x):
        return x.relu() + 1


class ByNameOfAttribute(Calls):
    """The name of a function is the name of an attribute too."""

    def act(self, x):
        self.hardtanh = 0
        return hardtanh(x) + self.hardtanh


def of_norm(norm, x):
    return F.relu6(norm(x))


class ByHelperOfModule(Calls):
    def forward(self, x):
        return of_norm(self.norm, self.conv(x)).mean((2, 3))


REACHED = [
    ByFunctional,
    ByLongName,
    ByNn,
    ByTorch,
    ByName,
    InPlace,
    ByHelper,
    ByRecursion,
    ByAttribute,
    ByPartial,
    ByStaticMethod,
    ByClassMethod,
    ByClassAttribute,
    ByBuiltinClassAttribute,
    ByHelperOfModule,
    ByMethod,
    ByNameOfAttribute,
    Decorated,
    Nested,
    ByDefault,
    BySuper,
    OfItsBase,
    OfTwoBases,
    Directly,
    WithOut,
    OwnClass,
    OwnForward,
    Relu,
]


def step(model, x):
    model.zero_grad()
    y = model(x)
    y.backward(torch.ones_like(y))
    return y.detach(), *(parameter.grad for parameter in model.parameters())


def assert_same_step(model, other, x):
    for actual, expected in zip(step(model, x), step(other, x), strict=True):
        assert_same_values(actual, expected)


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
            "saves less in bfloat16 and float16 only: train, and call convert, under torch.autocast",
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


class Clashing(Calls):
    """Attributes of a user's that are named as ours might be."""

    names = ("a", "b")

    def __init_subclass__(cls, key, **kwargs):
        raise AssertionError(f"another class was made, with {key}")

    def __init__(self):
        super().__init__(helper)
        self.original = 3

    def act(self, x):
        return F.relu6(self.function(x)) * len(self.names)


def test_attributes_and_hooks_of_a_class_stay_its_own():
    model, x = Clashing(), torch.randn(IMAGES)
    converted = activations_cuda.convert(copy.deepcopy(model), example_inputs=(x,))
    for other in (converted, copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert activations_cuda.converted(other) == {"Clashing": 1}
        assert_same_step(other, model, x)
        assert activations_cuda.revert(other).function is helper
    assert vars(converted).keys() == vars(model).keys()


class Frozen(ByFunctional):
    """No attribute may be assigned any more."""

    def __init__(self):
        super().__init__()
        self.is_frozen = True

    def __setattr__(self, name, value):
        assert "is_frozen" not in vars(self), f"frozen: {name}"
        super().__setattr__(name, value)


class Strict(type):
    """Knows the classes that it makes."""

    made: ClassVar = []

    def __new__(cls, name, bases, members, *, tag):
        return super().__new__(cls, name, bases, members)

    def __init__(cls, name, bases, members, *, tag):
        super().__init__(name, bases, members)
        cls.made.append(tag)


class OfStrict(ByFunctional, metaclass=Strict, tag="mine"):
    pass


class Abstract(ByFunctional, ABC):
    pass


@pytest.mark.parametrize("kind", [Frozen, OfStrict, Abstract])
def test_modules_that_guard_their_class(kind):
    model, x = kind(), torch.randn(IMAGES)
    converted = activations_cuda.convert(copy.deepcopy(model), example_inputs=(x,))
    assert activations_cuda.converted(converted) == {kind.__name__: 1}
    assert not isinstance(model, type(converted))
    assert_same_step(pickle.loads(pickle.dumps(converted)), model, x)
    assert type(activations_cuda.revert(converted)) is kind
    assert Strict.made == ["mine"]


def test_what_is_assigned_after_conversion_stays():
    model, x = ByAttribute(), torch.randn(IMAGES)
    activations_cuda.convert(model, example_inputs=(x,))
    model.function = F.gelu
    assert activations_cuda.revert(model).function is F.gelu
    activations_cuda.revert(type(activations_cuda.convert(ByAttribute(), example_inputs=(x,)))())


def test_a_class_that_is_patched_is_read_again(monkeypatch):
    x = torch.randn(IMAGES)
    activations_cuda.convert(ByFunctional(), example_inputs=(x,))
    monkeypatch.setattr(ByFunctional, "act", lambda self, t: F.relu6(t) * 2)
    model = ByFunctional()
    assert_same_step(activations_cuda.convert(copy.deepcopy(model), example_inputs=(x,)), model, x)


@pytest.mark.parametrize("is_converted_before", [False, True])
def test_a_function_that_is_patched_stays_patched(is_converted_before, monkeypatch):
    original = F.hardtanh
    model, x = nn.Sequential(ByFunctional(), nn.LayerNorm(8), nn.Hardtanh()), torch.randn(IMAGES)
    if is_converted_before:
        activations_cuda.convert(copy.deepcopy(model), x)
    with monkeypatch.context() as patch:
        patch.setattr(F, "hardtanh", lambda t, *args, **kwargs: 2 * original(t, *args, **kwargs))
        for inputs in (x, None):
            converted = activations_cuda.convert(copy.deepcopy(model), example_inputs=inputs)
            assert type(converted[-1]) is nn.Hardtanh
            assert_same_step(converted, model, x)
    assert type(activations_cuda.convert(model, x)[-1]) is activations_cuda.Hardtanh


def test_what_is_derived_from_a_converted_class_is_not_reverted():
    """As FSDP2 and parametrizations do."""
    model = activations_cuda.convert(ByFunctional(), example_inputs=torch.randn(IMAGES))
    model.__class__ = type("Derived", (type(model),), {})
    kind = type(model)
    assert type(activations_cuda.revert(model)) is kind


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


def test_compiled_parts():
    model, x = nn.Sequential(torch.compile(ByFunctional(), backend="eager")), torch.randn(IMAGES)
    expected = model(x)
    activations_cuda.convert(model, example_inputs=(x,))
    assert activations_cuda.converted(model) == {"ByFunctional": 1}
    assert torch.equal(model(x), expected)


class CompiledForward(ByFunctional):
    @torch.compile(backend="eager")
    def forward(self, x):
        return super().forward(x)


def compiled_in_place():
    model = ByFunctional()
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("make", [CompiledForward, compiled_in_place])
def test_models_that_compile_themselves(make):
    model, x = make(), torch.randn(IMAGES)
    expected = step(model, x)
    activations_cuda.convert(model, example_inputs=(x,))
    assert sum(activations_cuda.converted(model).values()) == 1
    for actual, wanted in zip(step(model, x), expected, strict=True):
        torch.testing.assert_close(actual, wanted)


def test_example_inputs_are_arguments():
    with pytest.raises(TypeError, match="expected example inputs to be tensors, a tuple of arguments or a dict, got int"):
        activations_cuda.convert(ByFunctional(), example_inputs=3)
    for classes in (nn.ReLU6, [nn.ReLU6, nn.ReLU]):
        with pytest.raises(TypeError, match="convert: expected example inputs, got a class: name classes by keyword"):
            activations_cuda.convert(ByFunctional(), classes)


@pytest.mark.parametrize("function", [activations_cuda.convert, activations_cuda.memory_report])
def test_inputs_are_given_as_to_the_model_or_in_one(function):
    ids, mask = torch.zeros(8, 16, dtype=torch.long), torch.ones(8, 16)
    for args, kwargs in (
        ((ids, mask), {}),
        (((ids, mask),), {}),
        (([ids],), {"attention_mask": mask}),
        ((ids,), {"attention_mask": mask}),
        (({"input_ids": ids, "attention_mask": mask},), {}),
        ((), {"example_inputs": (ids, mask)}),
        ((), {"input_ids": ids, "attention_mask": mask}),
    ):
        result = function(WithKeywords(), *args, **kwargs)
        if function is activations_cuda.convert:
            assert activations_cuda.converted(result) == {"ReLU6": 1}
        else:
            assert result.after < result.before


def test_checkpointed_calls_save_nothing_until_backward():
    class Checkpointed(ByFunctional):
        def act(self, x):
            return checkpoint(super().act, x, use_reentrant=False)

    model, x = Checkpointed(), torch.randn(IMAGES)
    report = activations_cuda.memory_report(model, x)
    assert measure(model, x) == report.before == report.after


@pytest.fixture
def converted():
    model = activations_cuda.convert(ByHelper(), example_inputs=torch.randn(IMAGES))
    assert activations_cuda.converted(model) == {"ByHelper": 1}
    return model


class WithoutOurClasses(pickle.Pickler):
    """As cloudpickle's, it is asked about each class first."""

    def reducer_override(self, value):
        assert not (isinstance(value, type) and hasattr(value, "_fastact_original"))
        return NotImplemented


def pickled_by_value(model):
    buffer = io.BytesIO()
    WithoutOurClasses(buffer).dump(model)
    return pickle.loads(buffer.getvalue())


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), pickled_by_value, saved],
    ids=["copy", "deep", "pickle", "by value", "save"],
)
def test_a_converted_module_is_a_module(duplicate, converted):
    model, x = duplicate(converted), torch.randn(IMAGES)
    assert type(model) is type(converted)
    assert isinstance(model, ByHelper)
    assert type(model).__name__ == "ByHelper"
    assert repr(model).startswith("ByHelper[activations_cuda.hardtanh](")
    assert model.state_dict().keys() == ByHelper().state_dict().keys()
    assert_same_step(model, converted, x)
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    model(x)
    assert calls == [1]
    assert type(activations_cuda.revert(model)) is ByHelper


def test_a_converted_module_loads_elsewhere(converted, tmp_path):
    """In a process that has converted nothing yet."""
    torch.save(converted, tmp_path / "model.pt")
    program = """
        import sys, torch, activations_cuda
        model = torch.load(sys.argv[1], weights_only=False)
        assert activations_cuda.converted(model) == {"ByHelper": 1}
        model(torch.randn(4, 3, 32, 32)).sum().backward()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "model.pt")]
    run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


class Registered(nn.Module):
    """Pickled by a function that is registered for its class."""

    def __init__(self):
        super().__init__()
        self.layer, self.lock = nn.Linear(8, 8), threading.Lock()

    def forward(self, x):
        return torch.cat([F.relu6(self.layer(x)), x])


def made_registered(state):
    made = Registered()
    made.load_state_dict(state)
    return made


def test_a_registered_reducer(monkeypatch):
    monkeypatch.setitem(copyreg.dispatch_table, Registered, lambda each: (made_registered, (each.state_dict(),)))
    model, x = Registered(), torch.randn(4, 8)
    activations_cuda.convert(model, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert activations_cuda.converted(other) == activations_cuda.converted(model) != {}
        assert torch.equal(other(x), model(x))


def test_a_converted_module_of_a_local_class_is_pickled_by_value():
    cloudpickle = pytest.importorskip("cloudpickle")

    class Local(ByFunctional):
        def act(self, x):
            return F.relu6(super().act(x) - 1)

    model, x = Local(), torch.randn(IMAGES)
    converted = activations_cuda.convert(copy.deepcopy(model), example_inputs=(x,))
    loaded = cloudpickle.loads(cloudpickle.dumps(converted))
    assert activations_cuda.converted(loaded) == {"Local": 1}
    assert_same_step(loaded, model, x)
    assert type(activations_cuda.revert(loaded)) is Local


class Reduced(ByFunctional):
    def __reduce__(self):
        return type(self), (), vars(self)


def test_a_converted_module_with_a_reduce_of_its_own():
    x = torch.randn(IMAGES)
    converted = activations_cuda.convert(Reduced(), example_inputs=x)
    for duplicate in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        model = duplicate(converted)
        assert type(model) is type(converted)
        assert_same_step(model, converted, x)


@pytest.mark.parametrize("kind", REACHED)
def test_converted_modules_compile(kind):
    model, x = kind(), torch.randn(IMAGES)
    activations_cuda.convert(model, example_inputs=(x,))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


def test_globals_stay_live(converted, monkeypatch):
    """A name that a module looks up is the module's own, though it be assigned later."""
    for name in ("helper", "hardtanh"):
        with monkeypatch.context() as patch:
            patch.setitem(globals(), name, lambda x: x * 0)
            assert not converted(torch.randn(IMAGES)).any()


class ByLaterHelper(Calls):
    def forward(self, x):
        return super().forward(x) if x.numel() else x

    def act(self, x):
        return later_helper(x)  # noqa: F821


def test_a_global_that_is_assigned_anew_is_read_again(monkeypatch):
    x = torch.randn(IMAGES)
    activations_cuda.convert(ByHelper(), example_inputs=(x,))
    assert not activations_cuda.converted(activations_cuda.convert(ByLaterHelper(), example_inputs=(torch.randn(0),)))
    for kind, name, new in (
        (ByHelper, "helper", lambda x: F.relu6(x) * 3),
        (ByHelper, "hardtanh", F.hardshrink),
        (ByLaterHelper, "later_helper", F.relu6),
    ):
        monkeypatch.setitem(globals(), name, new)
        model = kind()
        other = activations_cuda.convert(copy.deepcopy(model), example_inputs=(x,))
        assert activations_cuda.converted(other) == {kind.__name__: 1}
        assert_same_step(other, model, x)


def test_a_closure_that_is_assigned_anew_is_read_again():
    function, x = F.relu6, torch.randn(IMAGES)

    class OfClosure(Calls):
        def act(self, x):
            return function(x)

    converted = OfClosure()
    for function in (F.relu6, F.hardtanh, torch.tanh):
        model = OfClosure()
        model.load_state_dict(converted.state_dict())
        activations_cuda.convert(converted, example_inputs=(x,))
        assert activations_cuda.converted(converted).total() == (function is not torch.tanh)
        assert_same_step(converted, model, x)


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


class WithKeywords(nn.Module):
    """Takes and returns dicts, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 64)
        self.norm = nn.LayerNorm(64)
        self.act = nn.ReLU6()
        self.unused = nn.Hardtanh()

    def forward(self, input_ids, attention_mask=None, scale=1.0):
        y = self.act(self.norm(self.embed(input_ids))) * scale
        return {"logits": y if attention_mask is None else y * attention_mask[..., None]}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_keyword_inputs(device):
    with torch.device(device):
        model = WithKeywords()
        inputs = {"input_ids": torch.zeros(8, 16, dtype=torch.long), "attention_mask": torch.ones(8, 16)}
    report = activations_cuda.memory_report(model, **inputs)
    activations_cuda.convert(model, example_inputs=inputs)
    assert activations_cuda.converted(model) == {"ReLU6": 1}
    assert {d.module: d.reason for d in report.decisions}["unused"] == "not called"
    assert report.after < report.before


class OnValues(Calls):
    def forward(self, x):
        if x.sum() > 1e9:
            return x
        self.seen = x
        return super().forward(x)

    def act(self, x):
        return F.relu6(x)


def test_models_whose_forward_depends_on_values():
    model, x = OnValues(), torch.randn(IMAGES)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    activations_cuda.convert(model, example_inputs=(x,))
    assert activations_cuda.converted(model) == {"OnValues": 1}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert not hasattr(model, "seen")
    with pytest.raises(
        RuntimeError, match=r"depends on the values of its tensors .*: expected a model and example inputs with values"
    ):
        activations_cuda.convert(model, example_inputs=(x.to("meta"),))


class Gain(nn.Parameter):
    pass


class Writes(OnValues):
    """To its input, its own parameters and their gradients."""

    def __init__(self):
        super().__init__()
        self.conv.weight = Gain(self.conv.weight)
        self.conv.weight.gain = 2
        self.positions = None

    def forward(self, x):
        assert type(self.conv.weight) is Gain
        if self.positions is None:
            self.positions = torch.arange(x.shape[-1], device=x.device)
        super().forward(x + self.positions).sum().backward()
        with torch.no_grad():
            self.conv.weight.mul_(self.conv.weight.gain)
            x.mul_(2)
        return super().forward(x)


@pytest.mark.parametrize("is_inference", [False, True])
def test_what_a_forward_writes_to_is_a_copy(is_inference):
    model, x = Writes(), torch.randn(IMAGES)
    before = copy.deepcopy(model), x.clone()
    with torch.inference_mode(is_inference):
        activations_cuda.convert(model, example_inputs=(x,))
    assert activations_cuda.converted(model) == {"Writes": 1}
    assert all(map(torch.equal, model.parameters(), before[0].parameters()))
    assert torch.equal(x, before[1])
    assert model.conv.weight.grad is None


class Leaves(Calls):
    """Leaves behind what it computed."""

    of_all: ClassVar = {}

    def __init__(self):
        super().__init__()
        self.helper = SimpleNamespace(scale=None)
        self.lists = {"x": []}
        self.normal = MultivariateNormal(torch.zeros(2), precision_matrix=torch.eye(2))

    def act(self, x):
        assert self.normal.covariance_matrix.shape == (2, 2)  # it keeps it
        self.last = self.helper.scale = self.helper.shift = self.of_all["x"] = x
        self.norm.cache = {"x": x}
        self.lists["x"].append(x)
        return F.relu6(x)


def test_nothing_fake_is_left_behind():
    model = activations_cuda.convert(Leaves(), example_inputs=torch.randn(IMAGES))
    assert not hasattr(model, "last")
    assert not hasattr(model.norm, "cache")
    assert vars(model.helper) == {"scale": None}
    assert model.lists == {"x": []}
    assert "covariance_matrix" not in vars(model.normal)
    assert not model.of_all
    assert activations_cuda.converted(model) == {"Leaves": 1}


class Store(list):
    """With a method that does more than a list's, and an attribute."""

    def extend(self, values):
        raise AssertionError(f"more of them: {values}")


class State:
    """As transformers' DynamicCache, or torch_geometric's Batch."""

    def __init__(self, x):
        self.x = x
        self.inner = SimpleNamespace(last=None)
        self.ordered = OrderedDict(first=1, second=2)
        self.counts = Counter(calls=0)
        self.recent, self.seen, self.pair = deque([1, 2], maxlen=2), {0}, ([],)
        self.store = Store()
        self.myself = self

    def contents(self):
        containers = self.ordered, self.counts, self.recent, self.seen, self.pair[0], self.store
        return vars(self).copy(), vars(self.store).copy(), self.inner.last, *map(list, containers), dict(self.counts)


class Keeps(Calls):
    """Leaves what it computes in its input, and in an object in a list of its own."""

    def __init__(self, depends_on_values):
        super().__init__()
        self.states = [State(None)]
        self.depends_on_values = depends_on_values

    def forward(self, state):
        if self.depends_on_values:
            assert state.x.sum() < 1e9
            state.x.mul_(2)
        y = super().forward(state.x)
        for each in (state, *self.states):
            each.x = each.y = each.inner.last = each.store.last = y
            each.ordered.move_to_end("first")
            each.counts["calls"] += 1
            each.recent.append(each.x)
            each.seen.add(each.x)
            each.pair[0].append(each.x)
            each.store.append(each.x)
        return y

    def act(self, x):
        return F.relu6(x)


@pytest.mark.parametrize("depends_on_values", [False, True])
def test_nothing_is_left_in_objects(depends_on_values):
    model, x = Keeps(depends_on_values), torch.randn(IMAGES)
    state, values = State(x), x.clone()
    before = [each.contents() for each in (state, *model.states)]
    activations_cuda.convert(model, example_inputs=(state,))
    assert activations_cuda.converted(model) == {"Keeps": 1}
    assert [each.contents() for each in (state, *model.states)] == before
    assert torch.equal(x, values)


class OnItsResult(Calls):
    def act(self, x):
        x = F.relu6(F.gelu(x))
        return x if x.max() > 0 else -x


def fake_tensors():
    gc.collect()
    return sum(type(each) is FakeTensor for each in gc.get_objects())


class Watched(nn.Sequential):
    """Its class remembers weakly what its modules compute."""

    seen: ClassVar = []

    def forward(self, x):
        for module in self:
            x = module(x)
            Watched.seen.append(StorageWeakRef(x.untyped_storage()))
        return x


@pytest.mark.parametrize("kind", [ByFunctional, OnItsResult])
@pytest.mark.parametrize("function", [activations_cuda.memory_report, saved_bytes])
def test_what_was_computed_is_freed(kind, function):
    """The sigmoid's output too, which its own backward saves."""
    Watched.seen.clear()
    model, before = Watched(kind(), nn.Sigmoid()), fake_tensors()
    function(model, torch.randn(IMAGES))
    assert fake_tensors() <= before
    assert Watched.seen
    assert all(output.expired() for output in Watched.seen)


def test_a_class_is_freed():
    def convert_one_of_a_local_class():
        held = torch.zeros(1)

        class Local(ByHelper):
            def act(self, x):
                return F.relu6(super().act(x)) + held

        activations_cuda.convert(Local(), example_inputs=torch.randn(IMAGES))
        return weakref.ref(held)

    held = convert_one_of_a_local_class()
    gc.collect()
    assert held() is None


@lru_cache(maxsize=8)
def positions(width, device):
    return torch.arange(width, device=device)


@cache
def scales(width, device):
    return SimpleNamespace(scales=(positions(width, device) / width, width))


@cache
def contains_itself():
    result = []
    result.append(result)
    return result


class Cached(Calls):
    """Adds what is computed once for each width, as the position embeddings of transformers' DETR and DINOv3 do."""

    def act(self, x):
        return F.relu6(x + self.offset(x.shape[-1], x.device))

    @lru_cache  # noqa: B019
    def offset(self, width, device):
        assert contains_itself()
        return scales(width, device).scales[0]


class CachedOnValues(Cached):
    def act(self, x):
        x = super().act(x)
        return x if x.max() > 0 else -x


@pytest.mark.parametrize("kind", [Cached, CachedOnValues])
def test_nothing_fake_is_cached(kind):
    for function in positions, scales, Cached.offset:
        function.cache_clear()
    model = kind()
    x = torch.randn(IMAGES)
    other = copy.deepcopy(model)
    activations_cuda.memory_report(model, x)
    assert activations_cuda.converted(activations_cuda.convert(model, example_inputs=x)) == {kind.__name__: 1}
    assert_same_step(model, other, x)
    assert type(positions(x.shape[-1], x.device)) is torch.Tensor


def test_an_error_leaves_the_model_as_it_was():
    model = activations_cuda.convert(ByFunctional(), example_inputs=torch.randn(IMAGES))
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(RuntimeError):
        activations_cuda.convert(model, example_inputs=torch.randn(4, 4, 32, 32))
    assert [type(module) for module in model.modules()] == kinds


def test_says_what_it_did(monkeypatch):
    messages = []
    monkeypatch.setattr(log, "hasHandlers", lambda: True)
    monkeypatch.setattr(log, "info", lambda message, *arguments: messages.append(message % arguments))
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU6(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    activations_cuda.convert(model, example_inputs=torch.randn(99, 8))
    assert messages == ["convert: 1 ReLU6 converted; 1 ReLU left alone: another layer saves the same tensor"]
    messages.clear()
    activations_cuda.convert(nn.Linear(8, 8), example_inputs=torch.randn(9, 8))
    assert messages == ["convert: no activation of the family"]


@pytest.mark.parametrize("level, is_said", [(logging.NOTSET, True), (logging.WARNING, False)])
def test_where_nothing_handles_logs_it_is_printed(level, is_said, monkeypatch, capsys):
    monkeypatch.setattr(log, "hasHandlers", lambda: False)
    monkeypatch.setattr(log, "level", level)
    activations_cuda.convert(nn.ReLU6())
    assert ("convert: 1 ReLU6" in capsys.readouterr().err) == is_said


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


def test_recompute_exports_compiles_and_saves_as_before(tmp_path):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(inplace=True), nn.Conv2d(8, 4, 1))
    model, x = activations_cuda.convert(copy.deepcopy(plain), recompute=True), torch.randn(2, 3, 8, 8)
    outputs = [torch.compile(each, backend="aot_eager")(x) for each in (plain, model)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    model.eval(), plain.eval()
    targets = [
        {node.target for node in torch.export.export(each, (x,)).graph.nodes if node.op == "call_function"}
        for each in (plain, model)
    ]
    assert targets[0] == targets[1]
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    plain.load_state_dict(torch.load(tmp_path / "weights.pt"))
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert repr(loaded) == repr(model) and torch.equal(loaded(x), plain(x))


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


class WithForward(ABC):
    @abstractmethod
    def forward(self, x):
        raise NotImplementedError


class Protocolled(Protocol):
    def forward(self, x): ...


@pytest.mark.parametrize("base", [WithForward, Generic[TypeVar("T")], Protocolled], ids=["ABC", "Generic", "Protocol"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_class_whose_first_base_is_no_module(base, recompute):
    class First(base, nn.Module):
        def __init__(self):
            nn.Module.__init__(self)
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            return F.relu6(self.norm(x))

    x = torch.randn(64, 8)
    model = First()
    activations_cuda.convert(model, x, recompute=recompute)
    assert activations_cuda.converted(model) == {"First": 1}
    assert_same_step(model, activations_cuda.revert(copy.deepcopy(model)), x)
    assert type(activations_cuda.revert(model)) is First


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


def test_a_list_that_a_derived_class_drops():
    class Base(nn.Module):
        keys: ClassVar = ["a"]

        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            y = self.norm(x)
            return F.relu6(y) if self.keys is None else F.relu(y)

    class Derived(Base):
        keys = None

    report = activations_cuda.memory_report(Derived(), torch.randn(64, 8))
    assert [decision.function for decision in report.decisions] == ["relu6"]


def test_a_parameters_own_attributes_are_there():
    class Asks(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return F.relu6(y) if getattr(self.weight, "is_six", False) else y.relu()

    model = Asks(8, 8)
    model.weight.is_six = True
    assert [each.function for each in activations_cuda.memory_report(model, torch.randn(64, 8)).decisions] == ["relu6"]


def test_a_named_tuple_is_one_argument():
    Batch = namedtuple("Batch", "x")

    class Takes(ByFunctional):
        def forward(self, batch, flag=None):
            return super().forward(batch.x)

    assert activations_cuda.memory_report(Takes(), Batch(torch.randn(2, 3, 16, 16))).before > 0


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


def test_signature_of_a_converted_forward():
    model = ByFunctional()
    expected = inspect.getfullargspec(model.forward), inspect.signature(model.forward)
    activations_cuda.convert(model, torch.randn(2, 3, 16, 16), recompute=True)
    assert (inspect.getfullargspec(model.forward), inspect.signature(model.forward)) == expected


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


def test_a_metaclass_whose_classes_are_frozen():
    class Frozen(type):
        def __setattr__(cls, name, value):
            raise AttributeError(f"{cls.__name__} is frozen")

    class Net(nn.Module, metaclass=Frozen):
        def forward(self, x):
            return F.relu6(x)

    model = activations_cuda.convert(Net(), torch.randn(2, 8, requires_grad=True))
    assert activations_cuda.converted(model) == {"Net": 1}
    assert type(activations_cuda.revert(model)) is Net


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
