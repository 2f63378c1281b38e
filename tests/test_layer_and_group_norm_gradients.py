"""The gradients of layer and group norms, by kernels of ours in the scope, with the casts around them: PyTorch's bits."""

import math
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import activations_cuda
from activations_cuda import recompute
from activations_cuda.recipes.verification import is_identical
from answers import (
    HOW_TO_SEE,
    check_captured,
    check_same,
    check_second_derivatives,
    check_several_passes,
    check_several_threads,
    check_within_hooks_that_give_back_once,
    gradients,
    kernels,
    what_is_seen,
)

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("no_hidden_errors")]

# Rows that ATen adds up in one sum, in 8, 16 and 32, and in as many as there are blocks, with and without a remainder; columns
# that a row's warp, eight threads or block have, with and without a remainder.
SHAPES = (
    (1, 8),
    (3, 96),
    (64, 136),
    (127, 256),
    (128, 1000),
    (255, 512),
    (256, 768),
    (1030, 1024),
    (300, 2048),
    (77, 4096),
    (65536, 8),
    (65537, 96),
    (65537, 2112),
    (600000, 40),
    (66, 1001, 192),
    (4, 1, 1, 8),
)

# The dtypes of the input, of the norm, and of what reads it.
KINDS = {
    "float32": (torch.float32, torch.float32, torch.float32),
    "half": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "cast behind": (torch.float32, torch.float32, torch.bfloat16),
    "cast before": (torch.bfloat16, torch.float32, torch.float32),
    "casts": (torch.bfloat16, torch.float32, torch.bfloat16),
}
kinds = pytest.mark.parametrize("kind", KINDS)
WITH_CASTS = ["casts", "group, casts", "group, casts, channels-last"]
kinds_of_both = pytest.mark.parametrize("kind", [*KINDS, *(f"group, {kind}" for kind in KINDS), WITH_CASTS[-1]])
either_with_casts = pytest.mark.parametrize("kind", WITH_CASTS)


class Norm(nn.Module):
    """A norm of what follows from a leaf, whose output is scaled by what looks like the next layer's gradient."""

    def __init__(self, shape, kind="casts", half=torch.bfloat16, affine=True, bias=True):
        super().__init__()
        torch.manual_seed(0)
        dtypes = [half if dtype == torch.bfloat16 else dtype for dtype in KINDS[kind]]
        self.of_input, self.of_norm, self.of_output = dtypes
        self.x = nn.Parameter((torch.randn(shape, device="cuda") * 2 + 0.3).to(self.of_input))
        self.grad = nn.Parameter(torch.randn(shape, device="cuda").to(self.of_output))
        weights = self.shape_of_weights(shape)
        self.weight = nn.Parameter(torch.randn(weights, device="cuda").to(self.of_norm)) if affine else None
        self.bias = nn.Parameter(torch.randn(weights, device="cuda").to(self.of_norm)) if affine and bias else None

    def input(self):
        return self.x * 1  # no leaf

    def normalized(self, x):
        return self.norm(x.to(self.of_norm))

    def forward(self):
        return self.normalized(self.input()).to(self.of_output) * self.grad

    def is_served(self):
        return True

    def leaves(self):
        return [leaf for leaf in (self.x, self.weight, self.bias, self.grad) if leaf is not None and leaf.requires_grad]


class LayerNorm(Norm):
    def shape_of_weights(self, shape):
        return shape[-1:]

    def norm(self, x):
        return F.layer_norm(x, self.grad.shape[-1:], self.weight, self.bias)


# Later releases give the op channels-last gradients and inputs as they are.
IS_GIVEN_CONTIGUOUS = tuple(map(int, torch.__version__.split(".")[:2])) <= (2, 13)


class GroupNorm(Norm):
    def __init__(self, shape, *args, groups=4, **kwargs):
        super().__init__(shape, *args, **kwargs)
        self.groups = groups

    def is_served(self):
        return IS_GIVEN_CONTIGUOUS or (self.x.is_contiguous() and self.grad.is_contiguous())

    def shape_of_weights(self, shape):
        return shape[1:2]

    def norm(self, x):
        return F.group_norm(x, self.groups, self.weight, self.bias)


