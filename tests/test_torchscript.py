"""Under TorchScript an activation is PyTorch's own op: what is traced runs where this package isn't installed."""

import copy
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import activations_cuda
from family import FAMILY, assert_same_values, sample
from test_export import images, models
from test_modules import MODULES, ours
from test_subclasses import HAS_REFERENCE

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript itself

ELSEWHERE = """
import sys

sys.modules["activations_cuda"] = None  # importing it raises ImportError

import torch

program, arguments, result = sys.argv[1:]
torch.save(torch.jit.load(program)(torch.load(arguments)), result)
"""


def kinds(graph):
    return [node.kind() for node in graph.nodes() if node.kind().startswith(("aten", "fastact"))]


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("row", HAS_REFERENCE, ids=str)
def test_traced_to_pytorchs_op(row, inplace, device):
    x = sample(row, 60, torch.float32, device).requires_grad_()
    function = getattr(activations_cuda, row.name)
    traced = torch.jit.trace(lambda t: function(t * 1, *row.parameters, inplace=inplace), x, check_trace=False)
    in_place = [row.name + "_"] if hasattr(torch.ops.aten, row.name + "_") else ["clone", row.name, "copy_"]
    pytorchs = {False: [row.name], True: in_place}
    assert kinds(traced.graph) == ["aten::mul", *(f"aten::{name}" for name in pytorchs[inplace])]
    assert torch.equal(traced(x).nan_to_num(), row.reference(x).nan_to_num())


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("row", HAS_REFERENCE, ids=str)
def test_what_was_traced_can_be_trained(row, inplace, device):
    if inplace and row.slopes[1] < 0:
        pytest.skip("PyTorch's leaky_relu_ refuses a negative slope in backward")
    x, gradient = sample(row, 60, torch.float32, device), torch.randn(60, device=device)
    function = getattr(activations_cuda, row.name)
    traced = torch.jit.trace(lambda t: function(t * 1, *row.parameters, inplace=inplace), x, check_trace=False)
    gradients = []
    for f in (traced, row.reference):
        leaf = x.clone().requires_grad_()
        gradients += torch.autograd.grad(f(leaf), leaf, gradient)
    assert_same_values(*gradients)


@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_ops_are_traced_to_atens(row, device):
    x = sample(row, 60, torch.float32, device)
    for function in (lambda t: row(t), lambda t: row.inplace(t * 1, *row.parameters)):
        traced = torch.jit.trace(function, x, check_trace=False)
        assert all(kind.startswith("aten::") for kind in kinds(traced.graph))
        torch.testing.assert_close(traced(x), row(x), equal_nan=True)


def test_a_traced_model_runs_elsewhere(device, tmp_path):
    _, converted = models(device)
    x = images(2, device)
    torch.jit.trace(converted, x).save(tmp_path / "model.pt")
    torch.save(x, tmp_path / "x.pt")
    command = [sys.executable, "-c", ELSEWHERE, *(str(tmp_path / name) for name in ("model.pt", "x.pt", "y.pt"))]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert_same_values(torch.load(tmp_path / "y.pt"), converted(x).detach())


def test_a_traced_forward_that_calls_functions(device):
    """Traced, and checked by another trace without gradients."""

    class Net(nn.Sequential):
        def forward(self, x):
            return nn.functional.relu6(super().forward(x))

    model, x = Net(nn.Linear(8, 8)).to(device), torch.randn(4, 8, device=device)
    activations_cuda.convert(model, x, recompute=True)
    assert torch.equal(torch.jit.trace(model, x)(x), model(x))


def test_onnx_export_by_torchscript(device, tmp_path):
    """Which knows no Threshold."""
    onnx = pytest.importorskip("onnx")
    models = [nn.Sequential(*(copy.deepcopy(m) for m in MODULES if not isinstance(m, nn.Threshold))).eval() for _ in range(2)]
    activations_cuda.convert(models[1], classes=[type(module) for module in models[1]])
    x = images(2, device)
    names = []
    for model, path in zip(models, (tmp_path / "pytorchs.onnx", tmp_path / "ours.onnx"), strict=True):
        torch.onnx.export(model, (x,), str(path), dynamo=False)
        names.append([node.op_type for node in onnx.load(path).graph.node])
    assert names[0] == names[1]


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_scripting_says_what_to_do(module):
    model = nn.Sequential(nn.Linear(3, 3), ours(module))
    got = rf"got activations_cuda\.{type(module).__name__}: call activations_cuda\.revert\(model\) first"
    with pytest.raises(RuntimeError, match=rf"torch\.jit\.script: expected PyTorch's modules, {got}") as raised:
        torch.jit.script(model)
    assert "\n" not in str(raised.value)
    torch.jit.script(activations_cuda.revert(copy.deepcopy(model)))


@pytest.mark.parametrize("where", ["around", "in its forward"])
def test_a_trace_within_recompute(where):
    """The same graph as without: the tracer would record what is recomputed and compared."""
    layers = nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU6(), nn.MaxPool2d(2), nn.GELU(), nn.Conv2d(16, 16, 3)
    size = 32 if where == "around" else 24  # sizes that nothing has been verified for
    net, x = nn.Sequential(*layers), torch.randn(16, 16, size, size, requires_grad=True)
    expected = torch.jit.trace(net, x, check_trace=False)
    if where == "in its forward":
        net.forward = activations_cuda.recompute()(net.forward)
    with activations_cuda.recompute() if where == "around" else nullcontext():
        traced = torch.jit.trace(net, x, check_trace=False)
    kinds = [[node.kind() for node in each.inlined_graph.nodes()] for each in (traced, expected)]
    assert kinds[0] == kinds[1]
