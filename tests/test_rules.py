"""Each rule of recompute alone: values, gradients, strides, and that it saves something."""

import contextlib
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import activations_cuda
from activations_cuda import _C, recompute
from activations_cuda.recipes import norms, rules
from activations_cuda.recipes.rules import RULES
from activations_cuda.recipes.verification import forget_choices, is_identical
from recomputing import Keep, Scope, compare, same_with_scope

pytestmark = pytest.mark.usefixtures("no_hidden_errors")

# By the names of the nodes that they reach. The input is (2, 8, 4, 4).
OPS = {
    "relu": F.relu,
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.7),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "threshold": lambda x: F.threshold(x, 0.1, -2.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "glu": lambda x: F.glu(x, 1),
    "add": lambda x: x + x.flip(0),
    "add_alpha": lambda x: torch.add(x, x.flip(0), alpha=0.3),
    "add_number": lambda x: x + 0.3,
    "add_number_alpha": lambda x: torch.add(x, 7, alpha=0.3),
    "sub": lambda x: torch.sub(x, x.flip(0), alpha=0.3),
    "sub_tensor": lambda x: x - x.flip(0),
    "sub_of_a_number": lambda x: x - x[0, 0, 0, 0].float().mul(1.1),
    "div_by_channels": lambda x: x / x.amax((2, 3), keepdim=True),
    "div_by_a_number": lambda x: x / x[0, 0, 0, 0].float().mul(1.1),
    "sub_number": lambda x: x - 0.3,
    "rsub": lambda x: torch.rsub(x, x.flip(0)),
    "rsub_number": lambda x: 0.3 - x,
    "mul_scalar": lambda x: x * 0.3,
    "mul_of_a_scalar": lambda x: torch.ops.aten.mul.Scalar(x, 0.3),
    "div_of_a_scalar": lambda x: torch.ops.aten.div.Scalar(x, 3),
    "mul": lambda x: x * x,
    "broadcast": lambda x: x * x.mean((2, 3), keepdim=True).sigmoid(),
    "div_scalar": lambda x: x / 3,
    "div": lambda x: x / x.flip(0).exp(),
    "pow": lambda x: x**3,
    "square": torch.square,
    "sqrt": lambda x: x.abs().sqrt(),
    "rsqrt": lambda x: x.abs().rsqrt(),
    "reciprocal": torch.reciprocal,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": lambda x: x.abs().log(),
    "log2": lambda x: x.abs().log2(),
    "log10": lambda x: x.abs().log10(),
    "log1p": lambda x: x.abs().log1p(),
    "logaddexp": lambda x: torch.logaddexp(x, x.flip(0)),
    "erf": torch.erf,
    "erfc": torch.erfc,
    "sin": torch.sin,
    "cos": torch.cos,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "asinh": torch.asinh,
    "atan": torch.atan,
    "atan2": lambda x: torch.atan2(x, x.flip(0)),
    "hypot": lambda x: torch.hypot(x, x.flip(0)),
    "abs": torch.abs,
    "neg": torch.neg,
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp_min": lambda x: x.clamp_min(0),
    "clamp_max": lambda x: x.clamp(max=0.5),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "minimum": lambda x: torch.minimum(x, x.flip(0)),
    "lerp": lambda x: torch.lerp(x, x.flip(0), 0.3),
    "lerp_tensor": lambda x: torch.lerp(x, x.flip(0), x.sigmoid()),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.3),
    "addcmul_of_one": lambda x: torch.addcmul(x, x.flip(0), x),
    "addcmul_of_channels": lambda x: torch.addcmul(x[..., :1, :1], x, x.amax((2, 3), keepdim=True)),
    "addcmul_of_a_number": lambda x: torch.addcmul(x, x.flip(0), x[0, 0, 0, 0].float().mul(1.1)),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.exp(), value=0.3),
    "where": lambda x: torch.where(x > 0, x, x.flip(0)),
    "masked_fill": lambda x: x.masked_fill(x > 0.5, -3.5),
    "masked_fill_never": lambda x: x.masked_fill(x > 50, -3.5),
    "masked_fill_broadcast": lambda x: x.masked_fill(x.detach().select(-1, 0).unsqueeze(-1) > 0.5, -3.5),
    "masked_fill_of_fewer_dimensions": lambda x: x.masked_fill(x.detach()[0] > 0.5, -3.5),
    "dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "cast": lambda x: x.double(),
    "clone": torch.clone,
    "contiguous": lambda x: x.transpose(1, -1).contiguous(),
    "cat": lambda x: torch.cat([x, x.flip(0)], 1),
    "cat_with_nothing": lambda x: torch.cat([x.new_empty(2, 0, 4, 4), x, x.new_empty(0)], -3),
    "stack": lambda x: torch.stack([x, x], 1),
    "pad": lambda x: F.pad(x, (0, 1, 2, 0), value=0.25),
    "pad_by_nothing": lambda x: F.pad(x, (0, 0, 0, 0)),
    "pad_3d": lambda x: F.pad(x[None], (1, 1, 0, 2, 1, 0), value=0.25),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "reflect_1d": lambda x: F.pad(x.flatten(2), (1, 1), mode="reflect"),
    "reflect_3d": lambda x: F.pad(x[None], (1, 1, 1, 1, 1, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "roll": lambda x: x.roll(1, 2),
    "flip": lambda x: x.flip(1),
    "repeat": lambda x: x.repeat(2, 1, 1, 1),
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(1),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest_of_any_size": lambda x: F.interpolate(x, size=(6, 3)),
    "nearest_1d": lambda x: F.interpolate(x.flatten(2), scale_factor=2),
    "nearest_3d": lambda x: F.interpolate(x[None], scale_factor=2),
    "nearest_exact": lambda x: F.interpolate(x, size=(6, 3), mode="nearest-exact"),
    "nearest_exact_by_whole_numbers": lambda x: F.interpolate(x, scale_factor=(2, 3), mode="nearest-exact"),
    "nearest_exact_1d": lambda x: F.interpolate(x.flatten(2), scale_factor=1.7, mode="nearest-exact"),
    "nearest_exact_3d": lambda x: F.interpolate(x[None], scale_factor=2, mode="nearest-exact"),
    "linear": lambda x: F.interpolate(x.flatten(2), scale_factor=2, mode="linear"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bilinear_with_corners": lambda x: F.interpolate(x, size=(7, 9), mode="bilinear", align_corners=True),
    "bicubic": lambda x: F.interpolate(x, size=(1, 1), mode="bicubic"),  # a GPU adds up others' gradients in any order
    "trilinear": lambda x: F.interpolate(x[None], scale_factor=2, mode="trilinear"),
    "avg_pool": lambda x: F.avg_pool2d(x, 2),
    "avg_pool_3d": lambda x: F.avg_pool3d(x[None], 2),
    "adaptive_avg_pool": lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
    "adaptive_avg_pool_3d": lambda x: F.adaptive_avg_pool3d(x[None], (3, 2, 3)),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool2d(x, (2, 3)),
    "adaptive_max_pool_3d": lambda x: F.adaptive_max_pool3d(x[None], (3, 2, 3)),
    "max_pool": lambda x: F.max_pool2d(x, 2),
    "max_pool_3d": lambda x: F.max_pool3d(x[None], 2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
    "channel_shuffle": nn.ChannelShuffle(2),
    "im2col": lambda x: F.unfold(x, 3, padding=1),
    "rot90": lambda x: x.rot90(1, (2, 3)),
    "index_select": lambda x: x.index_select(1, torch.tensor([1, 0], device=x.device)),
    "index": lambda x: x[torch.tensor([1, 0, 1], device=x.device)],
    "index_of_several": lambda x: x[:, [3, 0], [1, 2]],
    "index_of_some": lambda x: torch.ops.aten._unsafe_index(x, [None, torch.tensor([1, 0], device=x.device)]),
    "gather": lambda x: x.gather(1, torch.ones(2, 3, 4, 4, dtype=torch.long, device=x.device)),
    "view": lambda x: x.reshape(2, 2, -1).relu(),
    "select": lambda x: x[:, 1].relu(),
    "slice": lambda x: x[:, 1:6:2].relu(),
    "split": lambda x: x.split(3, 1)[1].relu(),
    "split_with_sizes": lambda x: x.split([3, 5], 1)[1].relu(),
    "chunk": lambda x: x.chunk(2, 1)[1].relu(),
    "unbind": lambda x: x.unbind(1)[2].relu(),
    "expand": lambda x: x[:, :1].expand(-1, 3, -1, -1).relu(),
    "transpose": lambda x: x.mT.relu(),
    "permute": lambda x: x.permute(0, 2, 3, 1).relu(),
    "squeeze": lambda x: x[:, :1].squeeze(1).relu(),
    "diagonal": lambda x: x.diagonal(0, 2, 3).relu(),
    "unfold": lambda x: x.unfold(2, 2, 1).relu(),
    "relu_inplace": lambda x: F.relu_(x * 1),
    "relu6_inplace": lambda x: F.relu6(x * 1, inplace=True),
    "silu_inplace": lambda x: F.silu(x * 1, inplace=True),
    "leaky_inplace": lambda x: F.leaky_relu_(x * 1),
    "elu_inplace": lambda x: F.elu_(x * 1),
    "selu_inplace": lambda x: F.selu_(x * 1),
    "celu_inplace": lambda x: F.celu_(x * 1, 0.7),
    "threshold_inplace": lambda x: F.threshold_(x * 1, 0.1, -2.5),
    "rrelu_inplace": lambda x: F.rrelu_(x * 1, training=True),
    "rrelu_inplace_in_evaluation": lambda x: F.rrelu_(x * 1),
    "hardswish_inplace": lambda x: F.hardswish(x * 1, inplace=True),
    "add_number_inplace": lambda x: (x * 1).add_(0.3),
    "sub_number_inplace": lambda x: (x * 1).sub_(0.3),
    "mul_inplace": lambda x: (x * 1).mul_(0.3),
    "view_inplace": lambda x: F.leaky_relu_((x * 1).view(1, *x.shape)),
    "view_inplace_twice": lambda x: F.leaky_relu_((x * 1).view(1, *x.shape).mul_(0.3)),
}
# Whose bits vary with the layout on the CPU, that of an operand here, which isn't known.
SAVED_ON_CPU = {"add_alpha", "addcmul_of_channels", "celu_inplace", "elu_inplace", "lerp", "linear", "rsqrt", "selu_inplace"}
SAVED_ON_CPU |= {"sub", "trilinear"}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_rule(name, dtype, layout, device):
    torch.manual_seed(0)
    images = torch.randn(2, 8, 4, 4, device=device).to(dtype).contiguous(memory_format=LAYOUTS[layout])
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(8, device=device).to(dtype))

    def loss(model):
        x = Keep.apply(Keep.apply(images * model.weight.view(1, 8, 1, 1)))
        saved = Keep.apply(x)
        return saved.float().sum() + Keep.apply(OPS[name](x)).float().sum()

    if (name, dtype) == ("cast", torch.float64):
        pytest.skip("it isn't a cast")
    try:
        before, after, _ = compare(model, loss)
    except NotImplementedError as error:
        pytest.skip(str(error))
    assert after < before
    with Scope(check=False) as scope:
        output = loss(model)
    is_rounded_before = "rrelu" in name and "evaluation" not in name and dtype.itemsize == 2
    assert scope.values()[-1].is_recipe == (not is_rounded_before and (device == "cuda" or name not in SAVED_ON_CPU))
    del output


def test_prelu_and_embedding(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.PReLU(8)).to(device)
    indices = torch.randint(50, (4, 8), device=device)

    def loss(model):
        return Keep.apply(model[1](Keep.apply(model[0](indices)))).sum()

    before, after, count = compare(model, loss)
    assert count[True] >= 2 and after < 0.5 * before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", ["gelu", "gelu_tanh", "silu", "hardswish", "mish"])
def test_smooth_activations(function, dtype, device):
    """This package's save their input in the scope, not a code, and follow from it."""
    torch.manual_seed(0)
    x = torch.randn(4, 8, 6, 6, device=device, dtype=dtype, requires_grad=True)
    parameters = {"gelu": ("none",), "gelu_tanh": ("tanh",)}.get(function, ())
    with Scope() as scope:
        y = getattr(_C, function.removesuffix("_tanh"))(Keep.apply(x), *parameters)
        loss = Keep.apply(y).sum()
    assert [value.arguments for value in scope.values() if value.source == "SmoothBackward"] == [parameters]
    (grad,) = torch.autograd.grad(loss, x)
    reference = getattr(F, function.removesuffix("_tanh"))
    options = {} if not parameters else {"approximate": parameters[0]}
    assert torch.equal(grad, torch.autograd.grad(Keep.apply(reference(Keep.apply(x), **options)).sum(), x)[0])


def test_movements_in_the_half_type_that_it_came_from(device):
    """Under autocast some of PyTorch's ops that move elements do so in float32."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 4, 4, device=device, dtype=torch.bfloat16, requires_grad=True)
    with Scope() as scope:
        up = torch.cat([F.interpolate(x.float(), scale_factor=2), x.repeat(1, 2, 2, 2)], 1).flip(1)
        half = up.bfloat16()
        loss = (Keep.apply(up) + Keep.apply(half)).sum()
    moved = {value.source: value for value in scope.values() if value.is_recipe and value.sizes == list(up.shape)}
    for source, tensor, casts in ("FlipBackward0", up, 1), ("ToCopyBackward0", half, 0):
        with torch.profiler.profile() as profile, torch.no_grad():
            found = moved[source].compute()
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype and found.stride() == tensor.stride()
        assert sum(event.name == "aten::_to_copy" for event in profile.events()) == casts
    assert torch.autograd.grad(loss, x)[0].isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("factors", [(2, 2), (5, 1), (3, 1), (1.5, 4)], ids=str)
def test_nearest_of_what_nobody_has(factors, layout, device):
    """As in an autoencoder's decoder, whose blocks end with a sum."""

    def loss(model):
        x = model(images) + 1
        return Keep.apply(F.interpolate(x, scale_factor=factors)).square().sum()

    torch.manual_seed(0)
    images = torch.randn(2, 3, 6, 6, device=device)
    model = nn.Conv2d(3, 8, 3, padding=1).to(device, memory_format=LAYOUTS[layout])
    compare(model, loss)
    with Scope() as scope:
        output = loss(model)
    (up,) = (value for value in scope.values() if value.source == "UpsampleNearest2DBackward0")
    is_whole = all(float(factor).is_integer() for factor in factors) and math.prod(factors) >= rules.MIN_REPETITIONS
    assert up.is_recipe == is_whole and (not is_whole or up.roots[0].sizes == [2, 8, 6, 6])
    del output


def grouped(keys):
    """As transformers repeats them for each of the queries' heads."""
    return keys[:, :, None].expand(-1, -1, 4, -1, -1).reshape(2, 32, 4, 4)


OF_PARTS = {
    "expanded and reshaped": grouped,
    "expanded and copied": lambda x: x[:, :, None].expand(-1, -1, 4, -1, -1).contiguous(),
    "repeated and interleaved": lambda x: x.repeat_interleave(4, dim=1),
    "expanded in front": lambda x: x.expand(4, -1, -1, -1, -1).contiguous(),
    "repeated": lambda x: x.repeat(4, 1, 1, 1),
    "repeated in front": lambda x: x.repeat(4, 1, 1, 1, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OF_PARTS)
def test_repetitions_of_what_nobody_has(name, dtype, layout, device):
    """One is saved, which the scope's user may not have written to."""

    def loss(model):
        x = model(images) + 1
        return Keep.apply(OF_PARTS[name](x)).float().square().sum()

    torch.manual_seed(0)
    images = torch.randn(2, 3, 4, 4, device=device).to(dtype)
    model = nn.Conv2d(3, 8, 1).to(device, dtype, memory_format=LAYOUTS[layout])
    compare(model, loss)
    with Scope() as scope:
        output = loss(model)
    many = next(value for value in scope.values() if math.prod(value.sizes) == 4 * 2 * 8 * 4 * 4)
    assert many.is_recipe and [math.prod(root.sizes) for root in many.roots] == [2 * 8 * 4 * 4]
    del output


def test_what_a_mask_has_picked_is_saved(device):
    """Its size depends on values."""
    x = torch.randn(2, 8, 4, 4, device=device, requires_grad=True)
    with Scope() as scope:
        loss = Keep.apply(Keep.apply(x)[x.detach() > 0]).sum()
    assert not any(value.is_recipe and value.source == "IndexBackward0" for value in scope.values())
    plain = Keep.apply(Keep.apply(x)[x.detach() > 0]).sum()
    assert torch.equal(*(torch.autograd.grad(each, x)[0] for each in (loss, plain)))


@pytest.mark.parametrize("scales", [(3.0, 3.2), (3.2, 3.0)], ids=str)
def test_nearest_by_scales_of_the_same_sizes(scales, device):
    x = torch.randn(2, 8, 4, 4, device=device, requires_grad=True)
    for scale in scales:
        with Scope(check=False):
            loss = Keep.apply(F.interpolate(x * 1, scale_factor=scale)).sum()
        (grad,) = torch.autograd.grad(loss, x)
        assert torch.equal(grad, torch.autograd.grad(Keep.apply(F.interpolate(x * 1, scale_factor=scale)).sum(), x)[0])


def test_movements_of_both_half_types(device):
    """Together they are float32."""
    torch.manual_seed(0)
    x, y = (torch.randn(2, 8, 4, 4, device=device, dtype=dtype) for dtype in (torch.bfloat16, torch.float16))
    x, y = x.requires_grad_(), y.requires_grad_()
    with Scope() as scope:
        both = torch.cat([x.float(), y.float()], 1).flip(1)
        loss = Keep.apply(both.half()).sum() + Keep.apply(both).sum()
    recipes = {value.source: value for value in scope.values() if value.is_recipe}
    assert torch.equal(recipes["ToCopyBackward0"].compute(), both.half())
    assert torch.equal(recipes["FlipBackward0"].compute(), both)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss, (x, y)))


@pytest.mark.parametrize("join", [lambda x, y: torch.cat([x, y], 1), lambda x, y: torch.stack([x, y], 1)], ids=["cat", "stack"])
def test_joined_with_what_is_unknown(join, device):
    x, constant = torch.randn(2, 8, device=device, requires_grad=True), torch.randn(2, 8, device=device)
    with Scope() as scope:
        loss = Keep.apply(join(constant, x.exp())).sum()
    assert not any(value.is_recipe and value.source in ("CatBackward0", "StackBackward0") for value in scope.values())
    (expected,) = torch.autograd.grad(Keep.apply(join(constant, x.exp())).sum(), x)
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


@pytest.mark.parametrize("sizes", [(9, 9), (256, 256), (257, 256)], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
def test_indices_of_max_pooling_in_fewer_bytes(layout, sizes, device):
    dtype = torch.uint16 if math.prod(sizes) <= 2**16 else torch.int32
    x = torch.randn(1, 8, *sizes, device=device).contiguous(memory_format=layout).requires_grad_()
    with Scope() as scope:
        input = Keep.apply(x)
        y = F.max_pool2d(input, 3, 2, 1)
        loss = Keep.apply(y).sum()
    assert [value.sizes for value in scope.values() if value.is_recipe] == [list(y.shape)] * 2  # and what they point at
    kept = {tensor.dtype: tensor.nbytes for tensor in scope.tensors()}
    assert set(kept) == {torch.float32, dtype} and kept[dtype] == y.numel() * dtype.itemsize
    plain = Keep.apply(F.max_pool2d(Keep.apply(x), 3, 2, 1)).sum()
    assert torch.equal(*(torch.autograd.grad(each, x)[0] for each in (loss, plain)))


def test_indices_that_somebody_has_stay(device):
    x = torch.randn(2, 8, 8, 8, device=device, requires_grad=True)
    with Scope() as scope:
        input = Keep.apply(x)
        y, indices = F.max_pool2d(input, 2, return_indices=True)
        loss = Keep.apply(y).sum()
    assert any(not value.is_recipe and value.sizes == list(indices.shape) for value in scope.values())
    indices.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_max_pooling_within_other_hooks(device):
    """Which were given the indices already."""
    x = torch.randn(1, 8, 9, 9, device=device, requires_grad=True)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor.detach(),), lambda packed: packed[0]),
        Scope() as scope,
    ):
        loss = Keep.apply(F.max_pool2d(Keep.apply(x), 2)).sum()
    assert [value.source for value in scope.values() if value.is_recipe] == ["MaxPool2DWithIndicesBackward0"]
    plain = Keep.apply(F.max_pool2d(Keep.apply(x), 2)).sum()
    assert torch.equal(*(torch.autograd.grad(each, x)[0] for each in (loss, plain)))