def small(kind, rows=130):
    """A layer norm, or a group norm of as many numbers."""
    if not kind.startswith("group, "):
        return LayerNorm((rows, 96), kind)
    _, kind, *layout = kind.split(", ")
    norm = GroupNorm((rows // 10, 12, 8, 10), kind)
    if layout:
        norm.x.data = norm.x.data.to(memory_format=torch.channels_last)
    return norm


def is_ours(names):
    return any("::input_kernel<" in name for name in names)


def check(norm, expected_is_ours=None):
    expected_is_ours = norm.is_served() if expected_is_ours is None else expected_is_ours

    def casts(names):
        return [name for name in names if "WithCast" in name or "float16_copy" in name]

    loss = norm().sum()
    expected, names = kernels(lambda: torch.autograd.grad(loss, norm.leaves()))
    assert bool(casts(names)) or norm.of_output == norm.of_norm
    for _ in range(3):
        with recompute():
            loss = norm().sum()
        found, names = kernels(lambda loss=loss: torch.autograd.grad(loss, norm.leaves()))
        assert all(map(is_identical, found, expected))
        assert [each.stride() for each in found] == [each.stride() for each in expected]
        assert not any(each._is_view() for each in found)
    assert is_ours(names) == expected_is_ours
    if expected_is_ours and norm.of_norm == torch.float32:  # parameters in a half type may be cast for the output
        assert not casts(names)


@kinds
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_are_the_ops(shape, kind):
    check(LayerNorm(shape, kind))


# Planes that ATen adds up by a warp and by 512 threads, with and without a remainder; samples that a thread adds up, and a
# warp; one group, and as many as there are channels.
GROUPS = {
    (1, 8, 2, 2): 2,
    (3, 32, 4, 4): 32,
    (64, 64, 8, 8): 8,
    (128, 12, 14, 14): 3,
    (129, 96, 16, 31): 1,
    (200, 20, 16, 32): 5,
    (5, 64, 20, 26): 16,
    (2, 511, 33, 36): 1,
    (16, 320, 32, 32): 32,
    (3, 24, 64): 8,
    (2, 16, 4, 6, 8): 4,
    (20000, 8, 4): 2,
}


@kinds
@pytest.mark.parametrize("shape", GROUPS, ids=str)
def test_the_bits_are_the_ops_of_groups(shape, kind):
    check(GroupNorm(shape, kind, groups=GROUPS[shape]))


@kinds
@pytest.mark.parametrize("affine, bias", [(True, False), (False, False)])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 24, 20, 26), (130, 12, 8, 10)])
def test_groups_without_weights(shape, half, affine, bias, kind):
    check(GroupNorm(shape, kind, half, affine, bias))


