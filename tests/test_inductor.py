"""The pass that keeps activations packed in compiled graphs where they stand alone."""

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

from activations_cuda import gelu, hardshrink, hardtanh, inductor, leaky_relu, relu
from family import A_FEW, FAMILY, HALF_TYPES, SMOOTH, sample
from test_compile import between_convolutions, between_matmuls, costs, fresh_compiler  # noqa: F401

PACKS = [row for row in FAMILY if row.name in inductor.FAMILY]
PACKED = (["hardtanh_with_mask"], ["masked_scale"])
SIZE = 64


def square(device, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SIZE, SIZE, generator=generator).to(device).requires_grad_(requires_grad)


def step(function, *inputs):
    """The output, and the gradients of what requires one."""
    y = function(*inputs)
    gradient = torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y)
    return y.detach(), *torch.autograd.grad(y, [x for x in inputs if x.requires_grad], gradient)


def assert_close(actual, expected):
    """For matrix products, which may sum in another order."""
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


def calls(function, *inputs, **options):
    """The ops of this package that each compiled graph calls, once the results are seen to be right."""
    compiled = torch.compile(function, fullgraph=True, options=inductor.options(options))
    actual, codes = run_and_get_code(step, compiled, *inputs)
    assert_close(actual, step(function, *inputs))
    return tuple(re.findall(r"= torch\.ops\.fastact\.(\w+)\.", code) for code in codes)


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("row", PACKS, ids=str)
def test_packed_between_matrix_products(row, inplace, device):
    op = row.inplace if inplace else row.op
    x = sample(row, SIZE * SIZE, torch.float32, device).nan_to_num(0.1, 1, 1).clamp(-9, 9).view(SIZE, SIZE).requires_grad_()
    eye = torch.eye(SIZE, device=device)  # a product that keeps the breakpoints
    assert calls(lambda x: op(x @ eye, *row.parameters) @ eye, x) == ([f"{row.name}_with_mask"], ["masked_scale"])


def bytes_more(row, dtype, device):
    """How many are saved with the pass, between matrix products. It leaves one kernel less to generate."""
    composite = costs(between_matmuls, row, dtype, device)
    with config.patch(inductor.options()):
        packed = costs(between_matmuls, row, dtype, device)
    forward, backward, saved, _ = (one - other for one, other in zip(packed, composite, strict=True))
    assert (forward, backward) == (-1, 0)  # what sums the bias' gradient stays
    return saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", A_FEW, ids=str)
def test_saves_a_bit_instead_of_a_byte(row, dtype, device):
    assert bytes_more(row, dtype, device) == SIZE * SIZE / 8 - SIZE * SIZE


def calls_of(row, function, dtype, device):
    """The same of a smooth activation on [-1, 1]. Inductor rounds its values elsewhere, and sums differ by more than that."""
    x, w = (square(device).detach().div(4).clamp(-1, 1).to(dtype).requires_grad_() for _ in range(2))
    compiled = torch.compile(lambda x, w: function(row, x, w), fullgraph=True, options=inductor.options())
    actual, codes = run_and_get_code(step, compiled, x, w)
    for one, other in zip(actual, step(lambda x, w: function(row, x, w), x, w), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.1)
    return tuple(re.findall(r"= torch\.ops\.fastact\.(\w+)\.", code) for code in codes)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("row", SMOOTH, ids=str)
def test_smooth_between_matrix_products(row, dtype, device):
    packed = [f"{row.name}_with_code"], ["code_backward"]
    assert calls_of(row, lambda f, x, w: f(x @ w) @ w, dtype, device) == packed
    assert calls_of(row, lambda f, x, w: F.linear(f(F.linear(x, w, x[0])), w, x[0]), dtype, device) == packed


@pytest.mark.parametrize("row", SMOOTH, ids=str)
def test_smooth_in_place(row, device):
    packed = [f"{row.name}_with_code"], ["code_backward"]
    assert calls_of(row, lambda f, x, w: f.inplace(x @ w) @ w, torch.bfloat16, device) == packed


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("row", SMOOTH, ids=str)
def test_smooth_saves_a_code_instead_of_the_input(row, dtype, device):
    code = row.code_bytes(torch.empty(SIZE, SIZE, dtype=dtype))
    assert bytes_more(row, dtype, device) == code - SIZE * SIZE * dtype.itemsize


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda f, x, w: f(x @ w) @ w.detach(), torch.bfloat16),
        (lambda f, x, w: f(x @ w + 1) @ w, torch.bfloat16),
        (lambda f, x, w: (f(x @ w) * 2) @ w, torch.bfloat16),
        (lambda f, x, w: f(y := x @ w) @ w + y @ w, torch.bfloat16),
        (lambda f, x, w: f(x @ w) @ w, torch.float32),
    ],
    ids=["output not saved", "after", "before", "input saved", "float32"],
)
@pytest.mark.parametrize("row", SMOOTH[1:3], ids=str)
def test_smooth_composite_elsewhere(row, function, dtype, device):
    assert calls_of(row, function, dtype, device) == ([], [])


