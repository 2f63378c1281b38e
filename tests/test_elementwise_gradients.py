"""Gradients of products, powers, tanh and dropout that read recipes, each computed in one pass in the scope: PyTorch's bits."""

import collections
import contextlib
import itertools
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from activations_cuda import _C, recompute
from activations_cuda.recipes.verification import is_identical
from answers import (
    check_captured,
    check_second_derivatives,
    check_several_passes,
    check_several_threads,
    check_within_hooks_that_give_back_once,
    gradients,
)

pytestmark = pytest.mark.usefixtures("no_hidden_errors")

SHAPES = (64, 96), (3, 5, 24), (7, 13), (1, 8), (1,), (4, 3, 8, 8), (40000,)
ARITHMETIC = {f"aten::{name}" for name in ("mul", "pow", "tanh", "tanh_backward", "relu", "copy_", "_to_copy")}
SPECIAL = 0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, -3e38


def with_ops(function):
    """What a function returns, and how many nodes of each name call an op of arithmetic while they run."""

    def names(event):
        return {event.name}.union(*map(names, event.cpu_children))

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = function()
    counts = collections.Counter()
    for event in profiler.events():
        node = event.name.removeprefix("autograd::engine::evaluate_function: ")
        if node != event.name and names(event) & ARITHMETIC:
            counts[node] += 1
    return result, counts


class Net(nn.Module):
    """Some op's output, scaled by what looks like the gradient of what follows. Its operands are recipes, or saved as usual."""

    def __init__(self, op, shape=(64, 96), of_x=torch.float32, of_y=torch.float32, of_output=None, device="cpu", saved=False):
        super().__init__()
        self.saved = saved
        torch.manual_seed(0)
        x, y, grad = (torch.randn(shape, device=device) for _ in range(3))
        for i, special in enumerate(SPECIAL if x.numel() > 60 else ()):
            x.view(-1)[5 * i] = y.view(-1)[5 * i + 1] = grad.view(-1)[5 * i + 2] = special
        self.op, self.x, self.y = op, nn.Parameter(x.to(of_x)), nn.Parameter(y.to(of_y))
        with torch.no_grad():
            of_output = of_output or op(self.x, self.y).dtype
        self.grad = nn.Parameter(grad.to(of_output))

    def forward(self):
        output = self.op(*map(self.operand, (self.x, self.y)))
        return F.leaky_relu(output.to(self.grad.dtype) * self.grad, 0.5)  # which saves the product, and that the output

    def operand(self, leaf):
        return leaf @ torch.eye(leaf.shape[-1], dtype=leaf.dtype, device=leaf.device) if self.saved else leaf * 1.0

    def leaves(self):
        return [leaf for leaf in (self.x, self.y, self.grad) if leaf.requires_grad]


def check(net):
    """Returns how many nodes of each name call ops in the backward pass, without and within the scope."""

    def backward(loss):
        return torch.autograd.grad(loss, net.leaves(), allow_unused=True)

    loss = net().sum()
    expected, before = with_ops(lambda: backward(loss))
    for _ in range(3):
        with recompute():
            loss = net().sum()
        found, after = with_ops(lambda loss=loss: backward(loss))
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            assert one is None or (is_identical(one, other) and one.stride() == other.stride() and not one._is_view())
    return before, after


def product(x, y):
    return torch.relu(x) * (y * 3.0)


def of_one_recipe(x, y):
    return torch.relu(x) * y


def square(x, y):
    return torch.relu(x + y).pow(2)


def cube(x, y):
    return torch.pow(x + y, 3.0)


def tanh(x, y):
    return torch.tanh(x * 2.0) * y


def gelu(x, y):
    """As transformers' NewGELUActivation writes it."""
    x = x + y
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_of_half(x, y):
    """The same under autocast, which computes powers in float32."""
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x.float(), 3.0))))