@pytest.mark.parametrize("kind", ["half", "casts"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("special", [math.nan, math.inf, -0.0, 1e-40, 3e-8, 3e38])
def test_special_numbers_of_groups(special, half, kind):
    norm = GroupNorm((7, 24, 20, 26), kind, half)
    with torch.no_grad():
        norm.x[1, 2, 3, 4] = norm.grad[2, 3, 4, 5] = norm.weight[4] = special
        norm.x[3, 12] = norm.grad[4, 13] = norm.x[5, :, 6] = norm.grad[6, :, 7] = special
        norm.grad[0, :12] = norm.grad[1, ::2] = -0.0
    check(norm)


@kinds
@pytest.mark.parametrize("shape", [(200, 20, 16, 32), (130, 12, 8, 10)])
def test_channels_last_groups(shape, kind):
    norm = GroupNorm(shape, kind)
    norm.x.data = norm.x.data.to(memory_format=torch.channels_last)  # which the op copies into planes
    norm.grad.data = norm.grad.data.to(memory_format=torch.channels_last)
    check(norm)


def test_where_the_op_of_groups_takes_another_way():
    check(GroupNorm((5, 8, 7, 7)), expected_is_ours=False)  # no vectors of 4
    check(GroupNorm((5, 8, 1, 1)), expected_is_ours=False)  # another kernel
    check(GroupNorm((5, 512, 2, 2), groups=1), expected_is_ours=False)  # too many channels
    check(GroupNorm((5, 8, 2, 2), "half", torch.float64), expected_is_ours=False)


# Between the norm and the cast, as in diffusion models.
ACTIVATIONS = {
    "PyTorch's": F.silu,
    "PyTorch's, in place": partial(F.silu, inplace=True),
    "ours": activations_cuda.silu,
    "ours, in place": partial(activations_cuda.silu, inplace=True),
}


def with_silu(norm, which):
    norm.forward = lambda: ACTIVATIONS[which](norm.normalized(norm.input())).to(norm.of_output) * norm.grad
    return norm


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kind", ["cast behind", "casts"])
@pytest.mark.parametrize("which", ACTIVATIONS)
def test_silu_behind_groups(which, kind, layout):
    norm = with_silu(GroupNorm((7, 24, 20, 26), kind), which)
    norm.x.data, norm.grad.data = norm.x.data.to(memory_format=layout), norm.grad.data.to(memory_format=layout)
    check(norm)


@pytest.mark.parametrize("which", ACTIVATIONS)
@kinds_of_both
def test_silu_behind(kind, which):
    norm = with_silu(small(kind), which)
    expected = gradients(norm)
    for _ in range(3):
        found = gradients(norm, recompute())
        assert all(map(is_identical, found, expected))
        assert [each.stride() for each in found] == [each.stride() for each in expected]


either_silu = pytest.mark.parametrize("which", ["PyTorch's", "ours"])


@either_silu
@either_with_casts
def test_silu_in_several_passes(kind, which):
    check_several_passes(with_silu(small(kind), which))


@either_silu
@either_with_casts
def test_second_derivatives_of_silu(kind, which):
    check_second_derivatives(with_silu(small(kind), which))


@either_silu
@either_with_casts
def test_silu_in_several_threads(kind, which):
    check_several_threads([with_silu(small(kind, 1000), which) for _ in range(4)])


@either_silu
@either_with_casts
def test_silu_in_a_captured_graph(kind, which):
    norm = with_silu(small(kind, 1000), which)
    gradients(norm, recompute())
    assert is_ours(check_captured(norm)) == norm.is_served()


@either_silu
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf, -0.0, 1e-40, 3e38])
def test_silu_of_special_numbers(special, which):
    norm = with_silu(GroupNorm((7, 24, 20, 26)), which)
    with torch.no_grad():
        norm.grad[2, 3, 4, 5] = norm.bias[4] = norm.weight[5] = special
        norm.grad[4, 13] = special
    check(norm)


@pytest.mark.parametrize("which", [None, *ACTIVATIONS])
@either_with_casts
def test_two_half_types(kind, which):
    norm = small(kind)
    norm.of_output, norm.grad.data = torch.float16, norm.grad.data.half()
    norm = with_silu(norm, which) if which else norm
    expected = gradients(norm)
    for _ in range(3):
        assert all(map(is_identical, gradients(norm, recompute()), expected))


@kinds
def test_gradients_of_the_statistics(kind):
    norm = GroupNorm((13, 12, 8, 10), kind)

    def forward():
        y, mean, rstd = torch.native_group_norm(
            norm.input().to(norm.of_norm), norm.weight, norm.bias, 13, 12, 80, norm.groups, 1e-5
        )
        return (y.to(norm.of_output) * norm.grad).sum() + mean.sum() + rstd.square().sum()

    norm.forward = forward
    expected = gradients(norm)
    for _ in range(3):
        assert all(map(is_identical, gradients(norm, recompute()), expected))


@kinds
@pytest.mark.parametrize("shape", [(255, 512), (65537, 96)])
def test_float16(shape, kind):
    check(LayerNorm(shape, kind, torch.float16))


