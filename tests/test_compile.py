"""torch.compile traces through the ops: they fuse with their neighbours and save what PyTorch's own op saves."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from family import A_FEW, FAMILY, sample

CALL = {"cpu": r"^\s*(?:kernels\.)?cpp_fused\w*\(", "cuda": r"^\s*triton_\w+\.run\("}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield


def kernels(code, device):
    return len(re.findall(CALL[device], code, re.MULTILINE))


def assert_fused(codes, device):
    for code in codes:
        assert "fastact" not in code
        assert kernels(code, device) == 1, code


def neighbourhood(row, inplace=False):
    """The op between two pointwise neighbours."""
    op = row.inplace if inplace else row.op
    return lambda x: op(x * 0.9, *row.parameters) + 1


def close(actual, expected):
    # The composite body's tolerance: the last bit of a value near 1.
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_training_fuses(row, inplace, device):
    x = sample(row, 4096, torch.float32, device).nan_to_num(0.1).view(64, 64).requires_grad_()
    function = neighbourhood(row, inplace)

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
    function = neighbourhood(row)
    with mode():
        y, codes = run_and_get_code(torch.compile(function, fullgraph=True), x)
        assert len(codes) == 1
        assert_fused(codes, device)
        close(y, function(x))


@pytest.mark.parametrize("row", A_FEW, ids=str)
def test_dynamic_shapes_compile_once(row, device):
    function = neighbourhood(row)
    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for numel in (64, 96, 1000):
            x = sample(row, numel, torch.float32, device).nan_to_num(0.1).requires_grad_()
            y, expected = compiled(x), function(x)
            close(y, expected)
            close(*(torch.autograd.grad(output.sum(), x)[0] for output in (y, expected)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", [row for row in FAMILY if row.overload == "default"], ids=str)
def test_no_more_is_saved_than_by_pytorch(row, dtype, device):
    """The forward graph hands as many bytes to the backward graph as with PyTorch's op."""

    def saved(activation):
        torch._dynamo.reset()
        sizes = []

        def pack(tensor):
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        compiled = torch.compile(lambda x: activation(x.sin()), fullgraph=True)
        x = torch.randn(4096, device=device, dtype=dtype, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            compiled(x)
        return sum(sizes)

    assert saved(row) <= saved(row.reference)


def test_inplace_adds_nothing_to_the_gradient_of_what_was_there():
    """On a tensor that is traced, or on another device, the composite body is copied; that alone would add zeros."""
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