def test_numbers_that_need_all_bytes_stay(monkeypatch, device):
    """What is downcast is compared like any recipe."""
    monkeypatch.setattr(rules, "math", SimpleNamespace(prod=lambda sizes: 1))
    x = torch.arange(2**17, dtype=torch.float32, device=device).view(1, 1, -1, 2**8).requires_grad_()
    for _ in range(2):
        with Scope(check=False) as scope:
            input = Keep.apply(x)
            y = F.max_pool2d(input, 2)
            loss = Keep.apply(y).sum()
        assert [value.is_recipe for value in scope.values() if value.sizes == list(y.shape)] == [False, True]
        (grad,) = torch.autograd.grad(loss, x)
        assert torch.equal(grad, torch.autograd.grad(Keep.apply(F.max_pool2d(Keep.apply(x), 2)).sum(), x)[0])


@pytest.mark.parametrize("is_residual", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
def test_writes_to_views(dims, is_residual, device):
    """PyTorch's instance norm returns a view."""
    torch.manual_seed(0)
    convolution, norm = (nn.Conv2d, nn.InstanceNorm2d) if dims == 2 else (nn.Conv3d, nn.InstanceNorm3d)
    model = nn.Sequential(convolution(3, 8, 3, padding=1), norm(8, affine=True), convolution(8, 8, 3, padding=1), norm(8))
    model = model.append(convolution(8, 4, 1)).to(device)
    images = torch.randn(2, 3, *(5,) * dims, device=device)

    def loss(model):
        x = F.leaky_relu_(model[1](model[0](images)), 0.2)
        y = model[3](model[2](x))
        if is_residual:
            y += x
        return model[4](F.relu_(y)).square().sum()

    before, after, _ = compare(model, loss)
    assert after <= 0.6 * before
    with Scope() as scope:
        output = loss(model)
    made_by = {root.source for value in scope.values() for root in value.roots}
    assert made_by <= {None, "ConvolutionBackward0", "RepeatBackward0", "NativeBatchNormBackward0", "CudnnBatchNormBackward0"}
    del output


def equal_in_every_batch(gradient, batches):
    """What the first batch, which looks alike by another formula, has let pass."""
    forget_choices()
    for x in batches:
        for _ in range(2):
            assert torch.equal(gradient(x, contextlib.nullcontext), gradient(x, recompute))


def test_a_view_in_another_order_than_its_base(device):
    """Autograd makes it anew, by strides, once an op in place has written to the base."""

    def gradient(x, scope):
        x = x.clone().requires_grad_()
        with scope():
            y = x * 1
            view = y.permute(0, 2, 3, 1)
            F.leaky_relu_(y, 0.5)
            (Keep.apply(y).sum() + Keep.apply(view * 3).sum()).backward()
        return x.grad

    first = torch.randn(64, 1, 1, 1, device=device).expand(64, 4, 8, 8)
    batches = first, torch.randn(64, 4, 8, 8, device=device)
    equal_in_every_batch(gradient, [each.contiguous(memory_format=torch.channels_last) for each in batches])


def test_a_number_that_is_rounded_in_place(device):
    def gradient(x, scope):
        x = x.clone().requires_grad_()
        with scope():
            y = Keep.apply(x)
            z = torch.ops.aten.mul_.Scalar(y * 1, 0.3)
            loss = (Keep.apply(y) + Keep.apply(z)).float().sum()
        return torch.autograd.grad(loss, x)[0]

    ones = torch.ones(64, 256, dtype=torch.bfloat16, device=device)
    equal_in_every_batch(gradient, [ones.tril(), torch.randn(64, 256, device=device).bfloat16()])


def test_a_write_that_a_view_does_not_explain(device):
    def gradient(x, scope):
        x = x.clone().requires_grad_()
        with scope():
            kept = Keep.apply(x)
            y = kept * 1
            y.view(-1).mul_(2)
            with torch.no_grad():
                y.clamp_(max=6)  # which changes nothing in the first batch
            loss = (Keep.apply(kept) + Keep.apply(y)).sum()
        return torch.autograd.grad(loss, x)[0]

    x = torch.rand(64, 256, device=device)
    equal_in_every_batch(gradient, [x, 9 * x])


def test_hooks_outside_see_indices_once(device):
    seen = []
    x, index = torch.randn(2, 2, 64, 4, device=device, requires_grad=True), torch.randint(64, (2**15,), device=device)
    with torch.autograd.graph.saved_tensors_hooks(seen.append, lambda packed: packed), recompute():
        Keep.apply((x * 1)[:, :, index])
    assert len(seen) == 2


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x[:, 1:].mul_(2),
        lambda x: x.view(-1)[::2].mul_(2),
        lambda x: x.transpose(1, 2).mul_(2),
        lambda x: x.view(-1)[8:].view(-1, 8).relu_(),
    ],
    ids=["part", "every other", "transposed", "end"],
)
def test_writes_to_other_views(write, device):
    def run(scope):
        torch.manual_seed(0)
        x = torch.randn(2, 8, 4, 4, device=device, requires_grad=True)
        with scope():
            z = Keep.apply(x)
            saved, y = Keep.apply(z), z * 1
            write(y)
            (saved.sum() + Keep.apply(y).sum()).backward()
        return [x.grad]

    same_with_scope(run)