@kinds
@pytest.mark.parametrize("affine, bias", [(True, False), (False, False)])
@pytest.mark.parametrize("shape", [(255, 512), (65537, 96)])
def test_without_weights(shape, affine, bias, kind):
    check(LayerNorm(shape, kind, affine=affine, bias=bias))


@pytest.mark.parametrize("kind", ["half", "casts"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("special", [math.nan, math.inf, -0.0, 1e-40, 3e-8, 3e38])
def test_special_numbers(special, half, kind):
    norm = LayerNorm((131, 1000), kind, half)
    with torch.no_grad():
        norm.x[1, 2] = norm.grad[2, 3] = norm.weight[4] = special
        norm.x[5] = norm.grad[6] = special
        norm.x[:, 7] = norm.grad[:, 8] = special
        norm.weight[9:12] = special
        norm.grad[13] = norm.grad[14, ::2] = -0.0
    check(norm)


@kinds_of_both
@pytest.mark.parametrize("needed", [["x"], ["weight"], ["bias"], ["x", "weight"], ["x", "bias"]], ids="+".join)
def test_some_gradients(needed, kind):
    norm = small(kind)
    leaves = list(map(norm.get_parameter, needed))

    def found(scope):
        with scope:
            loss = norm().sum()
        return torch.autograd.grad(loss, leaves)

    expected = found(torch.enable_grad())
    for _ in range(2):
        assert all(map(is_identical, found(recompute()), expected))


@kinds_of_both
@pytest.mark.parametrize("frozen", ["weight", "bias", "both", "x"])
def test_what_needs_no_gradient_gets_none(frozen, kind):
    norm = small(kind)
    for name in ["weight", "bias"] if frozen == "both" else [frozen]:
        norm.get_parameter(name).requires_grad_(False)
    check(norm, expected_is_ours=frozen != "x" and norm.is_served())


def test_where_the_op_takes_another_way():
    check(LayerNorm((130, 100)), expected_is_ours=False)  # no vectors of 8
    check(LayerNorm((130, 4104)), expected_is_ours=False)  # too many
    check(LayerNorm((130, 96), "half", torch.float64), expected_is_ours=False)


@kinds_of_both
def test_an_input_that_is_not_aligned(kind):
    norm = small(kind)
    norm.input = lambda: torch.cat([norm.x.new_zeros(1), norm.x.flatten()])[1:].view_as(norm.x)
    expected = gradients(norm)
    for _ in range(3):
        assert all(map(is_identical, gradients(norm, recompute()), expected))


@kinds
def test_an_input_in_another_layout(kind):
    norm = LayerNorm((5, 40, 96), kind)
    norm.x.data = norm.x.data.transpose(0, 1).contiguous().transpose(0, 1)  # as of attention
    check(norm)


@kinds
def test_a_gradient_in_another_layout(kind):
    norm = LayerNorm((5, 40, 96), kind)
    norm.grad.data = norm.grad.data.transpose(0, 1).contiguous().transpose(0, 1)
    check(norm)


@kinds
def test_a_channels_last_input_by_channel(kind):
    norm = LayerNorm((4, 9, 11, 96), kind)
    norm.x.data = norm.x.data.permute(0, 3, 1, 2)  # as a convolution's output
    norm.input = lambda: (norm.x * 1).permute(0, 2, 3, 1)
    check(norm)


@kinds
def test_strides_of_dimensions_of_one(kind):
    norm = LayerNorm((4, 1, 1, 8), kind)
    norm.x.data = norm.x.data.view(4, 8, 1, 1)
    norm.input = lambda: (norm.x * 1).permute(0, 2, 3, 1)
    check(norm)


def test_without_waiting_for_the_device():
    norm = LayerNorm((137, 88))  # of sizes that are new
    expected = gradients(norm)
    with recompute():
        loss = norm().sum()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = torch.autograd.grad(loss, norm.leaves())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(is_identical, found, expected))


@kinds
def test_a_linear_layer_behind(kind):
    norm = LayerNorm((5, 40, 96), kind)
    weight = torch.randn(96, 96, dtype=norm.of_output, device="cuda", requires_grad=True)
    bias = norm.grad.detach()[0, 0]
    norm.forward = lambda: F.linear(norm.normalized(norm.input()).to(norm.of_output), weight, bias) * norm.grad
    check(norm)


@kinds_of_both
def test_more_than_one_pass(kind):
    check_several_passes(small(kind, 1030))


@kinds_of_both
def test_second_derivatives(kind):
    check_second_derivatives(small(kind))


@kinds_of_both
def test_what_is_written_to_raises(kind):
    norm = small(kind)
    check(norm)
    x = norm.input()
    with recompute():
        other = norm.normalized(x).to(norm.of_output) * norm.grad
    with torch.no_grad():
        x.add_(1)
    if norm.of_input == norm.of_norm:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.sum().backward()
    check(norm)  # nothing is left behind
    with recompute():
        other = norm() * 1
    with torch.no_grad():
        norm.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.sum().backward()


@pytest.mark.parametrize("kind", ["casts", "group, casts"])  # in channels-last PyTorch saves another copy
def test_a_copy_that_was_written_to_raises(kind):
    norm = small(kind)
    with recompute():
        wide = norm.input().float()
        loss = (norm.normalized(wide).to(norm.of_output) * norm.grad).sum()
    with torch.no_grad():
        wide.add_(1)
    del wide
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("source", ["leaf", "product"])
@kinds_of_both
def test_within_hooks_that_give_back_once(kind, source):
    norm = small(kind)
    if source == "product":
        norm.input = lambda: norm.x @ torch.eye(norm.x.shape[-1], dtype=norm.of_input, device="cuda")  # which those hooks have
    check_within_hooks_that_give_back_once(norm)


@kinds
def test_a_tangent_of_the_gradient(kind):
    norm = LayerNorm((130, 96), kind)  # a group norm's backward op has no derivative in this mode
    tangent = torch.randn_like(norm.grad)

    def found(scope):
        with torch.autograd.forward_ad.dual_level():
            with scope:
                y = norm.normalized(norm.input()).to(norm.of_output)
                y * norm.grad  # saves y
                loss = (y * torch.autograd.forward_ad.make_dual(norm.grad.detach(), tangent)).sum()
            results = torch.autograd.grad(loss, [norm.x, norm.weight, norm.bias])
            return [part for each in results for part in torch.autograd.forward_ad.unpack_dual(each)]

    expected = found(torch.enable_grad())
    assert all(part is not None for part in expected)
    for _ in range(2):
        assert all(map(is_identical, found(recompute()), expected))


@kinds_of_both
def test_several_threads(kind):
    check_several_threads([small(kind, 1000) for _ in range(4)])


@kinds_of_both
def test_a_captured_graph(kind):
    norm = small(kind, 1000)
    check(norm)
    assert is_ours(check_captured(norm)) == norm.is_served()


def test_a_step_under_autocast():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(96, 96), nn.LayerNorm(96), nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96)).cuda()
    x = torch.randn(20, 50, 96, device="cuda", requires_grad=True)

    def step(scope):
        with scope, torch.autocast("cuda", torch.bfloat16):
            loss = (x + net(x)).square().mean()
        return torch.autograd.grad(loss, [x, *net.parameters()])

    expected = step(torch.enable_grad())
    for _ in range(3):
        found, names = kernels(lambda: step(recompute()))
        assert all(map(is_identical, found, expected))
    assert is_ours(names)


