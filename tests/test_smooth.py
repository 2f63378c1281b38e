"""GELU, SiLU, Hardswish and Mish: from the output and a code, PyTorch's own gradient to the bit."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import activations_cuda
from activations_cuda.memory import saved_bytes
from family import HALF_TYPES, SMOOTH, assert_same, assert_same_values, every_pattern
from test_dispatch import Log
from test_strides import DISJOINT, LAYOUTS, assert_same_gradients, cases, gradient
from test_subclasses import Subclass, Wrapper

pytestmark = pytest.mark.parametrize("row", SMOOTH, ids=str)
EACH_TYPE = pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
SIZES = [0, 1, 7, 8, 9, 63, 1023, 4001]


def sample(numel, dtype, device, seed=0):
    """Normal values and special ones."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(numel, generator=generator) * 3).to(dtype)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), -9.0, 60000.0, 1e-6], dtype=dtype)
    x[torch.randperm(numel, generator=generator)[:8]] = special[:numel]
    return x.to(device)


def gradients_of(function, x, grad, **keywords):
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    return y.detach(), *torch.autograd.grad(y, leaf, grad, **keywords)


def assert_same_step(function, reference, x, grad):
    for actual, expected in zip(gradients_of(function, x, grad), gradients_of(reference, x, grad), strict=True):
        assert_same(actual, expected)


