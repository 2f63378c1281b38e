"""What convert() and memory_report() run: a copy of the model on the inputs as given, of which nothing is left."""

import copy
import gc
import warnings
from collections import Counter, OrderedDict, deque, namedtuple
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import MultivariateNormal
from torch.multiprocessing.reductions import StorageWeakRef

import activations_cuda
from activations_cuda.memory import saved_bytes
from calls import IMAGES, ByFunctional, Calls, assert_same_step, step


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


class Masked(nn.Module):
    """Whose masks are where a copy doesn't go."""

    masks: ClassVar = {}

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        if len(x) not in Masked.masks:
            Masked.masks[len(x)] = x.new_ones(len(x), len(x)).tril()
        return F.hardtanh(Masked.masks[len(x)] @ self.linear(x)) * 2


def test_what_is_cached_out_of_reach_raises():
    """Training on, nothing would be learned."""
    Masked.masks.clear()
    model, x = Masked(), torch.randn(4, 8)
    activations_cuda.convert(model, x)
    with pytest.raises(Exception, match="convert all Tensors to FakeTensors"):
        model(x)
    with pytest.raises(RuntimeError, match="finds a fake tensor in a cache, where an earlier pass of a copy has left it"):
        activations_cuda.convert(model, x)
    Masked.masks.clear()
    assert_same_step(model, activations_cuda.revert(copy.deepcopy(model)), x)


TRANSFORMED = {
    "silu": F.silu,
    "in place": lambda x: F.silu(x.clone(), inplace=True),
    "dropout": lambda x: F.dropout(F.mish(x), 0.0, inplace=True),
    "relu6": F.relu6,
}


@pytest.mark.parametrize("function", TRANSFORMED.values(), ids=TRANSFORMED)
def test_activations_under_vmap(function):
    class Mapped(nn.Sequential):
        def forward(self, x):
            return self[1](torch.vmap(function, randomness="different")(self[0](x)))

    model, x = Mapped(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        report = activations_cuda.memory_report(model, x)
        assert report.before == report.after == saved_bytes(model, x)


def test_an_error_leaves_the_model_as_it_was():
    model = activations_cuda.convert(ByFunctional(), example_inputs=torch.randn(IMAGES))
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(RuntimeError):
        activations_cuda.convert(model, example_inputs=torch.randn(4, 4, 32, 32))
    assert [type(module) for module in model.modules()] == kinds


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


@pytest.mark.parametrize("function", [activations_cuda.convert, activations_cuda.memory_report, "the scope's report"])
@pytest.mark.parametrize("name", ["hardshrink", "softshrink", "hardtanh", "leaky_relu", "relu6", "silu"])
@pytest.mark.parametrize("way", ["by default", "by keyword", "in place", "in place by keyword"])
def test_ops_are_called_in_any_way(way, name, function):
    op = getattr(torch.ops.fastact, name + ("_" if "in place" in way else ""))

    class Calls(nn.Module):
        def forward(self, x):
            y = x * 2
            return op(self=y) if "keyword" in way else op(y)

    model, x = Calls(), torch.randn(IMAGES, requires_grad=True)
    if callable(function):
        function(model, x)
    else:
        activations_cuda.memory_report(model, x, recompute=True)
    assert torch.equal(model(x), getattr(activations_cuda, name)(x * 2))


class Wrapped:
    """A tensor within, as in PyTorch's notes on extending it."""

    def __init__(self, tensor):
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return cls(function(*(each.tensor if isinstance(each, cls) else each for each in args), **kwargs or {}))


@torch.library.custom_op("test_conversion_survey::dropout_", mutates_args=("x",))
def scale_(p: float, x: torch.Tensor) -> None:
    x.mul_(1 - p)


def dropped(x):
    mask = torch.ones(x.shape)
    torch.ops.test_conversion_survey.dropout_(0.5, mask)
    torch.ops.test_conversion_survey.dropout_(p=0.5, x=mask)
    return F.relu6(x) * mask


@pytest.mark.parametrize(
    "activation", [lambda x: F.relu6(Wrapped(x)).tensor, lambda x: torch.relu(x=x), dropped], ids=["wrapped", "x", "dropout"]
)
def test_calls_of_other_things(activation):
    """Which PyTorch takes."""

    class Calls(nn.Module):
        def forward(self, x):
            return activation(x)

    x = torch.randn(IMAGES, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what isn't reached
        model = activations_cuda.convert(Calls(), x)
    report = activations_cuda.memory_report(model, x, recompute=True)
    assert report.before >= report.after > 0
    assert torch.equal(model(x), activation(x))


def test_inputs_that_are_none_get_pytorchs_error():
    with pytest.raises(TypeError, match="must be Tensor, not NoneType"):
        activations_cuda.convert(nn.ReLU6(), None)


def test_numpys_generator_is_as_it_was():
    """Whichever it is."""
    numpy = pytest.importorskip("numpy")
    before = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(numpy.random.PCG64(7))
        state = numpy.random.get_state(legacy=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            activations_cuda.convert(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU6()), torch.randn(64, 8))
        assert numpy.random.get_state(legacy=False) == state
    finally:
        numpy.random.set_bit_generator(before)