def test_every_rule_is_tried():
    """What no test reaches may be wrong."""
    others = {
        "MaskedScaleBackward",
        "SmoothBackward",
        "PreluKernelBackward0",
        "EmbeddingBackward0",
        "ReshapeAliasBackward0",
        "AliasBackward0",
    }
    others |= {name for name in RULES if "Norm" in name}
    reached = set()
    for function in OPS.values():
        x = torch.randn(2, 8, 4, 4, requires_grad=True)
        nodes = [function(x * 1).grad_fn]
        while nodes:
            node = nodes.pop()
            reached.add(node.name())
            nodes += [each for each, _ in node.next_functions if each is not None]
    assert set(RULES) - others - reached == {
        "SqueezeBackward0",
        "SqueezeBackward2",
        "TBackward0",
        "UnsafeViewBackward0",
        "PowBackward1",
        "ReplicationPad1DBackward0",
        "ReplicationPad3DBackward0",
        "ClampBackward0",
        "ClampMaxBackward0",
    }


NORMS = {
    "batch": lambda: nn.BatchNorm2d(8),
    "batch_eval": lambda: nn.BatchNorm2d(8).eval(),
    "batch_plain": lambda: nn.BatchNorm2d(8, affine=False),
    "layer": lambda: nn.LayerNorm(4),
    "layer_2d": lambda: nn.LayerNorm((4, 4)),
    "layer_plain": lambda: nn.LayerNorm(4, elementwise_affine=False),
    "layer_without_bias": lambda: nn.LayerNorm(4, bias=False),
    "group": lambda: nn.GroupNorm(2, 8),
    "group_plain": lambda: nn.GroupNorm(2, 8, affine=False),
    "instance": lambda: nn.InstanceNorm2d(8),
    "instance_affine": lambda: nn.InstanceNorm2d(8, affine=True),
    "rms": lambda: nn.RMSNorm(4),
}
MODES = "float32", "bfloat16 autocast", "float16 autocast", "bfloat16", "channels_last"


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NORMS)
def test_norm(name, mode, frozen, device):
    torch.manual_seed(0)
    norm = NORMS[name]()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_().requires_grad_(not frozen)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(), nn.Conv2d(8, 4, 1)).to(device)
    images = torch.randn(4, 3, 4, 4, device=device)
    if mode == "bfloat16":
        net, images = net.bfloat16(), images.bfloat16()
    if mode == "channels_last":
        net, images = net.to(memory_format=torch.channels_last), images.contiguous(memory_format=torch.channels_last)
    autocast = getattr(torch, mode.split()[0]) if "autocast" in mode else None

    def loss(model):
        with torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None):
            return model(images).float().square().mean()

    before, after, _ = compare(net, loss, steps=3)
    assert after < before or (frozen and name == "instance_affine")  # whose bias is repeated