def test_smooth_in_an_mlp(device):
    """A transformer's, by autocast."""
    model, shape = between_matmuls(gelu, torch.float32)
    x = torch.randn(shape, device=device, requires_grad=True)
    model.to(device)

    def function(x):
        with torch.autocast(device, dtype=torch.bfloat16):
            return model(x)

    compiled = torch.compile(function, fullgraph=True, options=inductor.options())
    actual, codes = run_and_get_code(step, compiled, x)
    for one, other in zip(actual, step(function, x), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
    assert "gelu_with_code" in codes[0]
    assert "code_backward" in codes[1]


def attention(queries, others):
    heads = [x.view(4, SIZE // 4, 4, SIZE // 4).transpose(1, 2) for x in (queries, others, others)]
    return F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(SIZE, SIZE)


def convolution(x, w, memory_format=torch.channels_last):
    images = x.view(4, 4, 16, 16).to(memory_format=memory_format)
    weights = w[:4, :36].view(4, 4, 3, 3).to(memory_format=memory_format)
    first = F.conv2d(images, weights, padding=1)
    return F.conv2d(hardtanh(first), weights, padding=1).flatten(1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: hardtanh(x @ w),
        lambda x, w: hardtanh((x @ w).view(4, 16, SIZE)).flatten(0, 1) @ w,
        lambda x, w: torch.bmm(hardtanh(torch.bmm(x[None], w[None])), w[None]),
        lambda x, w: hardtanh(F.linear(x, w, x[0])) @ w,
        lambda x, w: F.linear(hardtanh(x @ w, inplace=True), w, x[0]),
        lambda x, w: torch.ops.fastact.hardtanh(x @ w, max_val=0.5) @ w,
        lambda x, w: attention(hardtanh(x @ w), w),
        convolution,
        lambda x, w: checkpoint(lambda x: hardtanh(x @ w) @ w, x, use_reentrant=False),
    ],
    ids=["last", "views", "bmm", "bias", "inplace", "default", "attention", "convolution", "checkpoint"],
)
def test_packed_where_alone(function, device):
    forward, backward = calls(function, square(device), square(device))
    assert set(forward) == {"hardtanh_with_mask"}
    assert "masked_scale" in backward


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: hardtanh(x) @ w,
        lambda x, w: hardtanh(x @ w + 1) @ w,
        lambda x, w: (hardtanh(x @ w) * 2) @ w,
        lambda x, w: hardtanh(y := x @ w) @ w + y.detach() @ w,
        lambda x, w: hardtanh(hardshrink(x @ w)) @ w,
        lambda x, w: hardtanh(x @ w).sum(1),
        lambda x, w: leaky_relu(relu(x @ w) @ w) @ w,
        lambda x, w: convolution(x, w, memory_format=torch.contiguous_format),
    ],
    ids=["first", "after", "before", "input saved", "another", "sum", "by output", "other layout"],
)
def test_composite_elsewhere(function, device):
    assert calls(function, square(device), square(device)) == ([], [])


def test_composite_where_kernels_may_be_fused(device):
    options = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN"}
    assert calls(lambda x, w: hardtanh(x @ w) @ w, square(device), square(device), **options) == ([], [])


def test_leaves_what_the_kernels_do_not_take(device):
    compiled = torch.compile(lambda x: hardtanh(x @ x, float("nan"), 1.0) @ x, fullgraph=True, options=inductor.options())
    _, codes = run_and_get_code(step, compiled, square(device))
    assert not any("fastact" in code for code in codes)


def test_composite_between_convolutions_and_normalization(device):
    row = A_FEW[0]
    expected = costs(between_convolutions, row, torch.float32, device)
    with config.patch(inductor.options()):
        assert costs(between_convolutions, row, torch.float32, device) == expected


@pytest.mark.cuda
def test_composite_after_a_convolution_with_bias():
    """On a GPU Inductor adds the bias itself, and can fuse that."""
    images = torch.randn(2, 4, 8, 8, device="cuda").to(memory_format=torch.channels_last)
    weights, bias = (torch.randn(shape, device="cuda", requires_grad=True) for shape in ((4, 4, 3, 3), 4))

    def function(w, b):
        return F.conv2d(hardtanh(F.conv2d(images, w, b)), w)

    with torch.backends.cudnn.flags(allow_tf32=False):
        assert calls(function, weights, bias) == ([], [])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_has_no_mask(mode, device):
    x, w = square(device), square(device)
    compiled = torch.compile(lambda x, w: hardtanh(x @ w) @ w, fullgraph=True, options=inductor.options())
    with mode():
        y, codes = run_and_get_code(compiled, x, w)
        assert_close([y], [hardtanh(x @ w) @ w])
    assert "fastact" not in codes[0]