def rms_norm(x, y):
    """As transformers' LlamaRMSNorm writes it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return y * wide.to(x.dtype)


def gated(x, y):
    return torch.relu(x) * torch.sigmoid(y.mean(-1, keepdim=True))


def reshaped(x, y):
    return (torch.relu(x * 3.0).flatten() * 2.0).view(x.shape) * y


OPS = product, of_one_recipe, square, cube, tanh, gelu, rms_norm, gated, reshaped
of_ops = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("shape", SHAPES)
@of_ops
def test_the_bits_are_the_ops(op, shape, device):
    check(Net(op, shape, device=device))


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, F32), (F32, BF16), (F16, F16), (F32, F16), (BF16, F16)])
@of_ops
def test_half_types(op, dtypes, device):
    check(Net(op, (64, 96), *dtypes, device=device))
    check(Net(op, (7, 13), *dtypes, of_output=torch.float32, device=device))


def scaled(x, y):
    """The first product saves what the factors of the second follow from."""
    return x * y + (x * 2.0) * (y * 0.5)


def test_a_product_is_one_pass(device):
    before, after = check(Net(scaled, device=device, saved=True))
    assert before["MulBackward0"] - after["MulBackward0"] == 1


@pytest.mark.parametrize("exponent", [2, 3])
def test_a_power_is_one_pass(exponent, device):
    before, after = check(Net(lambda x, y: x.float().pow(exponent), of_x=BF16, device=device, saved=True))
    assert before["PowBackward0"] == 1 and after["PowBackward0"] == 0


@pytest.mark.cuda
def test_tanh_is_one_pass():
    before, after = check(Net(gelu_of_half, of_x=BF16, device="cuda", saved=True))
    assert before["TanhBackward0"] == 1 and after["TanhBackward0"] == 0


@pytest.mark.parametrize("rows", [64, 1])  # whose statistics may be too small to be derived
def test_the_square_of_an_rms_norm_is_one_pass(rows, device):
    before, after = check(Net(rms_norm, (rows, 96), BF16, device=device, saved=True))
    assert before["PowBackward0"] == 1 and after["PowBackward0"] == 0


def test_a_cast_behind_is_in_the_pass(device):
    """Of a product of both kinds: the gradient of one of them goes on in the half type."""
    before, after = check(Net(scaled, of_x=BF16, device=device, saved=True))
    assert before["MulBackward0"] - after["MulBackward0"] == 1


def test_a_cast_before_is_in_the_pass(device):
    """The power alone has what was cast, so that the gradient is never in float32."""
    before, after = check(Net(lambda x, y: torch.pow((x + y).float(), 3.0), (64, 96), BF16, BF16, device=device))
    assert before["ToCopyBackward0"] == 1 and after["ToCopyBackward0"] == 0


def test_a_cast_behind_what_is_saved_as_usual(device):
    """SiLU's gradient is PyTorch's where its input isn't a recipe, though the gradient behind it may wait in the half type."""
    check(Net(lambda x, y: F.silu(x).to(BF16) * y, of_y=BF16, device=device, saved=True))


def test_a_hook_that_comes_while_the_pass_is_on_its_way(device):
    net = Net(torch.pow, (64, 96), BF16, BF16, of_output=torch.float32, device=device)

    def gradients(scope):
        seen = []
        with scope:
            wide = (net.operand(net.x) + net.operand(net.y)).float()
            cast, between = wide.grad_fn, net.x * 2  # runs between the power and the cast
            loss = F.leaky_relu(torch.pow(wide, 3.0) * net.grad, 0.5).sum() + between.sum()
        del wide
        between.grad_fn.register_prehook(lambda _: cast.register_prehook(lambda grads: seen.append(grads[0])) and None)
        return [*torch.autograd.grad(loss, net.leaves()), *seen]

    expected = gradients(torch.enable_grad())
    for _ in range(3):
        found = gradients(recompute())
        assert len(found) == len(expected) and all(map(is_identical, found, expected))