@EACH_TYPE
def test_every_input(row, dtype, device):
    """With a few hundred gradients, the special ones among them."""
    grads = every_pattern(dtype)[:: 65536 // (251 if device == "cpu" else 1024)].to(device)
    x = every_pattern(dtype, device).expand(len(grads), -1).contiguous()
    assert_same_step(row, row.reference, x, grads[:, None].expand_as(x).contiguous())
    assert_same_values(row(x), row.reference(x))  # without a gradient, and with tables for as many on a GPU


@EACH_TYPE
def test_every_input_in_other_layouts(row, dtype):
    """PyTorch's CPU ops compute by oneDNN what is contiguous, where the processor has bfloat16 instructions, in vectors what is
    dense but permuted, and one by one what lies apart or is the rest of a vector."""
    x, infinity = every_pattern(dtype), float("inf")
    for grad in (infinity, -infinity, torch.finfo(dtype).max, 1.0):
        grads = torch.full_like(x, grad)
        assert_same_step(row, row.reference, *(torch.stack([t, t], 1)[:, 0] for t in (x, grads)))
        permuted = [t.view(256, 256).t().contiguous().t() for t in (x, grads)]
        assert_same_step(row, row.reference, *permuted)
        assert_same_step(row, row.reference, x.view(256, 256), permuted[1])
    for piece in x.split(30):
        assert_same_step(row, row.reference, piece, torch.full_like(piece, infinity))


@pytest.mark.cuda
@EACH_TYPE
def test_every_pair_of_an_input_and_a_gradient(row, dtype):
    x = every_pattern(dtype, "cuda").expand(4096, -1).contiguous()
    output, code = row.with_code(x)
    for grads in every_pattern(dtype, "cuda").split(4096):
        grad = grads[:, None].expand_as(x).contiguous()
        assert_same_values(row.code_backward(grad, output, code), row.reference_backward(grad, x))


@pytest.mark.parametrize("offset", [0, 1, 3])
@EACH_TYPE
def test_sizes_and_offsets(row, dtype, offset, device):
    for numel in SIZES:
        x, grad = (sample(numel + offset, dtype, device, seed)[offset:] for seed in (0, 1))
        assert_same_step(row, row.reference, x, grad)
        assert_same(row(x), row.reference(x))
        assert_same_step(lambda t: row.inplace(t * 1), lambda t: row.reference_inplace(t * 1), x, grad)


@EACH_TYPE
def test_output_and_code_are_saved(row, dtype, device):
    for numel in SIZES:
        x = sample(numel, dtype, device).requires_grad_()
        assert saved_bytes(row, x) == 2 * numel + row.code_bytes(x)
        assert saved_bytes(lambda t: row(t) @ t.new_ones(t.numel()), x) == 4 * numel + row.code_bytes(
            x
        )  # which shares the output
    assert saved_bytes(row, x.detach()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_other_dtypes_are_pytorchs(row, dtype, device):
    x = torch.randn(99, dtype=dtype, device=device, requires_grad=True)
    assert row(x).grad_fn.name() == row.reference(x).grad_fn.name()
    assert saved_bytes(row, x) == saved_bytes(row.reference, x)
    with pytest.raises(NotImplementedError, match="_with_code: expected a float16 or bfloat16 tensor, got"):
        row.with_code(x)


@EACH_TYPE
def test_strides_are_pytorchs(row, dtype, device):
    assert_same_gradients(
        (case, gradient(row, x, grad, False), gradient(row.reference, x, grad, False))
        for case, x, grad in cases(LAYOUTS, dtype, device)
    )


@EACH_TYPE
def test_strides_in_place(row, dtype, device):
    assert_same_gradients(
        (case, gradient(row.inplace, x, grad, True), gradient(row.reference_inplace, x, grad, True))
        for case, x, grad in cases(DISJOINT, dtype, device)
    )


def test_strides_of_outputs(row, device):
    assert_same_gradients(
        (case, function(x), row.reference(x))
        for case, x, _ in cases(LAYOUTS, torch.bfloat16, device)
        for function in (row, lambda x: row(x.detach().requires_grad_()).detach())
    )


def test_in_place(row, device):
    x = sample(99, torch.bfloat16, device)
    base = (x.clone().requires_grad_() * 1).view(9, 11)
    version = base._version
    y = row.inplace(base[:, 2:5])
    assert base._version == version + 1
    assert y.data_ptr() == base[:, 2:5].data_ptr()
    expected = (x.clone().requires_grad_() * 1).view(9, 11)
    row.reference_inplace(expected[:, 2:5])
    assert_same(base.detach(), expected.detach())
    leaf = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        row.inplace(leaf)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_same(row.inplace(x.clone()), row.reference(x))


def test_gradients_of_views_in_place(row, device):
    def step(inplace):
        leaf = sample(120, torch.bfloat16, device).nan_to_num(0.1).requires_grad_()
        base = leaf.view(10, 12) * 1
        inplace(base.t()[2:7])
        return torch.autograd.grad(base, leaf, torch.ones_like(base))[0]

    assert_same(step(row.inplace), step(row.reference_inplace))


def test_an_output_that_is_written_to_afterwards(row, device):
    x = sample(99, torch.bfloat16, device).requires_grad_()
    for function in (row, lambda x: row.inplace(x * 1)):
        y = function(x)
        y.mul_(2)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            y.sum().backward()


def test_backward_again(row, device):
    x = sample(99, torch.bfloat16, device).requires_grad_()
    y = row(x)
    grad = torch.ones_like(y)
    first, second = (torch.autograd.grad(y, x, grad, retain_graph=True)[0] for _ in range(2))
    assert_same(first, second)
    y.backward(grad)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward(grad)


@EACH_TYPE
def test_second_derivatives(row, dtype, device):
    """Where no magnitude overflows and some slope is left."""
    x = every_pattern(dtype, device)
    x = x[(x.abs() < 200) & ((x > -5) | (row.reference_backward(torch.ones_like(x), x) != 0))]
    grad, outer = (torch.randn(x.numel(), generator=torch.Generator().manual_seed(i)).to(x) for i in (1, 2))

    def derivatives(function):
        leaf, direction = x.clone().requires_grad_(), grad.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(leaf), leaf, direction, create_graph=True)
        return first.detach(), *torch.autograd.grad(first, (leaf, direction), outer, allow_unused=True)

    for actual, expected in zip(derivatives(row), derivatives(row.reference), strict=True):
        assert_same(actual, expected)


def test_hooks_of_the_input_run_once(row, device):
    calls = []
    x = sample(99, torch.bfloat16, device).requires_grad_()
    for create_graph in (False, True):
        inner = x * 1
        inner.register_hook(lambda grad: calls.append(grad) or grad * 2)
        (actual,) = torch.autograd.grad(row(inner).sum(), x, create_graph=create_graph)
        (expected,) = torch.autograd.grad(
            row.reference(x).sum(), x, torch.tensor(2.0, device=device).to(x), create_graph=create_graph
        )
        assert_same(actual.detach(), expected.detach())
    assert len(calls) == 2


TRANSFORMS = {
    "vmap": lambda f, x: torch.vmap(f, in_dims=1)(x),
    "grad": lambda f, x: torch.func.grad(lambda t: f(t).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x))[0],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(row, transform, device):
    x = sample(60, torch.bfloat16, device).view(5, 12)
    assert_same(TRANSFORMS[transform](row, x), TRANSFORMS[transform](row.reference, x))


def test_forward_mode(row, device):
    x, tangent = sample(60, torch.bfloat16, device), sample(60, torch.bfloat16, device, 1)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        actual, expected = (torch.autograd.forward_ad.unpack_dual(f(dual)).tangent for f in (row, row.reference))
    assert_same_values(actual, expected)


def test_batched_gradients(row, device):
    x, grads = sample(60, torch.bfloat16, device).requires_grad_(), torch.randn(3, 60, device=device).bfloat16()
    y, expected = row(x), row.reference(x)
    actual, wanted = (torch.autograd.grad(f, x, grads, is_grads_batched=True, retain_graph=True)[0] for f in (y, expected))
    assert_same_values(actual, wanted)
    actual, wanted = (
        torch.vmap(lambda g, f=f: torch.autograd.grad(f, x, g, retain_graph=True)[0])(grads) for f in (y, expected)
    )
    assert_same_values(actual, wanted)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
def test_checkpoint(row, inplace, use_reentrant, device):
    x, grad = (sample(99, torch.bfloat16, device, seed) for seed in (0, 1))
    function = (lambda t: row.inplace(t * 1)) if inplace else row
    leaf = x.clone().requires_grad_()
    checkpoint(function, leaf, use_reentrant=use_reentrant).backward(grad)
    assert_same(leaf.grad, gradients_of(row.reference, x, grad)[1])


def test_selective_checkpoint(row, device):
    x, grad = (sample(99, torch.bfloat16, device, seed) for seed in (0, 1))
    name = f"fastact.{row.name}_with_code.default"
    op = getattr(torch.ops.fastact, f"{row.name}_with_code").default
    for saved in (False, True):
        contexts = partial(create_selective_checkpoint_contexts, [op] if saved else [])
        leaf = x.clone().requires_grad_()
        y = checkpoint(lambda t: row(t * 2) * 3, leaf, use_reentrant=False, context_fn=contexts)
        with Log() as log:
            (actual,) = torch.autograd.grad(y, leaf, grad)
        assert (name in log.names) == (not saved)
        assert_same_values(actual, gradients_of(lambda t: row.reference(t * 2) * 3, x, grad)[1])


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("layout", DISJOINT)
def test_saved_tensors_hooks(row, layout, inplace, device):
    """They may give the output back in another layout, as save_on_cpu does with pinned memory."""
    x, grad = (DISJOINT[layout](2, 3, 4, 5).bfloat16().to(device) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda tensor: tensor):
        leaf = x.detach().requires_grad_()
        y = row.inplace(leaf * 1) if inplace else row(leaf)
    assert_same_values(torch.autograd.grad(y, leaf, grad)[0], gradients_of(row.reference, x, grad)[1])


@EACH_TYPE
def test_output_and_code_anywhere_in_memory(row, dtype, device):
    x, grad = (sample(99, dtype, device, seed) for seed in (0, 1))
    output, code = row.with_code(x)
    expected = row.reference_backward(grad, x)
    for offset in range(1, 8):
        moved_output, moved_code = (torch.cat([saved.new_zeros(offset), saved])[offset:] for saved in (output, code))
        assert_same(row.code_backward(grad, moved_output, code), expected)
        assert_same(row.code_backward(grad, output, moved_code), expected)


def test_compiled(row, device):
    """As ATen's ops."""
    function = getattr(activations_cuda, row.name)
    x, grad = (torch.randn(99, device=device).bfloat16() for _ in range(2))
    seen = []

    def backend(module, inputs):
        seen.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module

    torch._dynamo.reset()
    torch.compile(lambda t: function(t, *row.parameters), backend=backend, fullgraph=True)(x)
    assert seen
    compiled = torch.compile(lambda t: function(t, *row.parameters), backend="aot_eager", fullgraph=True)
    for actual, expected in zip(gradients_of(compiled, x, grad), gradients_of(row.reference, x, grad), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_compiled_autograd(row, dtype, device):
    """A backward pass that is compiled as a whole, after a forward pass in eager mode."""
    torch._dynamo.reset()
    for shape in ((64, 32), (33, 7)):
        x = torch.randn(shape, device=device).to(dtype).requires_grad_()

        def gradient(backward, x=x):
            y = row(x.t() * 2).sin().sum()
            with backward:
                y.backward()
            gradient, x.grad = x.grad, None
            return gradient

        compiled = gradient(torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")))
        torch.testing.assert_close(compiled, gradient(nullcontext()))


def test_a_mode_sees_the_ops(row, device):
    x = sample(9, torch.bfloat16, device).requires_grad_()
    with Log() as log:
        row(x).backward(x.detach())
    assert {f"fastact.{row.name}_with_code.default", "fastact.code_backward.default"} <= set(log.names)


def test_meta(row, device):
    for shape in ((0,), (5, 3), (2, 3, 4, 5)):
        x = torch.randn(shape, device=device).bfloat16()
        if x.dim() == 4:
            x = x.to(memory_format=torch.channels_last)
        output, code = row.with_code(x)
        meta_output, meta_code = row.with_code(x.to("meta"))
        assert (meta_output.stride(), meta_code.shape) == (output.stride(), code.shape)
        strides = torch.empty(shape).stride()
        actual = row.code_backward(x, output, code, input_strides=strides)
        meta = row.code_backward(x.to("meta"), meta_output, meta_code, input_strides=strides)
        assert actual.stride() == meta.stride()


def test_jagged_tensors(row, device):
    """As PyTorch's op does it."""
    values, offsets = sample(600, torch.bfloat16, device).view(150, 4), torch.tensor([0, 100, 100, 150], device=device)
    leaf = torch.nested.nested_tensor_from_jagged(values, offsets).detach().requires_grad_()

    def step(function):
        y = function(leaf)
        (actual,) = torch.autograd.grad(y, leaf, torch.nested.nested_tensor_from_jagged(values.flip(0), y.offsets()))
        return y.detach().values(), actual.values()

    try:
        results = step(row.reference)
    except NotImplementedError:  # what this torch has no op for
        with pytest.raises(NotImplementedError):
            step(row)
        return
    for actual, expected in zip(step(row), results, strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
def test_a_wrapper_sees_pytorchs_op(row, inplace, device):
    x, log = sample(1003, torch.bfloat16, device), []
    leaf = Wrapper(x, log).requires_grad_()
    y = row.inplace(leaf * 1) if inplace else row(leaf)
    (actual,) = torch.autograd.grad(y, leaf, Wrapper(x.flip(0), log))
    y, gradient = y.inner, actual.inner
    for ours, expected in zip((y, gradient), gradients_of(row.reference, x, x.flip(0)), strict=True):
        assert_same(ours, expected)
    assert {str(row.pytorchs("_" * inplace).default), str(row.pytorchs("_backward").default)} <= set(log)


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
def test_a_torch_function_subclass_has_the_gradient(row, inplace, device):
    x = sample(1003, torch.bfloat16, device)
    leaf = x.as_subclass(Subclass).requires_grad_()
    y = row.inplace(leaf * 1) if inplace else row(leaf)
    y.backward(x.flip(0))
    assert type(y) is Subclass
    for actual, expected in zip((y.detach(), leaf.grad), gradients_of(row.reference, x, x.flip(0)), strict=True):
        assert_same(actual.as_subclass(torch.Tensor), expected)


def test_errors(row, device):
    x = sample(9, torch.bfloat16, device)
    output, code = row.with_code(x)
    for error, message, arguments in [
        (NotImplementedError, "expected a float16 or bfloat16 output", (x.float(), output.float(), code)),
        (RuntimeError, "expected grad of the output's dtype, device and shape", (x[:3], output, code)),
        (RuntimeError, "expected a dense output", (x, output.repeat(2)[::2], code)),
        (RuntimeError, "expected a contiguous code of", (x, output, code[1:])),
    ]:
        with pytest.raises(error, match=f"code_backward: {message}"):
            row.code_backward(*arguments)
    with pytest.raises(RuntimeError, match="code_backward: expected a contiguous code of"):
        torch.vmap(lambda grad: row.code_backward(grad, output, code[1:]))(torch.stack([x, x]))
    with pytest.raises(ValueError, match="code_backward: expected the name of a smooth activation, got relu"):
        torch.ops.fastact.code_backward(x, output, code, "relu")
    with pytest.raises(ValueError, match="code_backward: expected strides of 1 dimensions, got 2"):
        row.code_backward(x, output, code, input_strides=(1, 2))


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
def test_lazy_clones(row, inplace, device):
    """Also among what is saved; reading one doesn't make it a copy."""
    x, grad = sample(1 << 16, torch.bfloat16, device), torch.ones(1 << 16, dtype=torch.bfloat16, device=device)
    leaf = x.clone().requires_grad_()
    lazy = torch._lazy_clone(leaf * 1)
    with torch.autograd.graph.saved_tensors_hooks(torch._lazy_clone, lambda tensor: tensor):
        y = row.inplace(lazy) if inplace else row(lazy)
    assert inplace or torch._C._is_cow_tensor(lazy)
    actual = y.detach().clone(), *torch.autograd.grad(y, leaf, grad)
    for ours, expected in zip(actual, gradients_of(row.reference, x, grad), strict=True):
        assert_same_values(ours, expected)


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_no_code_reads_past_the_tables(row, dtype, device):
    """That of another tensor, e.g., gives another gradient, and no more; `make sanitize` watches."""
    outputs = every_pattern(dtype, device)
    code = torch.full_like(row.with_code(outputs)[1], 255)
    assert row.code_backward(torch.ones_like(outputs), outputs, code).shape == outputs.shape


@pytest.mark.cuda
@EACH_TYPE
def test_a_thread_with_two_groups(row, dtype):
    """In a large tensor; the last thread's second group may be missing, or not whole."""
    x, grad = (torch.randn(2**25 + 2047, device="cuda").to(dtype) for _ in range(2))
    for numel in (2**25 + more for more in (0, 9, 1023, 1032, 2047)):
        assert_same_step(row, row.reference, x[:numel], grad[:numel])
        assert_same_step(lambda t: row.inplace(t * 1), lambda t: row.reference_inplace(t * 1), x[:numel], grad[:numel])
        assert_same(row(x[:numel]), row.reference(x[:numel]))


@pytest.mark.cuda(gpus=2)
@EACH_TYPE
def test_tables_are_on_the_tensors_device(row, dtype):
    x, grad = (sample(4001, dtype, "cuda:1", seed) for seed in (0, 1))
    with torch.cuda.device(0):
        assert_same_step(row, row.reference, x, grad)
        assert row(x.requires_grad_()).device == x.device


@pytest.mark.cuda
@pytest.mark.parametrize("numel", [2**31 + 9, 2**32 + 5])
@pytest.mark.usefixtures("most_memory")
def test_more_elements_than_32_bits_count(row, numel):
    if torch.cuda.mem_get_info()[0] < 16 * numel:
        pytest.skip(f"needs {16 * numel / 2**30:.0f} GiB of GPU memory")
    x, grad = (torch.randn(numel, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    actual = gradients_of(row, x, grad)
    for ours, reference in zip(actual, gradients_of(row.reference, x, grad), strict=True):
        for chunk in zip(ours.split(2**28), reference.split(2**28), strict=True):
            assert_same_values(*chunk)
