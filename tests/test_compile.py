"""torch.compile traces through the ops: they fuse with their neighbors and save what PyTorch's own op saves."""

import math
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import activations_cuda
from family import A_FEW, FAMILY, Apply, sample

CALL = {"cpu": r"^\s*(?:kernels\.)?cpp_fused\w*\(", "cuda": r"^\s*triton_\w+\.run\("}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    # A graph taken from a cache shows no code.
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


def kernels(code, device):
    return len(re.findall(CALL[device], code, re.MULTILINE))


def assert_fused(codes, device):
    for code in codes:
        assert "fastact" not in code
        assert kernels(code, device) == 1, code


def neighborhood(row, inplace=False):
    """The op between two pointwise neighbors."""
    op = row.inplace if inplace else row.op
    return lambda x: op(x * 0.9, *row.parameters) + 1


def close(actual, expected):
    # What torch.compile itself may change: the last bit of a value near 1.
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_training_fuses(row, inplace, device):
    x = sample(row, 4096, torch.float32, device).nan_to_num(0.1).view(64, 64).requires_grad_()
    function = neighborhood(row, inplace)

    def step(f):
        y = f(x)
        return y.detach(), torch.autograd.grad(y.sum(), x)[0]

    (y, gradient), codes = run_and_get_code(step, torch.compile(function, fullgraph=True))
    assert len(codes) == 2  # forward and backward
    assert_fused(codes, device)
    expected_y, expected_gradient = step(function)
    close(y, expected_y)
    close(gradient, expected_gradient)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_inference_fuses(row, mode, device):
    x = sample(row, 4096, torch.float32, device).nan_to_num(0.1)
    function = neighborhood(row)
    with mode():
        y, codes = run_and_get_code(torch.compile(function, fullgraph=True), x)
        assert len(codes) == 1
        assert_fused(codes, device)
        close(y, function(x))


@pytest.mark.parametrize("row", A_FEW, ids=str)
def test_dynamic_shapes_compile_once(row, device):
    function = neighborhood(row)
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for numel in (64, 96, 1000):
            x = sample(row, numel, torch.float32, device).nan_to_num(0.1).requires_grad_()
            y, expected = compiled(x), function(x)
            close(y, expected)
            close(*(torch.autograd.grad(output.sum(), x)[0] for output in (y, expected)))


def alone(activation, dtype):
    return Apply(activation), (64, 64)


def between_matmuls(activation, dtype):
    first, second = (nn.Linear(64, 64, dtype=dtype) for _ in range(2))
    return nn.Sequential(first, Apply(activation), second), (64, 64)


def between_convolutions(activation, dtype):
    first, second = (nn.Conv2d(8, 8, 3, padding=1, bias=False, dtype=dtype) for _ in range(2))
    return nn.Sequential(first, nn.BatchNorm2d(8), Apply(activation), second), (4, 8, 16, 16)


def costs(surroundings, activation, dtype, device):
    """What a compiled training step costs: the kernels of each graph, the bytes saved for backward and those of buffers."""
    torch._dynamo.reset()
    model, shape = surroundings(activation, dtype)
    memory_format = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    compiled = torch.compile(model.to(device, memory_format=memory_format), fullgraph=True)
    x = torch.randn(shape, device=device, dtype=dtype).to(memory_format=memory_format).requires_grad_()
    saved = []

    def pack(tensor):
        saved.append(tensor.nbytes)
        return tensor

    def step():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = compiled(x * 1)
        y.sum().backward()

    _, codes = run_and_get_code(step)
    allocated = [
        math.prod(map(int, filter(None, shape.split(", ")))) * getattr(torch, dtype).itemsize
        for code in codes
        for shape, dtype in re.findall(r"= empty_strided_\w+\(\(([\d, ]*?),?\), \([\d, ]*\), torch\.(\w+)", code)
    ]
    assert len(codes) == 2
    assert allocated
    return *(kernels(code, device) for code in codes), sum(saved), sum(allocated)


def assert_costs_no_more(surroundings, ours, pytorchs, dtype, device):
    expected = costs(surroundings, pytorchs, dtype, device)
    actual = costs(surroundings, ours, dtype, device)
    if getattr(ours, "name", "") == "softshrink":
        # In its row no half type holds lambd. What is compared in float for that is stored in float.
        actual, expected = actual[:-1], expected[:-1]
    assert all(cost <= most for cost, most in zip(actual, expected, strict=True)), (actual, expected)


EACH = list({row.name: row for row in FAMILY if row.overload == "default"}.values())