def test_a_cast_that_others_have_adds_up_in_float32(device):
    def op(x, y):
        wide = (x * 2.0).float()
        return torch.pow(wide, 3.0) + wide * 3

    check(Net(op, (64, 96), BF16, device=device))

    def tanh(x, y):
        wide = (x * 2.0).float()
        return torch.tanh(wide) + wide * 3

    check(Net(tanh, (64, 96), BF16, device=device))


def test_gelu_under_autocast(device):
    for saved in (False, True):
        check(Net(gelu_of_half, of_x=BF16, device=device, saved=saved))


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4, 0.5, -1, 2.5])
def test_exponents(exponent, device):
    check(Net(lambda x, y: torch.relu(x).pow(exponent), device=device))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_dtypes(dtype, device):
    def op(x, y):
        return (x + y) * (y * 2) + (x * y).pow(2)

    leaves = [torch.randn(8, 8, dtype=dtype, device=device, requires_grad=True) for _ in range(2)]

    def found(scope):
        with scope:
            loss = op(*(leaf * 1 for leaf in leaves)).abs().sum()
        return torch.autograd.grad(loss, leaves)

    expected = found(torch.enable_grad())
    for _ in range(2):
        assert all(map(torch.equal, found(recompute()), expected))


def test_a_number_as_a_tensor(device):
    """Which doesn't widen the product, though it may be of a wider dtype."""
    scale = torch.tensor(1.1, dtype=torch.float64, device=device, requires_grad=True)

    def found(scope):
        x = nn.Parameter(torch.linspace(-1, 2, 24, device=device))
        with scope:
            loss = (torch.relu(x * 1) * scale).sum()
        return torch.autograd.grad(loss, [x, scale])

    expected = found(torch.enable_grad())
    for _ in range(2):
        assert all(map(torch.equal, found(recompute()), expected))


LAYOUTS = {
    "channels-last": lambda x: x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}