def test_a_step_of_a_diffusion_model():
    torch.manual_seed(0)
    width, layouts = 32, (torch.contiguous_format, torch.channels_last)
    layers = [(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(2)]
    net = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *layers[0], *layers[1]).cuda()
    activations_cuda.convert(net)
    for layout in layouts:
        net.to(memory_format=layout)
        x = torch.randn(4, 3, 24, 24, device="cuda").to(memory_format=layout).requires_grad_()

        def step(scope, x=x):
            with scope, torch.autocast("cuda", torch.bfloat16):
                loss = net(x).square().mean()
            return torch.autograd.grad(loss, [x, *net.parameters()])

        with torch.backends.cudnn.flags(deterministic=True):
            expected = step(torch.enable_grad())
            for _ in range(3):
                found, names = kernels(lambda step=step: step(recompute()))
                assert all(map(is_identical, found, expected))
        assert is_ours(names) or not IS_GIVEN_CONTIGUOUS


def of_output(read, *kinds):
    """What `read(norm, scope)` returns is the same in the scope, and without."""
    for kind in kinds or WITH_CASTS:
        norm = small(kind)
        check(norm)
        check_same(partial(read, norm))


def test_another_reader_of_the_norms_output():
    def read(norm, scope):
        with scope:
            z = norm.normalized(norm.input())
            loss = (z.to(norm.of_output) * norm.grad).sum() + (z * 2).sum()
        return torch.autograd.grad(loss, norm.leaves())

    of_output(read)


