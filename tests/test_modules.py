"""The modules, and what convert, revert and ConvertMode make of a model."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import activations_cuda
from activations_cuda.conversion import log
from activations_cuda.memory import saved_bytes
from family import BY_DEFAULT, assert_same, assert_same_values, softshrink

MODULES = [
    nn.ReLU(),
    nn.ReLU(inplace=True),
    nn.ReLU6(),
    nn.ReLU6(inplace=True),
    nn.LeakyReLU(0.2),
    nn.LeakyReLU(0.2, inplace=True),
    nn.Hardtanh(0.0, 20.0),
    nn.Hardtanh(-2.0, 2.0, inplace=True),
    nn.Hardsigmoid(),
    nn.Hardsigmoid(inplace=True),
    nn.Hardshrink(0.3),
    nn.Softshrink(0.25),
    nn.Threshold(0.1, 20.0),
    nn.Threshold(0.1, 20.0, inplace=True),
]


def ours(module):
    return activations_cuda.convert(copy.deepcopy(module), classes=[type(module)])


def step(function, x, grad):
    leaf = x.detach().requires_grad_()
    y = function(leaf * 1)
    return y.detach(), torch.autograd.grad(y, leaf, grad)[0]


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_is_its_namesake_to_the_bit(module, device):
    x, grad = torch.randn(2, 7, 5, 3, device=device) * 3, torch.randn(2, 7, 5, 3, device=device)
    pytorch = partial(softshrink, lambd=module.lambd) if isinstance(module, nn.Softshrink) else module
    for actual, expected in zip(step(ours(module), x, grad), step(pytorch, x, grad), strict=True):
        assert_same(actual, expected)
    assert saved_bytes(lambda t: ours(module)(t * 1), x.requires_grad_()) == -(-x.numel() // 8)


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_looks_like_its_namesake(module):
    converted = ours(module)
    assert isinstance(converted, type(module))
    assert type(converted) is getattr(activations_cuda, type(module).__name__)
    assert repr(converted) == f"activations_cuda.{module!r}"
    assert converted.state_dict() == module.state_dict()
    assert converted.__dict__ == module.__dict__
    for other in (copy.copy(converted), copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert type(other) is type(converted)
        assert repr(other) == repr(converted)


def test_constructors_are_those_of_torch():
    module = activations_cuda.Hardtanh(0.0, 20.0, inplace=True)
    assert repr(module) == "activations_cuda.Hardtanh(min_val=0.0, max_val=20.0, inplace=True)"
    assert repr(activations_cuda.ReLU6(inplace=True)) == "activations_cuda.ReLU6(inplace=True)"
    with pytest.raises(TypeError):
        activations_cuda.Hardshrink(0.5, True)


class Own(nn.ReLU6):
    """A user's own subclass."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.ReLU6(inplace=True)
        self.body = nn.Sequential(nn.Linear(4, 4), self.shared, nn.Linear(4, 4), self.shared, nn.ReLU())
        self.own = Own()
        self.head = nn.Hardsigmoid()

    def forward(self, x):
        return self.head(self.own(self.body(x)))


def test_convert_and_revert(monkeypatch):
    messages = []
    monkeypatch.setattr(log, "hasHandlers", lambda: True)
    monkeypatch.setattr(log, "info", lambda message, *arguments: messages.append(message % arguments))
    model = Net().eval()
    calls = []
    model.shared.register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(5, 4)
    expected = model(x)
    identities = [id(module) for module in model.modules()]
    assert activations_cuda.convert(model) is model
    assert messages == ["convert: 1 ReLU6, 1 Hardsigmoid converted"]
    assert activations_cuda.converted(model) == {"ReLU6": 1, "Hardsigmoid": 1}
    assert [id(module) for module in model.modules()] == identities
    assert type(model.shared) is type(model.body[1]) is type(model.body[3]) is activations_cuda.ReLU6
    assert type(model.own) is Own
    assert type(model.body[4]) is nn.ReLU
    assert not model.shared.training
    assert_same_values(model(x), expected)
    assert len(calls) == 4

    assert activations_cuda.revert(model) is model
    assert type(model.shared) is nn.ReLU6
    assert not activations_cuda.converted(model)


def test_convert_takes_an_activation_itself_and_other_classes():
    assert type(activations_cuda.convert(nn.ReLU6())) is activations_cuda.ReLU6
    model = activations_cuda.convert(Net(), classes=[nn.ReLU])
    assert activations_cuda.converted(model) == {"ReLU": 1}
    assert nn.ReLU not in BY_DEFAULT


def test_bad_input():
    for function in (activations_cuda.convert, activations_cuda.revert, activations_cuda.converted):
        with pytest.raises(TypeError, match=f"{function.__name__}: expected a torch.nn.Module, got function"):
            function(F.relu)
    for model, found in [
        (nn.Sequential(nn.Linear(3, 3), nn.Hardtanh()), "1 Hardtanh"),
        (nn.Linear(3, 3), "no activation module: pass example inputs"),
    ]:
        with pytest.raises(ValueError, match=f"convert: expected a model with ReLU6 to convert, got one with {found}"):
            activations_cuda.convert(model, classes=[nn.ReLU6])
    model = Net()
    for classes in ([nn.ReLU6, nn.Tanh], ["ReLU6"]):
        with pytest.raises(ValueError, match=r"convert: expected classes of torch\.nn among .*ReLU6.*, got .*(Tanh|ReLU6)"):
            activations_cuda.convert(model, classes=classes)
    assert not activations_cuda.converted(model)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        activations_cuda.ReLU6(inplace=True)(torch.randn(3, requires_grad=True))


