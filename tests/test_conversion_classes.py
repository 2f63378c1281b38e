"""What a converted module is: of its own class, copied, pickled, compiled, and read again when its code is patched."""

import copy
import copyreg
import functools
import gc
import inspect
import io
import pickle
import subprocess
import sys
import textwrap
import threading
import weakref
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import activations_cuda
import calls
from calls import IMAGES, REACHED, ByAttribute, ByFunctional, ByHelper, Calls, assert_same_step, helper


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
        with pytest.raises(ValueError, match=r"got one with 1 Hardtanh left alone: torch.nn.functional.hardtanh was replaced"):
            activations_cuda.convert(nn.Sequential(*model, nn.ReLU()), classes=nn.Hardtanh)
    with_own = nn.Sequential(nn.Hardtanh(), nn.ReLU())
    with_own[0].forward = torch.relu
    with pytest.raises(ValueError, match=r"got one with 1 Hardtanh left alone: a forward of its own was set"):
        activations_cuda.convert(with_own, classes=nn.Hardtanh)
    assert type(activations_cuda.convert(model, x)[-1]) is activations_cuda.Hardtanh


@pytest.mark.parametrize("recompute", [False, True])
def test_a_forward_that_is_held_after_revert(recompute):
    """As accelerate's wrapper for mixed precision holds it."""
    model, x = ByFunctional(), torch.randn(IMAGES)
    activations_cuda.convert(model, x, recompute=recompute)
    held = model.forward
    activations_cuda.revert(model)
    assert held.__func__ is not type(model).forward
    assert torch.equal(held(x), model(x))


def test_what_is_derived_from_a_converted_class_is_not_reverted():
    """As FSDP2 and parametrizations do."""
    model = activations_cuda.convert(ByFunctional(), example_inputs=torch.randn(IMAGES))
    model.__class__ = type("Derived", (type(model),), {})
    kind = type(model)
    assert type(activations_cuda.revert(model)) is kind


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


@pytest.fixture
def converted():
    model = activations_cuda.convert(ByHelper(), example_inputs=torch.randn(IMAGES))
    assert activations_cuda.converted(model) == {"ByHelper": 1}
    return model


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
            patch.setattr(calls, name, lambda x: x * 0)
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
        monkeypatch.setattr(sys.modules[kind.__module__], name, new, raising=False)
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


def test_signature_of_a_converted_forward():
    model = ByFunctional()
    expected = inspect.getfullargspec(model.forward), inspect.signature(model.forward)
    activations_cuda.convert(model, torch.randn(2, 3, 16, 16), recompute=True)
    assert (inspect.getfullargspec(model.forward), inspect.signature(model.forward)) == expected


class Forward:
    def __call__(self, x, labels=None):
        return F.relu6(x)


@pytest.mark.parametrize(
    "forward",
    [staticmethod(lambda x, labels=None: F.relu6(x)), classmethod(lambda cls, x, labels=None: F.relu6(x)), Forward()],
    ids=["static method", "class method", "object"],
)
def test_signature_of_a_forward_without_self(forward):
    """transformers' Trainer drops columns of a dataset that the signature doesn't name."""
    model = type("Net", (nn.Module,), {"forward": forward})()
    expected = inspect.signature(model.forward)
    assert list(expected.parameters) == ["x", "labels"]
    activations_cuda.convert(model, torch.randn(2, 8, requires_grad=True), recompute=True)
    assert activations_cuda.converted(model) == {"Net": 1}
    assert inspect.signature(model.forward) == expected


@pytest.mark.parametrize("kind", [property, functools.cached_property])
def test_a_forward_that_is_a_property(kind):
    class Net(nn.Module):
        @kind
        def forward(self):
            return F.relu6

    model = Net()
    with pytest.warns(UserWarning, match="called where it can't be replaced"):
        activations_cuda.convert(model, torch.randn(2, 8, requires_grad=True))
    assert type(model) is Net
    with pytest.raises(ValueError, match="expected a method as forward, got Net's, a property"):
        activations_cuda.convert(model, recompute=True)


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