def test_another_reader_of_the_norms_input():
    def read(norm, scope):
        with scope:
            x = norm.input().float()
            loss = (norm.normalized(x).to(norm.of_output) * norm.grad).sum() + (x * 2).sum()
        return torch.autograd.grad(loss, norm.leaves())

    of_output(read)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("which", ["norm", "activation", "output"])
@pytest.mark.parametrize("how", HOW_TO_SEE)
@pytest.mark.parametrize("silu", [F.silu, activations_cuda.silu], ids=["PyTorch's", "ours"])
def test_who_sees_a_gradient_about_silu(silu, how, which, layout):
    def read(norm, scope):
        norm.grad.data = norm.grad.data.to(memory_format=layout)
        with scope:
            z = norm.normalized(norm.input())
            a = silu(z)
            y = a.to(norm.of_output)
            loss = (y * norm.grad).sum()
        tensors = {"norm": z, "activation": a, "output": y}
        del z, a, y
        return what_is_seen(how, tensors, which, loss, norm)

    of_output(read, "group, casts")


@pytest.mark.parametrize("which", ["input", "wide input", "before the norm", "norm", "output"])
@pytest.mark.parametrize("how", HOW_TO_SEE)
def test_who_sees_a_gradient_on_its_way(how, which):
    if which == "before the norm" and how in ("hook", "retain"):
        pytest.skip("its output is nobody's")

    def read(norm, scope):
        with scope:
            x = norm.input()
            wide = x.to(norm.of_norm)
            z = norm.normalized(wide)
            y = z.to(norm.of_output)
            loss = (y * norm.grad).sum()
        before = z.grad_fn.next_functions[0][0]  # a cast or a copy into planes
        tensors = {"input": x, "wide input": wide, "before the norm": before, "norm": z, "output": y}
        del x, wide, z, y, before
        return what_is_seen(how, tensors, which, loss, norm)

    of_output(read)


@pytest.mark.parametrize("kind", ["half", "casts", "group, half", "group, casts"])
def test_a_pass_while_another_is_at_the_norm(kind):
    def read(norm, scope):
        other = small(kind)

        def inner():
            with torch.enable_grad(), recompute():
                loss = other().sum()
            loss.backward()

        with scope:
            z = norm.normalized(norm.input())
            z.register_hook(lambda grad: weakref.finalize(grad, inner) and None)
            loss = F.gelu(z.to(norm.of_output)).sum()  # nobody but the norm has the gradient of z
        del z
        found = torch.autograd.grad(loss, norm.leaves()[:3])
        assert other.x.grad is not None
        return found

    of_output(read, kind)


@pytest.mark.parametrize("how", ["doubled", "kept and doubled"])
def test_a_gradient_that_is_written_to_on_its_way(how):
    def read(norm, scope):
        kept = []
        with scope:
            z = norm.normalized(norm.input())
            other = norm.grad * 1  # runs between the cast and the norm
            y = z.to(norm.of_output) + other  # which both get the same gradient
            loss = (y * norm.grad).sum()
        del z
        if how == "doubled":
            other.register_hook(lambda grad: grad.mul_(2))
        else:
            y.register_hook(lambda grad: kept.append(grad))
            other.register_hook(lambda _: (kept[0].mul_(2), None)[1])
        return torch.autograd.grad(loss, norm.leaves())

    of_output(read)