@pytest.mark.parametrize("convert", [activations_cuda.convert, activations_cuda.revert])
def test_nothing_to_do(convert):
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.LeakyReLU(inplace=True))
    assert convert(model) is model
    assert not activations_cuda.converted(model)


def test_what_saves_its_output_is_left_alone_unless_named():
    """The next layer mostly saves it too."""
    model = nn.Sequential(nn.LeakyReLU(), nn.LeakyReLU(inplace=True), nn.ReLU())
    activations_cuda.convert(model)
    assert [type(module).__module__.split(".")[0] for module in model] == ["activations_cuda", "torch", "torch"]
    activations_cuda.convert(model, classes=[nn.LeakyReLU, nn.ReLU])
    assert activations_cuda.converted(model) == {"LeakyReLU": 2, "ReLU": 1}


def compiled(function, x):
    """What a compiled function returns, and the names of the ops that it was traced to."""
    torch._dynamo.reset()
    names = []

    def backend(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    return torch.compile(function, fullgraph=True, backend=backend)(x), names


def test_converted_models_compile(device):
    model = activations_cuda.convert(Net()).to(device)
    x = torch.randn(5, 4, device=device)
    y, names = compiled(model, x)
    assert_same_values(y.detach(), model(x).detach())
    assert {"fastact.relu6_", "fastact.hardsigmoid"} <= {name.removesuffix(".default") for name in names}


FUNCTIONS = [
    F.relu6,
    F.hardtanh,
    lambda x: F.hardtanh(x, 0.0, max_val=6.0),
    F.hardsigmoid,
    F.leaky_relu,
    lambda x: F.leaky_relu(x, negative_slope=0.3),
    F.hardshrink,
    torch.hardshrink,
    torch.Tensor.hardshrink,
    F.softshrink,
    lambda x: F.threshold(x, 0.1, 20.0),
    lambda x: torch.threshold(x, 0.1, 20.0),
    lambda x: F.hardtanh_(x * 1),
    lambda x: F.leaky_relu_(x * 1, 0.3),
    lambda x: F.threshold_(x * 1, 0.1, 20.0),
    lambda x: torch.threshold_(x * 1, 0.1, 20.0),
    lambda x: F.relu6(x * 1, inplace=True),
    lambda x: nn.Hardtanh(inplace=True)(x * 1),
    nn.Softshrink(),
]
RELUS = [F.relu, torch.relu, torch.Tensor.relu, lambda x: F.relu_(x * 1), lambda x: (x * 1).relu_(), nn.ReLU()]


@pytest.mark.parametrize("function", FUNCTIONS + RELUS)
def test_convert_mode_reaches_functions(function, device):
    x = torch.randn(1001, device=device, requires_grad=True)
    classes = [*BY_DEFAULT, nn.ReLU]
    expected = function(x)
    with activations_cuda.ConvertMode(classes):
        assert saved_bytes(function, x) == 126
        y = function(x)
    assert torch.equal(y, expected)  # but for the sign of softshrink's zeros, of which PyTorch's CPU op has both
    assert_same_values(*(torch.autograd.grad(output.sum(), x)[0] for output in (y, expected)))


def test_convert_mode_leaves_the_rest():
    x = torch.randn(1000, requires_grad=True)
    with activations_cuda.ConvertMode():
        for in_place in (F.leaky_relu_, partial(F.leaky_relu, inplace=True), lambda t: F.leaky_relu(t, 0.1, True)):
            assert saved_bytes(lambda t, f=in_place: f(t * 1), x) == 4000
        assert saved_bytes(F.leaky_relu, x) == 4000
        assert saved_bytes(F.relu, x) == 4000
        assert saved_bytes(F.gelu, x) == 4000
        out = torch.empty(1000)
        assert torch.threshold(x.detach(), 0.1, 20.0, out=out) is out
    with activations_cuda.ConvertMode([nn.Hardtanh]):
        assert saved_bytes(F.relu6, x) == 4000
    with pytest.raises(ValueError, match=r"ConvertMode: expected classes of torch\.nn among"):
        activations_cuda.ConvertMode([nn.Tanh])


def test_convert_mode_compiles(device):
    x = torch.randn(100, device=device)
    with activations_cuda.ConvertMode():
        y, names = compiled(lambda t: F.relu6(t) * 2, x)
    assert torch.equal(y, F.relu6(x) * 2)
    assert "fastact.relu6" in {name.removesuffix(".default") for name in names}


@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, torch.Tensor.to_mkldnn])
def test_relu_of_other_layouts_is_pytorchs(make):
    x = make(torch.randn(5, 4))
    y = ours(nn.ReLU())(x)
    assert y.layout == x.layout
    assert torch.equal(y.to_dense(), F.relu(x).to_dense())