@pytest.mark.parametrize("shape", [(64, 16), (8, 16, 20), (4, 16, 6, 8), (2, 16, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_batch_norm_of_any_dimension(shape, dtype, device):
    torch.manual_seed(0)
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    model = kind(16).to(device)
    nn.init.normal_(model.weight)
    model.scale = nn.Parameter(torch.ones(16, *(1,) * (len(shape) - 2), device=device))
    x = torch.randn(shape, device=device)

    def loss(model):
        return Keep.apply(model(Keep.apply((x * model.scale).to(dtype)))).float().square().mean()

    before, after, _ = compare(model, loss, steps=3)
    assert after < before


@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_as_it_is_initialized_proves_no_formula(weight, dtype, monkeypatch):
    """With such a weight and without a bias many formulas agree, and the next step needs the right one."""

    def unfused(x, w, b, mean, invstd, eps):
        x, w, b, mean, invstd = norms._wide(x, *norms._of_channels(x, w, b, mean, invstd))
        return (x * (invstd * w) + (b - mean * (invstd * w))).to(dtype)

    rule = norms.batch_norm(torch.native_batch_norm, "eps", (unfused,))
    monkeypatch.setitem(RULES, "NativeBatchNormBackward0", rule)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)).to(dtype)
    net[1].float().bias.requires_grad_(False)  # in which a small weight would get lost
    nn.init.constant_(net[1].weight, weight)

    def loss(model):
        return model(torch.randn(2, 3, 16, 16, dtype=dtype)).square().sum()

    forget_choices()
    compare(net, loss, steps=3)
    assert rule.formula.formulas[-1] in _C.recipes.chosen().values()


def test_a_rule_of_the_first_output_is_not_for_others():
    with Scope() as scope:
        x = torch.randn(4, 4, 8, requires_grad=True)
        output, _ = F.max_pool1d(Keep.apply(x * 2), 2, return_indices=True)
        Keep.apply(output).sum().backward()
    assert scope.count[False]


OURS = {
    "relu6": activations_cuda.relu6,
    "hardtanh": lambda x: activations_cuda.hardtanh(x, -0.5, 0.75),
    "hardsigmoid": activations_cuda.hardsigmoid,
    "threshold": lambda x: activations_cuda.threshold(x, 0.1, 2),
    "relu6_inplace": lambda x: activations_cuda.relu6(x.clone(), inplace=True),
    "gelu": activations_cuda.gelu,
    "silu_inplace": lambda x: activations_cuda.silu(x.clone(), inplace=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OURS)
def test_this_packages_activations(name, dtype, device):
    torch.manual_seed(0)
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(64, 64, device=device).to(dtype))

    def loss(model):
        return Keep.apply(OURS[name](Keep.apply(model.weight * 2))).float().sum()

    before, after, _ = compare(model, loss)
    assert after < before


def test_a_gradient_is_no_activation():
    def run(scope):
        x = torch.linspace(-2, 2, 64, requires_grad=True)
        with scope():
            (grad,) = torch.autograd.grad(activations_cuda.hardtanh(x).square().sum(), x, create_graph=True)
            (grad.exp() * grad.sin()).sum().backward()
        return [x.grad, grad]

    same_with_scope(run)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_infinities(training, device):
    """In a small tensor of a half type formulas agree until some of them overflow."""

    def run(scope):
        torch.manual_seed(0)
        result = []
        norm = nn.BatchNorm1d(7, device=device, dtype=torch.bfloat16).train(training)
        nn.init.constant_(norm.weight, 3.0)
        for step in range(2):
            x = torch.randn(5, 7, device=device, dtype=torch.bfloat16)
            if step > 0:
                x[0, 0], x[1, 1], x[2, 2], x[3, 2] = 1.5e38, math.inf, -1.5e38, 1.5e38
            with scope():
                y = norm(Keep.apply(x.requires_grad_())).float()
                loss = Keep.apply(y).sum()
            result += torch.autograd.grad(loss, y)
        return result

    same_with_scope(run)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["layer", "batch"])