def test_hooks_of_tensors_that_are_gone():
    def read(norm, scope):
        seen = []
        with scope:
            wide = norm.input().to(norm.of_norm)
            z = norm.normalized(wide)
            for tensor in (wide, z):
                tensor.register_hook(lambda grad: seen.append(grad) or grad * 2)
            y = z.to(norm.of_output)
            del wide, z
            loss = (y * norm.grad).sum()
        return [*torch.autograd.grad(loss, norm.leaves()), *seen]

    of_output(read)


@pytest.mark.parametrize("is_found_late", [False, True])
@pytest.mark.parametrize("silu", [None, F.silu, activations_cuda.silu], ids=["norm", "PyTorch's", "ours"])
def test_hooks_that_come_while_the_pass_is_on_its_way(silu, is_found_late):
    """On the node behind the cast, which is held from the beginning, or found in the graph once the cast has run."""

    def read(norm, scope):
        seen = []
        with scope:
            z = norm.normalized(norm.input())
            z = silu(z) if silu else z
            node = None if is_found_late else z.grad_fn
            between = norm.grad * 2  # runs between the cast and the node
            loss = (z.to(norm.of_output) * norm.grad).sum() + between.sum()
        del z

        def add_hook(_):
            found = node
            if is_found_late:
                found = loss.grad_fn
                for _ in ("sum", "product", "cast", "node"):
                    found = found.next_functions[0][0]
            found.register_prehook(lambda grads: seen.append(grads[0]))

        between.grad_fn.register_prehook(add_hook)
        results = torch.autograd.grad(loss, norm.leaves())
        assert len(seen) == 1
        return [*results, *seen]

    of_output(read)


def test_a_pass_that_begins_or_ends_at_the_norm():
    def read(norm, scope):
        with scope:
            y = norm.normalized(norm.input()).to(norm.of_output)
            loss = (y * norm.grad).sum()
        edge = torch.autograd.graph.GradientEdge(*y.grad_fn.next_functions[0], None)
        found = torch.autograd.grad([loss, edge], norm.leaves(), [None, norm.grad.detach().float()], retain_graph=True)
        return [*found, *torch.autograd.grad(loss, [edge, *norm.leaves()])]

    of_output(read)


@pytest.mark.parametrize("kind", ["half", "casts", "group, half", "group, casts"])
def test_anomalies_are_found_where_they_are(kind):
    norm = small(kind)
    gradients(norm, recompute())
    norm.grad.requires_grad_(False)  # or the product's own would be the first
    with torch.no_grad():
        norm.x[0, 0] = math.nan
    with recompute():
        loss = norm().sum()
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="NormBackward0' returned nan values"):
        loss.backward()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="parameters have no dtype for gradients yet")
def test_a_gradient_in_another_dtype():
    norm = LayerNorm((130, 96), "half")
    norm.weight.grad_dtype = torch.float32
    for scope in (torch.enable_grad(), recompute(), recompute()):
        norm.weight.grad = None
        with scope:
            loss = norm().sum()
        loss.backward()
        assert norm.weight.grad.dtype == torch.float32


@either_with_casts
def test_the_next_cast_in_another_stream(kind):
    norm = small(kind, 1000)
    expected = gradients(norm)
    stream = torch.cuda.Stream()
    for _ in range(3):
        with recompute():
            z = norm.normalized(norm.input())
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                y = z.to(norm.of_output)
            torch.cuda.current_stream().wait_stream(stream)
            loss = (y * norm.grad).sum()
        del z, y
        assert all(map(is_identical, torch.autograd.grad(loss, norm.leaves()), expected))


@pytest.mark.usefixtures("most_memory")
def test_beyond_32_bits():
    """Addresses in bytes. The elements are fewer than 2^31, as for the op's own kernels."""
    check(LayerNorm((1 << 20, 1536)))
