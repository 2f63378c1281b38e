"""What only a GPU can show: streams, devices and sizes past 32-bit indices."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from family import A_FEW, assert_same_values, sample

pytestmark = pytest.mark.cuda
ops = torch.ops.fastact


def test_runs_on_the_current_stream():
    """A kernel on another stream would not wait for the sleep, and would read zeros."""
    x = torch.zeros(1 << 20, device="cuda", requires_grad=True)
    value = torch.full_like(x, 0.5)
    grad = torch.zeros_like(x)
    ops.hardtanh(x).backward(grad)  # loads the kernels, so that nothing synchronises below
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        with torch.no_grad():
            x.copy_(value)
            grad.fill_(2.0)
        y = ops.hardtanh(x)
        (gradient,) = torch.autograd.grad(y, x, grad)
        assert not stream.query()
    stream.synchronize()
    assert torch.equal(y, value)
    assert torch.equal(gradient, torch.full_like(x, 2.0))


@pytest.mark.cuda(gpus=2)
def test_runs_on_the_tensors_device():
    x = torch.randn(1000, device="cuda:1", requires_grad=True)
    with torch.cuda.device(0):
        y = ops.hardtanh(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
    assert y.device == gradient.device == x.device
    assert torch.equal(y, F.hardtanh(x))


@pytest.mark.parametrize("row", A_FEW, ids=str)
def test_several_streams(row):
    """Each stream has tensors of its own; none waits for another."""
    streams = [torch.cuda.Stream() for _ in range(8)]
    inputs = [sample(row, 100_003, torch.float32, "cuda", seed).requires_grad_() for seed in range(len(streams))]
    grad = torch.randn(100_003, device="cuda")
    torch.cuda.synchronize()
    results = [[] for _ in streams]
    for _ in range(20):
        for stream, x, result in zip(streams, inputs, results, strict=True):
            with torch.cuda.stream(stream):
                result.append(torch.autograd.grad(row(x), x, grad)[0])
    torch.cuda.synchronize()
    for x, result in zip(inputs, results, strict=True):
        for gradient in result:
            assert_same_values(gradient, row.scaled(grad, x))


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("row", A_FEW, ids=str)
def test_cuda_graph(row, inplace):
    """Forward and backward, captured once and replayed on other values."""
    x = sample(row, 100_003, torch.float32, "cuda").requires_grad_()
    grad = torch.randn(100_003, device="cuda")

    def step():
        y = row.inplace(x * 1, *row.parameters) if inplace else row(x)
        return y, torch.autograd.grad(y, x, grad)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # warms up
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, gradient = step()
    for seed in (1, 2):
        with torch.no_grad():
            x.copy_(sample(row, 100_003, torch.float32, "cuda", seed))
        graph.replay()
        assert_same_values(y.detach(), row.reference(x.detach()))
        assert_same_values(gradient, row.scaled(grad, x))


FIRST_CALLS = {
    "in a captured graph": """
x = torch.randn(1000, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = fastact.hardtanh(x)
x.copy_(torch.randn(1000))
graph.replay()
assert torch.equal(y, F.hardtanh(x))
""",
    "in a new thread": """
x = torch.randn(1000, device=f"cuda:{torch.cuda.device_count() - 1}", requires_grad=True)
with ThreadPoolExecutor(1) as pool:
    y = pool.submit(fastact.hardtanh, x).result()
assert torch.equal(y, F.hardtanh(x)) and y.device == x.device
y.sum().backward()
assert torch.equal(x.grad, (x.abs() < 1).float())
""",
}


@pytest.mark.parametrize("where", FIRST_CALLS)
def test_the_first_call_of_a_process(where):
    """When their module is loaded."""
    imports = "from concurrent.futures import ThreadPoolExecutor", "import torch", "import torch.nn.functional as F"
    program = "\n".join([*imports, "import activations_cuda as fastact", FIRST_CALLS[where]])
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


def test_mask_on_another_device():
    with pytest.raises(RuntimeError, match="masked_scale: expected the mask on grad's device, cuda:0, got cpu"):
        ops.masked_scale(torch.randn(9, device="cuda"), torch.zeros(2, dtype=torch.uint8), 1.0, 0.0)


@pytest.mark.parametrize("row", A_FEW, ids=str)
@pytest.mark.parametrize("numel", [2**31 - 1, 2**31, 2**31 + 9, 2**32 + 5])
@pytest.mark.usefixtures("most_memory")
def test_more_elements_than_32_bits_count(row, numel):
    """Every element, in pieces."""
    needed = 8 * 2 * numel
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory")
    x = torch.randn(numel, device="cuda", dtype=torch.bfloat16).mul_(3)
    grad = torch.randn(numel, device="cuda", dtype=torch.bfloat16)
    x[-100:] = sample(row, 100, torch.bfloat16, "cuda")

    def step(function):
        leaf = x.detach().requires_grad_()
        y = function(leaf)
        return y.detach(), torch.autograd.grad(y, leaf, grad)[0]

    for actual, expected in zip(step(row), step(row.reference), strict=True):
        for chunk in zip(actual.split(2**28), expected.split(2**28), strict=True):
            assert_same_values(*chunk)


@pytest.mark.usefixtures("most_memory")
def test_rows_past_32_bits():
    x = torch.randn(2**16 + 1, 2**15 + 8, device="cuda", dtype=torch.bfloat16)[:, : 2**15 + 3]
    assert x.numel() > 2**31
    assert_same_values(ops.hardtanh(x), F.hardtanh(x))