def test_norms_without_a_bias_close_to_the_mean(name, weight_dtype, device):
    """Where formulas differ, also in tensors so small that few of their elements do."""
    if device == "cuda" and name == "layer" and weight_dtype is torch.float32:
        pytest.skip("PyTorch has no such op")
    function = {
        "layer": lambda x, mean, var, weight: F.layer_norm(x, x.shape[1:], weight),
        "batch": lambda x, mean, var, weight: F.batch_norm(x, mean, var, weight),
    }[name]
    for seed in range(10):
        torch.manual_seed(seed)
        for shape in (5, 2), (30, 2), (12, 5):
            numbers = [torch.randn(shape[1], device=device) for _ in range(3)]
            mean, var, weight = (each.to(weight_dtype) for each in (numbers[0], numbers[1].square(), numbers[2]))
            weight.requires_grad_()
            for spread in 1, 0.01, 0:
                center = 1 if name == "layer" else mean.detach()
                x = (center + spread * torch.randn(shape, device=device)).bfloat16().requires_grad_()

                def run(scope, x=x, mean=mean, var=var, weight=weight):
                    with scope:
                        y = function(Keep.apply(x), mean, var, weight)
                        kept = Keep.apply(y)
                    return torch.autograd.grad(kept, y, torch.ones_like(kept))[0]  # y, as it was saved

                assert torch.equal(run(contextlib.nullcontext()), run(Scope(check=False)))