@pytest.mark.parametrize("alias", [lambda x: x, lambda x: x.view(-1), lambda x: x.split(8)[3]], ids=["input", "view", "part"])
def test_writes_in_place_where_that_is_seen(alias, device):
    def function(x):
        y = x @ x
        for seen in (x, y):
            hardtanh(alias(seen), inplace=True)
        return x @ y, y @ x

    compiled = torch.compile(function, fullgraph=True, options=inductor.options())
    x, same = (square(device, requires_grad=False) for _ in range(2))
    assert_close([*compiled(x), x], [*function(same), same])


def test_transforms(device):
    x, w = square(device), square(device)

    def function(x, w):
        return torch.func.vmap(lambda row: hardtanh(row @ w))(x) @ w

    assert calls(function, x, w) == ([], [])


def test_dynamic_shapes_compile_once(device):
    w = square(device)

    def function(x):
        return hardtanh(x @ w) @ w

    compiled = torch.compile(function, fullgraph=True, options=inductor.options())
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (64, 96, 1000):
            x = torch.randn(length, SIZE, device=device, requires_grad=True)
            torch._dynamo.mark_dynamic(x, 0)
            actual, codes = run_and_get_code(step, compiled, x)
            assert_close(actual, step(function, x))
            assert all("torch.ops.fastact" in code for code in codes)


def test_parameters_that_are_computed(device):
    w = square(device)

    def function(x, bound):
        return hardtanh(x @ w, -bound, bound) @ w

    compiled = torch.compile(function, fullgraph=True, dynamic=True, options=inductor.options())
    x = square(device)
    for bound in (0.5, 1.5):
        assert_close(step(lambda x, bound=bound: compiled(x, bound), x), step(lambda x, bound=bound: function(x, bound), x))


def test_autocast(device):
    model, shape = between_matmuls(hardtanh, torch.float32)
    x = torch.randn(shape, device=device, requires_grad=True)

    def function(x):
        with torch.autocast(device, dtype=torch.bfloat16):
            return model(x)

    model.to(device)
    assert calls(function, x) == PACKED


@pytest.mark.cuda
def test_cuda_graphs():
    model, shape = between_matmuls(hardtanh, torch.float32)
    compiled = torch.compile(model.cuda(), options=inductor.options(torch._inductor.list_mode_options("reduce-overhead")))
    for _ in range(4):  # the first two record the graph
        x = torch.randn(shape, device="cuda", requires_grad=True)
        torch.compiler.cudagraph_mark_step_begin()
        assert_close([y.clone() for y in step(compiled, x)], step(model, x))


class Theirs(CustomGraphPass):
    def __init__(self):
        self.graphs = []

    def __call__(self, graph):
        self.graphs.append({node.target for node in graph.nodes})

    def uuid(self):
        return "theirs"


@pytest.mark.parametrize("configured", [False, True], ids=["options", "config"])
def test_runs_after_a_users_pass(configured):
    theirs = {place: Theirs() for place in ("pre_grad_custom_pass", "joint_custom_pre_pass")}
    x, w = square("cpu"), square("cpu")
    with config.patch(theirs if configured else {}):
        assert calls(lambda x, w: hardtanh(x @ w) @ w, x, w, **({} if configured else theirs)) == PACKED
    before, joint = (each.graphs for each in theirs.values())
    assert torch.ops.fastact.hardtanh in before[0]
    assert torch.ops.fastact.hardtanh_with_mask.default in joint[0]


def test_identifies_the_passes_for_the_cache():
    names = "pre_grad_custom_pass", "joint_custom_pre_pass"
    alone, again = inductor.options(), inductor.options()
    chained = inductor.options(dict.fromkeys(names, Theirs()))
    unknown = inductor.options(dict.fromkeys(names, lambda graph: None))
    for name in names:
        assert alone[name].uuid() == again[name].uuid() is not None
        assert chained[name].uuid() not in (None, alone[name].uuid())
        assert unknown[name].uuid() is None


TRAINS = """
import sys

import torch
from torch._dynamo.utils import counters

from activations_cuda import inductor, silu

asked = []
ask_pytorch = inductor.ask_pytorch
inductor.ask_pytorch = lambda *arguments: (asked.append(arguments), ask_pytorch(*arguments))
x = (torch.randn(8, 8) / 8).bfloat16().requires_grad_()
function = lambda x: silu(x @ x) @ x
options = inductor.options() if "packed" in sys.argv else None
y = torch.compile(function, options=options)(x)
packed = torch.uint8 in {saved.dtype for saved in y.grad_fn.saved_tensors}
torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (y, function(x))), rtol=0.02, atol=0.02)
print(counters["inductor"]["fxgraph_cache_hit"], packed, bool(asked))
"""


@pytest.mark.slow
def test_cached_with_the_pass_and_without(tmp_path):
    (tmp_path / "trains.py").write_text(TRAINS)  # Dynamo wants the source
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def run(*arguments):
        command = [sys.executable, str(tmp_path / "trains.py"), *arguments]
        return subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.split()

    assert run() == ["0", "False", "False"]
    assert run("packed") == ["0", "True", "True"]
    hits, *packed_and_asked = run("packed")
    assert int(hits) > 0
    assert packed_and_asked == ["True", "True"]