@pytest.mark.parametrize(
    ("row", "surroundings", "dtype"),
    [(row, alone, torch.float32) for row in EACH]
    + [(row, between_convolutions, torch.bfloat16) for row in EACH]
    + [(row, between_matmuls, dtype) for row in A_FEW for dtype in (torch.float32, torch.bfloat16)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_costs_no_more_than_pytorchs(row, surroundings, dtype, device):
    assert_costs_no_more(surroundings, row, row.reference, dtype, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["relu", "relu6", "leaky_relu", "hardtanh", "hardsigmoid"])
def test_inplace_costs_no_more_than_pytorchs(name, dtype, device):
    ours, pytorchs = (partial(getattr(functions, name), inplace=True) for functions in (activations_cuda, torch.nn.functional))
    assert_costs_no_more(between_convolutions, ours, pytorchs, dtype, device)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("row", A_FEW, ids=str)
def test_modes(row, mode):
    """With CUDA graphs, and with kernels chosen by measurement."""
    model = nn.Sequential(nn.Linear(64, 64), Apply(row), nn.Linear(64, 64)).cuda()
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    for _ in range(4):  # the first two record the graph
        x = torch.randn(128, 64, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        gradients = []
        for forward in (compiled, model):
            loss = forward(x).square().sum()
            gradients.append([gradient.clone() for gradient in torch.autograd.grad(loss, list(model.parameters()))])
        for gradient, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-3)  # of matrix products that sum in another order


@pytest.mark.parametrize("row", A_FEW, ids=str)
def test_autocast(row, device):
    results = []
    for activation in (row, row.reference):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), Apply(activation), nn.Linear(16, 16)).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            y = torch.compile(model, fullgraph=True)(torch.randn(8, 16, device=device))
        assert y.dtype == torch.bfloat16
        y.sum().backward()
        results.append((y, *(parameter.grad for parameter in model.parameters())))
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


TRAINS = """
import torch
from torch._dynamo.utils import counters

import activations_cuda

x = torch.linspace(-2, 2, 99, requires_grad=True)
y = torch.compile(lambda x: activations_cuda.hardtanh(x * 2) + 1)(x)
y.sum().backward()
assert torch.equal(y, (x * 2).clamp(-1, 1) + 1)
assert torch.equal(x.grad, 2.0 * (x.abs() < 0.5))
print(counters["inductor"]["fxgraph_cache_hit"])
"""


def test_a_second_process_finds_the_first_ones_code(tmp_path):
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    hits = [
        int(
            subprocess.run(
                [sys.executable, "-c", TRAINS], env=environment, cwd=tmp_path, check=True, capture_output=True
            ).stdout
        )
        for _ in range(2)
    ]
    assert hits[0] == 0
    assert hits[1] > 0


def test_inplace_adds_nothing_to_the_gradient_of_what_was_there():
    """On a tensor that is traced, or on another device, the composite path's output is copied; that alone would add zeros."""
    x = torch.randn(9, device="meta", requires_grad=True)
    y = torch.ops.fastact.relu6_(x * 1)
    overwritten, _ = y.grad_fn.next_functions
    assert overwritten[0] is None


@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_opcheck(row, device):
    x = sample(row, 60, torch.float32, device).nan_to_num(0.1).view(5, 12)
    for view in (x, x.t(), x[:, 1:4], x.view(1, 5, 3, 4).to(memory_format=torch.channels_last)):
        torch.library.opcheck(row.op, (view.detach().requires_grad_(), *row.parameters), rtol=1e-6, atol=1e-6)
        torch.library.opcheck(row.with_mask, (view.detach().requires_grad_(), *row.parameters))
        torch.library.opcheck(row.inplace, (view.clone(), *row.parameters), rtol=1e-6, atol=1e-6)


def test_opcheck_masked_scale(device):
    grad = torch.randn(5, 4, device=device, requires_grad=True)
    mask = torch.randint(0, 256, (3,), dtype=torch.uint8, device=device)
    torch.library.opcheck(torch.ops.fastact.masked_scale.default, (grad, mask, 0.5, 0.0))


@pytest.mark.parametrize("row", A_FEW, ids=str)
def test_compiled_autograd(row, device):
    """A backward pass that is compiled as a whole, after a forward pass in eager mode."""
    for shape in ((64, 32), (33, 7)):
        x = torch.randn(shape, device=device, requires_grad=True)

        def gradient(backward, x=x):
            y = row(x.t().sinh()).sin().sum()
            with backward:
                y.backward()
            gradient, x.grad = x.grad, None
            return gradient

        close(gradient(torch._dynamo.compiled_autograd._enable(torch.compile())), gradient(nullcontext()))
