"""An exported model holds ATen ops alone: it runs where this package isn't installed."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import activations_cuda
from family import A_FEW, FAMILY, Apply, sample

# What another compiler or runtime may change: a fused multiply-add, the order of a convolution's sums.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}

ELSEWHERE = """
import sys

sys.modules["activations_cuda"] = None  # importing it raises ImportError

import torch

load, program, arguments, result = sys.argv[1:]
assert not hasattr(torch.ops.fastact, "hardtanh")
model = torch.export.load(program).module() if load == "export" else torch._inductor.aoti_load_package(program)
torch.save([model(x) for x in torch.load(arguments)], result)
"""


def elsewhere(load, program, arguments, folder):
    """What a saved program makes of each argument in a process that can't import this package."""
    torch.save(arguments, folder / "arguments.pt")
    command = [sys.executable, "-X", "faulthandler", "-c", ELSEWHERE, load, program]
    run = subprocess.run([*command, folder / "arguments.pt", folder / "result.pt"], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return torch.load(folder / "result.pt")


def models(device):
    """A small net with every class of the family, unmodified and converted."""
    activations = [
        nn.ReLU6(inplace=True),
        nn.Hardtanh(-0.3, 0.7),
        nn.Hardsigmoid(),
        nn.Hardshrink(0.1),
        nn.Softshrink(0.1),
        nn.LeakyReLU(0.1, inplace=True),
        nn.Threshold(-0.1, -0.2),
        nn.ReLU(),
        nn.GELU(),
        nn.GELU("tanh"),
        nn.SiLU(inplace=True),
        nn.Hardswish(),
        nn.Mish(),
    ]
    torch.manual_seed(0)
    layers = [layer for f in activations for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), f)]
    model = nn.Sequential(*layers).to(device).eval()
    ours = activations_cuda.convert(copy.deepcopy(model), classes=[type(f) for f in activations])
    return model, ours


def images(batch, device):
    return torch.randn(batch, 4, 8, 8, generator=torch.Generator().manual_seed(batch)).to(device)


def export(model, x, strict=False):
    return torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", max=1024)},), strict=strict)


def targets(program):
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def assert_aten_alone(program):
    others = [name for name in targets(program) if not name.startswith("aten.")]
    assert not others


@pytest.mark.parametrize("strict", [False, True])
def test_a_converted_model_exports_as_pytorchs_does(strict, device, tmp_path):
    pytorchs, ours = models(device)
    programs = [export(model, images(2, device), strict) for model in (pytorchs, ours)]
    assert_aten_alone(programs[1])
    for decomposed in programs, [program.run_decompositions() for program in programs]:
        expected, actual = map(targets, decomposed)
        assert actual == expected
    torch.export.save(programs[1], tmp_path / "model.pt2")
    arguments = [images(batch, device) for batch in (2, 5)]
    for x, y in zip(arguments, elsewhere("export", tmp_path / "model.pt2", arguments, tmp_path), strict=True):
        assert torch.equal(y, pytorchs(x))


@pytest.mark.parametrize("strict", [False, True])
def test_functions_export_as_pytorchs_do(strict, device):
    x = torch.randn(9, device=device)
    for name in activations_cuda.functional.__all__:
        parameters = (0.1, 0.2) if name == "threshold" else ()
        ours, pytorchs = (getattr(functions, name) for functions in (activations_cuda, nn.functional))
        programs = [export(Apply(lambda t, f=f, p=parameters: f(t, *p)), x, strict) for f in (pytorchs, ours)]
        expected, actual = map(targets, programs)
        assert actual == expected


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_ops_decompose(row, inplace, device):
    op = row.inplace if inplace else row.op
    x = sample(row, 60, torch.float32, device).nan_to_num(0.1).view(5, 12)
    program = export(Apply(lambda t: op(t * 1, *row.parameters)), x).run_decompositions()
    assert_aten_alone(program)
    torch.testing.assert_close(program.module()(x), row(x), rtol=1e-6, atol=1e-6)


def family(x):
    """All ops, in place too, and each seen in the result."""
    return torch.stack([row.inplace(row(x) + 0.1, *row.parameters) for row in FAMILY])


@pytest.mark.parametrize("strict", [False, True])
def test_decomposed_ops_run_elsewhere(strict, device, tmp_path):
    program = export(Apply(family), torch.randn(5, 12, device=device), strict).run_decompositions()
    assert_aten_alone(program)
    torch.export.save(program, tmp_path / "ops.pt2")
    x = torch.randn(7, 12, device=device)
    (y,) = elsewhere("export", tmp_path / "ops.pt2", [x], tmp_path)
    assert torch.equal(y, family(x))


@pytest.mark.parametrize("row", A_FEW, ids=str)
def test_an_exported_program_trains(row, device):
    """What is exported before decomposition has a derivative: the same."""
    x = sample(row, 60, torch.float32, device).nan_to_num(0.1).requires_grad_()
    gradient = torch.randn(60, device=device)
    program = torch.export.export(Apply(row), (x.detach(),)).module()
    actual, expected = (torch.autograd.grad(function(x), x, gradient)[0] for function in (program, row))
    assert torch.equal(actual, expected)


@pytest.mark.slow
def test_aot_inductor(device, tmp_path):
    x = torch.randn(7, 12, device=device)
    with torch.no_grad():
        program = export(Apply(family), x[1:])
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "ops.pt2"))
    (y,) = elsewhere("aoti", package, [x], tmp_path)
    torch.testing.assert_close(y, family(x), **TOLERANCE)


def test_onnx(tmp_path):
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name)
    onnxruntime = pytest.importorskip("onnxruntime")
    pytorchs, ours = models("cpu")
    path = tmp_path / "model.onnx"
    arguments = [images(batch, "cpu") for batch in (2, 5)]
    model = nn.Sequential(ours, Apply(lambda x: torch.ops.fastact.hardsigmoid(x, 0.2, 0.5))).eval()
    batch = {0: torch.export.Dim("batch", max=1024)}
    torch.onnx.export(model, (arguments[0],), path, dynamo=True, dynamic_shapes=(batch,), verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for x in arguments:
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        expected = torch.ops.fastact.hardsigmoid(pytorchs(x), 0.2, 0.5)
        torch.testing.assert_close(torch.from_numpy(y), expected, **TOLERANCE)