@pytest.mark.parametrize("which", ["x", "y", "grad", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
@of_ops
def test_layouts(op, layout, which, device):
    net = Net(op, (4, 6, 5, 8), device=device)
    for name, leaf in net.named_parameters():
        if which in (name, "all"):
            leaf.data = LAYOUTS[layout](leaf.data)
    check(net)


class Unscaled(Net):
    """The gradient of its output is expanded."""

    def forward(self):
        output = self.op(*map(self.operand, (self.x, self.y)))
        F.leaky_relu(output * self.grad, 0.5)  # saves it
        return output


@of_ops
def test_a_gradient_that_is_expanded(op, device):
    _, after = check(Unscaled(op, (16, 24), device=device))
    assert device == "cuda" or after["PowBackward0"] == 0  # no kernel of a form reads one number again and again


@pytest.mark.parametrize("strides", [(16, 1, 128, 4), (16, 1, 1, 4), (16, 4, 128, 1)])
@pytest.mark.parametrize("exponent", [2, 3])
def test_strides_of_dimensions_of_one(exponent, strides, device):
    """A power lays these out anew, and its gradient as the power, if the incoming one is expanded."""
    x, y = (torch.randn(128, device=device).as_strided((8, 4, 1, 4), strides).requires_grad_() for _ in range(2))

    def found(scope):
        with scope:
            factor = (x * 1.0) * 3.0
            output = factor.pow(exponent)
            F.leaky_relu(output * y, 0.5)  # saves it
        return torch.autograd.grad(output.sum(), factor)[0].stride()

    expected = found(torch.enable_grad())
    assert expected != strides
    for _ in range(3):
        assert found(recompute()) == expected


@pytest.mark.parametrize("frozen", ["x", "y"])
@of_ops
def test_what_needs_no_gradient_gets_none(op, frozen, device):
    net = Net(op, device=device)
    net.get_parameter(frozen).requires_grad_(False)
    check(net)


@pytest.mark.parametrize("wanted", ["x", "y"])
@of_ops
def test_some_gradients(op, wanted, device):
    net = Net(op, device=device)
    net.leaves = lambda: [net.get_parameter(wanted)]
    check(net)


@of_ops
def test_more_than_one_pass(op, device):
    check_several_passes(Net(op, device=device))


@of_ops
def test_second_derivatives(op, device):
    check_second_derivatives(Net(op, device=device))


@of_ops
def test_within_hooks_that_give_back_once(op, device):
    check_within_hooks_that_give_back_once(Net(op, device=device))


@of_ops
def test_several_threads(op, device):
    check_several_threads([Net(op, device=device) for _ in range(4)])


@pytest.mark.cuda
@of_ops
def test_a_captured_graph(op):
    net = Net(op, device="cuda")
    check(net)
    check_captured(net)


def test_what_is_written_to_raises(device):
    x, y = (torch.randn(8, 8, device=device, requires_grad=True) for _ in range(2))
    for _ in range(2):
        with recompute():
            one = x * 3.0  # which its own node doesn't save
            output = (one * (y * 3.0)) * 1
        with torch.no_grad():
            one.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@pytest.mark.parametrize("wanted", ["x", "y"])
@pytest.mark.parametrize("written", ["one", "other", "both"])
def test_what_is_written_to_raises_whatever_is_wanted(written, wanted, device):
    """The node reads both factors, as the engine has it read them."""
    x, y = (torch.randn(size, 1, device=device, requires_grad=True) for size in (8, 1))

    def written_to(scope):
        with scope:
            one, other = torch.relu(x * 2.0), torch.relu(y * 3.0).expand(8, 1) * 1.0
            loss = F.leaky_relu(one * other, 0.5).sum()
        with torch.no_grad():
            for each in {"one": [one], "other": [other], "both": [one, other]}[written]:
                each.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            torch.autograd.grad(loss, x if wanted == "x" else y)
        return re.search("output 0 of ([A-Z][a-z]+)", str(error.value))[1]

    expected = written_to(torch.enable_grad())
    for _ in range(2):
        assert written_to(recompute()) == expected


def test_hooks_of_others_see_what_the_node_does(device):
    """On the product's own node: it computes its gradients itself then."""
    net = Net(product, device=device)
    expected = gradients(net)
    seen = []
    for _ in range(2):
        with recompute():
            output = product(net.x * 1.0, net.y * 1.0)
            loss = F.leaky_relu(output * net.grad, 0.5).sum()
        output.grad_fn.register_hook(lambda results, grads: seen.append((results, grads)))
        found = torch.autograd.grad(loss, net.leaves())
        assert all(map(is_identical, found, expected))
    assert len(seen) == 2 and all(each is not None for results, grads in seen for each in (*results, *grads))


def test_a_factor_that_several_read(device):
    """Its recipe reads more than it is large, so that to compute it twice would take longer."""

    def op(x, y):
        shared = x + y
        return shared * x + shared * y + shared.pow(2)

    check(Net(op, device=device))


def test_a_program_that_gives_other_bits_is_not_used():
    """No gradient's is taken on trust."""
    program = """if True:
        import contextlib, torch
        import activations_cuda
        from activations_cuda.recipes.formulas import Facts
        from activations_cuda.recipes.programs import instruction

        activations_cuda._C.recipes.set_smallest(0, 0)
        activations_cuda._C.recipes.set_facts({torch.pow: Facts(program=(instruction("power", 3.0),))})
        x = torch.randn(64, requires_grad=True)

        def run(scope):
            with scope():
                loss = torch.nn.functional.leaky_relu(torch.pow(torch.relu(x * 1.0), 3.0), 0.5).sum()
            return torch.autograd.grad(loss, x)[0]

        expected = run(contextlib.nullcontext)
        for _ in range(3):
            assert torch.equal(run(activations_cuda.recompute), expected)
    """
    subprocess.run([sys.executable, "-c", program], check=True)


def test_tanh_in_float32(device):
    x, grad = (torch.randn(1000, device=device) for _ in range(2))
    recipe = _C.recipes.recipe(x, torch.tanh, (x,), ())
    found = _C.recipes.gradient(recipe, grad, "tanh_gradient")
    if device == "cpu":
        assert found is None
    else:
        assert is_identical(found, torch.ops.aten.tanh_backward(grad, torch.tanh(x)))


@pytest.mark.parametrize("pair", [*itertools.product([F32, BF16], repeat=2)], ids=str)
def test_random_numbers_of_every_magnitude(pair, device):
    net = Net(product, (1 << 12,), *pair, device=device)
    numbers = torch.arange(1 << 12, dtype=torch.int32, device=device)
    for odd, leaf in zip((7919, 104729, 1299709), (net.x, net.y, net.grad), strict=True):
        bits = numbers * (odd << 16) + numbers * odd if leaf.dtype == F32 else (numbers * odd).to(torch.int16)
        leaf.data = bits.view(leaf.dtype)
    check(net)


class Dropout(nn.Module):
    """Behind a sum, as in a residual stream, or saved itself."""

    def __init__(self, shape, dtype, p, is_summed, layout=torch.contiguous_format):
        super().__init__()
        torch.manual_seed(0)
        x, y, grad = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
        grad.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL, device="cuda")
        self.x, self.y, self.grad = (
            nn.Parameter(each.contiguous(memory_format=layout) if each.dim() == 4 else each) for each in (x, y, grad)
        )
        self.p, self.is_summed = p, is_summed

    def forward(self):
        torch.manual_seed(1)
        z = F.dropout(self.x * 1.0, self.p)
        return F.leaky_relu(z + self.y if self.is_summed else z, 0.5) * self.grad

    def leaves(self):
        return [self.x, self.grad]


@pytest.mark.cuda
@pytest.mark.parametrize("is_summed", [False, True])
@pytest.mark.parametrize("p", [0.1, 0.5, 1 / 3])
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(64, 96), (3, 7, 5, 11), (8, 1, 24)], ids=str)
def test_dropout_by_packed_bits(shape, dtype, p, is_summed):
    net = Dropout(shape, dtype, p, is_summed)
    expected = gradients(net)
    for _ in range(2):  # the first tries the program
        with recompute():
            loss = net().sum()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            found = torch.autograd.grad(loss, net.leaves())
        for one, other in zip(found, expected, strict=True):
            assert is_identical(one, other) and one.stride() == other.stride()
    is_in_vectors = net.x.numel() % 4 == 0  # any other is interpreted, which takes longer
    assert ("aten::native_dropout_backward" in {event.name for event in profiler.events()}) != is_in_vectors