@pytest.mark.parametrize("norm", [F.batch_norm, F.group_norm], ids=lambda norm: norm.__name__)
def test_zeros_of_a_norm_without_a_bias(norm, device):
    """With their signs."""
    weight = torch.tensor([1.0, -1.0] * 4, device=device, requires_grad=True)
    for values in torch.randn(4, 8, 16, 16, device=device), torch.randn(4, 8, 16, 16, device=device).sign() * 0:
        x = values.requires_grad_()

        def run(scope, x=x):
            with scope:
                kept = Keep.apply(x)
                if norm is F.batch_norm:
                    y = norm(kept, torch.zeros(8, device=device), torch.ones(8, device=device), weight)
                else:
                    y = norm(kept, 2, weight)
                z = Keep.apply(y)
            return torch.autograd.grad(z, y, torch.ones_like(z))[0]

        assert is_identical(run(contextlib.nullcontext()), run(Scope(check=False)))


def test_trials_tell_signs_of_zeros_apart():
    def product_as_shift(x, w, b, mean, rstd, out):
        return torch.addcmul(-mean * (rstd * w), x, rstd * w)

    formula = norms._formula("product_as_shift", norms._of_channels, product_as_shift)
    x, weight, eps = torch.randn(4, 8, 16, 16), torch.randn(8), 1e-5
    statistics = norms.BATCH_NORM_IN_EVALUATION.op(x, weight, None, (weight,), eps)[1:]
    for formulas, chosen in ((formula,), (None, None)), ((norms.batch_norm_affine,), (norms.batch_norm_affine, True)):
        candidates = replace(norms.BATCH_NORM_IN_EVALUATION, on_cpu=formulas)
        assert candidates.choose(x, weight, None, *statistics, eps) == chosen