@pytest.mark.cuda
def test_dropout_in_channels_last():
    """By PyTorch's op."""
    net = Dropout((4, 8, 6, 6), BF16, 0.5, True, torch.channels_last)
    expected = gradients(net)
    for _ in range(2):
        found = gradients(net, recompute())
        assert all(
            is_identical(one, other) and one.stride() == other.stride() for one, other in zip(found, expected, strict=True)
        )


@pytest.mark.cuda
@pytest.mark.parametrize(
    "check_dropout",
    [check_several_passes, check_second_derivatives, check_within_hooks_that_give_back_once],
    ids=lambda check: check.__name__,
)
def test_dropout_as_any_other(check_dropout):
    check_dropout(Dropout((64, 96), BF16, 0.2, True))


@pytest.mark.cuda
def test_dropout_by_its_op():
    """Of which the node also knows whether it trains."""
    x = torch.randn(64, 96, device="cuda", requires_grad=True)
    for train in (True, False, None):

        def run(scope, train=train):
            torch.manual_seed(0)
            with scope:
                y, _ = torch.native_dropout(x * 1.0, 0.3, train)
                loss = F.leaky_relu(y, 0.5).sum()
            return torch.autograd.grad(loss, x)[0]

        expected = run(contextlib.nullcontext())
        assert all(is_identical(run(recompute()), expected) for _ in range(2))
