"""The kernel that computes a chain of recipes: the same bits as the formulas of which the chain consists."""

import dataclasses
import itertools
import math
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import activations_cuda
from activations_cuda import _C, recompute
from activations_cuda.recipes import formulas, norms, programs, verification
from activations_cuda.recipes.formulas import FORMULAS, Facts
from activations_cuda.recipes.rules import RULES, SPLIT
from activations_cuda.recipes.verification import Candidates, forget_choices, is_identical
from answers import check_within_hooks_that_give_back_once
from nets import NewGelu
from recomputing import Keep, Scope, compare

pytestmark = pytest.mark.usefixtures("no_hidden_errors")

DTYPES = torch.float32, torch.bfloat16, torch.float16
PROGRAMS = {formula: facts.program for formula, facts in FORMULAS.items() if facts.program is not None}
SPECIAL = math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 6.0, -3.0, 3.0, 0.5
# In vectors of eight, of four, and in none; rows that end within vectors, of which the last thread has fewer.
SHAPES = (4, 64, 8, 8), (2, 16, 14, 14), (3, 12, 7, 5), (2, 16, 3, 3), (1, 8, 3, 3), (2, 9, 8, 8), (2, 6, 6, 6), (1, 2, 1, 1)


def numbers(shape, device, dtype=torch.float32):
    x = torch.randn(shape, device=device, dtype=torch.float32).mul_(3)
    if x.numel() > len(SPECIAL):
        x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL, device=device)
    return x.to(dtype)


def fused(formula, operands, arguments, like):
    return _C.recipes.fused(_C.recipes.recipe(like, formula, operands, arguments))


def operands_of(formula, x):
    """What a formula is given beside x, and arguments."""
    device, dtype = x.device, x.dtype
    n, channels, *spatial = x.shape
    weight, bias = numbers((channels,), device), numbers((channels,), device)
    mean, rstd = torch.randn(channels, device=device), torch.rand(channels, device=device)
    if formula.__name__.startswith("group_norm"):
        groups = 2 if channels % 2 == 0 else 3
        statistics = torch.randn(n, groups, device=device), torch.rand(n, groups, device=device)
        return (weight, bias, *statistics), (n, channels, math.prod(spatial), groups)
    if formula.__name__.startswith(("layer_norm", "rms_norm")):
        rows = (*x.shape[:-1], 1)
        weight, bias = numbers(x.shape[-1:], device), numbers(x.shape[-1:], device)
        mean, rstd = torch.randn(rows, device=device), torch.rand(rows, device=device)
        bias = None if formula is norms.layer_norm_centered_on_cpu else bias  # it adds 0 then
        return (weight, None, rstd) if formula is norms.rms_norm_scaled else (weight, bias, mean, rstd), (x.shape[-1:],)
    if formula.__name__.startswith("batch_norm"):
        return (weight, bias, mean, rstd), (1e-5,)
    others = {
        formulas.add: ((numbers(x.shape, device, dtype),), (1,)),
        formulas.sub: ((numbers(x.shape, device, dtype),), (1,)),
        torch.mul: ((numbers(x.shape, device, dtype),), ()),
        torch.div: ((numbers(x.shape, device, dtype),), ()),
        formulas.multiply_add: ((numbers(x.shape, device, dtype), numbers(x.shape, device, dtype)), ()),
        F.hardtanh: ((), (-0.3, 0.7)),
        _C.hardtanh: ((), (-0.3, 0.7)),
        formulas.dropout: ((torch.rand(x.shape, device=device) > 0.3,), (1.25, 1.25)),
        torch.Tensor.to: ((), (dtype,)),
        torch.pow: ((), (3,)),
    }
    return others.get(formula, ((), ()))


def case(formula, dtype, shape, layout, device):
    """A formula's input, what else it is given, its arguments and its output."""
    torch.manual_seed(0)
    x = numbers(shape, device, dtype).contiguous(memory_format=layout)
    operands, arguments = operands_of(formula, x)
    try:
        return x, operands, arguments, formula(x, *operands, *arguments)
    except NotImplementedError as error:  # an op of another device
        pytest.skip(str(error))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("formula", [f for f in PROGRAMS if f is not formulas.dropout], ids=lambda f: f.__name__)
def test_program(formula, dtype, shape, layout, device):
    x, operands, arguments, expected = case(formula, dtype, shape, layout, device)
    found = fused(formula, (x, *operands), arguments, expected)
    if found is None:
        # Whose exponential has other bits in vectors, which isn't contracted, or rounds in between.
        others = _C.silu, torch.tanh, formulas.multiply_add
        assert device == "cpu" and (formula in others or (formula is torch.pow and dtype is not torch.float32))
    elif not (device == "cpu" and formula in (norms.batch_norm_affine, norms.batch_norm_scaled)):  # may not be contracted
        assert is_identical(found, expected) and found.stride() == expected.stride()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [27, 144, 147])
def test_standardized_weights(size, dtype):
    """By a batch norm without a bias, in which a filter is a row, which may end within a vector."""
    torch.manual_seed(0)
    x, weight = numbers((1, 64, size), "cuda", dtype), numbers((64,), "cuda")
    mean, rstd = torch.randn(64, device="cuda"), torch.rand(64, device="cuda")
    expected = norms.batch_norm_elementwise(x, weight, None, mean, rstd, 1e-5)
    found = fused(norms.batch_norm_elementwise, (x, weight, None, mean, rstd), (1e-5,), expected)
    assert is_identical(found, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gate_of_each_sample(dtype, shape, layout):
    """Behind a norm and an activation, as in squeeze-and-excitation."""
    x, operands, arguments, z = case(norms.batch_norm_elementwise, dtype, shape, layout, "cuda")
    gate = torch.rand((*shape[:2], 1, 1), device="cuda").to(dtype)
    norm = _C.recipes.recipe(z, norms.batch_norm_elementwise, (x, *operands), arguments)
    relu = _C.recipes.recipe(z, torch.relu, (norm,), ())
    expected = torch.relu(z) * gate
    assert is_identical(fused(torch.mul, (relu, gate), (), expected), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("formula", [f for f in FORMULAS if FORMULAS[f].is_tabulated], ids=lambda f: f.__name__)
def test_table(formula, dtype, device):
    arguments = {torch.ops.aten.elu: (1.0, 1, 1), torch.pow: (3,), _C.hardshrink: (0.5,), _C.softshrink: (0.5,)}
    arguments |= {_C.threshold: (0.1, 2.0), _C.leaky_relu: (0.01,), F.celu: (0.7,), _C.gelu: ("none",)}
    arguments = arguments.get(formula, ())
    x = torch.randn(4, 64, 8, 9, device=device).mul_(4).to(dtype)
    expected = formula(x, *arguments)
    found = fused(formula, (x,), arguments, expected)
    assert (found is None) == (programs.table(formula, arguments, dtype, x) is None)
    if found is None:
        assert device == "cpu"
    else:
        assert is_identical(found, expected)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("formula", [*norms.NATIVE, norms.group_norm_affine, formulas.same], ids=lambda f: f.__name__)
def test_gradient(formula, dtype, shape, layout, device):
    """Through a recipe of a function's input: the gradient times two factors, one after the other."""
    x, operands, arguments, z = case(formula, dtype, shape, layout, device)
    recipe = _C.recipes.recipe(z, formula, (x, *operands), arguments)
    if device == "cpu" and formula in PROGRAMS and not is_identical(_C.recipes.fused(recipe), z):
        pytest.skip("not contracted on a CPU")
    derivative = torch.randn(2**16, 2, device=device)
    derivative[::7, 0] = -0.0  # selects
    derivative[torch.arange(2**16, device=device).to(torch.int16).view(dtype).isnan()] = math.nan  # payloads aren't preserved
    factors = derivative[z.view(torch.int16).long() & 0xFFFF]
    gradients = numbers(shape, device, dtype), numbers(shape[:2], device, dtype)[..., None, None].expand(shape)
    for grad in *gradients, numbers(shape[1:], device, dtype).expand(shape):  # of each element, a plane, and all samples
        selects = (factors[..., 0] == 0) & factors[..., 0].signbit()
        expected = torch.where(selects, 0, grad.float() * factors[..., 0] * factors[..., 1]).to(dtype)
        found = _C.recipes.gradient(recipe, grad, derivative)
        stride = torch.ops.aten.silu_backward(grad, z).stride()
        if found is None:
            assert stride != z.stride() or formula not in PROGRAMS
        else:
            assert is_identical(found, expected) and found.stride() == stride
    assert _C.recipes.gradient(recipe, grad.float(), derivative) is None
    kept = _C.recipes.recipe(z, torch.Tensor.as_strided, (z,), (z.shape, z.stride()))
    assert _C.recipes.gradient(kept, numbers(shape, device, dtype), derivative) is None  # nothing is computed for it


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("formula", [*norms.NATIVE, norms.group_norm_affine, formulas.same], ids=lambda f: f.__name__)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
def test_gradient_in_float32(layout, shape, formula, device):
    """By an instruction, whose exponential is CUDA's."""
    x, operands, arguments, z = case(formula, torch.float32, shape, layout, device)
    grad = numbers(shape, device).contiguous(memory_format=layout)
    found = _C.recipes.gradient(_C.recipes.recipe(z, formula, (x, *operands), arguments), grad, "silu_gradient")
    expected = torch.ops.aten.silu_backward(grad, z)
    if device == "cpu" or formula not in PROGRAMS:
        assert found is None
    else:
        assert is_identical(found, expected) and found.stride() == expected.stride()


@pytest.mark.parametrize("size", [16, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("view", "arguments"),
    [(torch.transpose, (0, 1)), (torch.transpose, (-1, 0)), (torch.permute, ((1, 0, 2),)), (torch.permute, ((2, -3, 1),))],
)
def test_dimensions_in_another_order(view, arguments, dtype, size, device):
    """A norm's output, cast and in the order in which attention takes it, is written once."""

    def recipe(formula, operands, arguments):
        like = formula(*(known[operand] for operand in operands if operand in known), *arguments)
        result = _C.recipes.recipe(like, formula, operands, arguments)
        known[result] = like
        return result

    known = {}
    x = numbers((6, 5, size), device)
    others, shape = operands_of(norms.layer_norm_centered_on_cpu, x)
    normed = norms.layer_norm_centered_on_cpu(x, *others, *shape)
    first = _C.recipes.recipe(normed, norms.layer_norm_centered_on_cpu, (x, *others), shape)
    known[first] = normed
    moved = recipe(view, (first,), arguments)
    copy = recipe(torch.Tensor.contiguous, (recipe(torch.Tensor.to, (moved,), (dtype,)),), ())
    copy.formula = formulas.same
    root = recipe(torch.reshape, (copy,), ((-1, known[copy].shape[-1]),))
    with torch.profiler.profile(profile_memory=True) as profile:
        found = _C.recipes.fused(root)
    assert is_identical(found, known[root])
    is_in_rows = size == 16 and arguments in ((0, 1), ((1, 0, 2),))
    if device == "cpu" and is_in_rows:
        allocated = [event.cpu_memory_usage for event in profile.events() if event.cpu_memory_usage > 0]
        assert allocated == [found.nbytes]


@pytest.mark.parametrize("exponent", [2, 3, 2.0, 0.5, -1, 4])
def test_power(exponent, device):
    x = numbers((4, 64), device)
    found = fused(torch.pow, (x,), (exponent,), x)
    if exponent in (2, 3):
        assert is_identical(found, torch.pow(x, exponent))
    else:
        assert found is None
    assert fused(torch.pow, (x, x), (), x) is None  # an exponent for each


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.gate = nn.BatchNorm2d(16), Gate()

    def forward(self, x):
        y = F.silu(self.norm(x))
        return y * self.gate(y)


class Residual(nn.Module):
    def __init__(self, shortcut=None):
        super().__init__()
        self.conv, self.norm, self.shortcut = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), shortcut

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)) + (x if self.shortcut is None else self.shortcut(x)))


class Branch(nn.Module):
    """As in a YOLO."""

    def __init__(self, activation):
        super().__init__()
        self.conv, self.norm, self.activation = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), activation

    def forward(self, x):
        return x + self.activation(self.norm(self.conv(x)))


class ScaledResidual(Residual):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        y = self.norm(self.conv(x))
        return F.relu(y * self.scale(y) + x)


class Gate(nn.Module):
    """Squeeze-and-excitation's."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Conv2d(16, 16, 1)

    def forward(self, x):
        return self.fc(x.mean((2, 3), keepdim=True)).sigmoid()


class StochasticDepth(nn.Module):
    def forward(self, x):
        return x.new_empty(len(x), 1, 1, 1).bernoulli_(0.7).div_(0.7)


class LayerScale(nn.Module):
    """ConvNeXt's residual sum, of a branch that is scaled by a parameter."""

    def __init__(self, depth=None):
        super().__init__()
        self.conv, self.weight, self.depth = nn.Conv2d(16, 16, 3, padding=1), nn.Parameter(torch.randn(16, 1, 1)), depth

    def forward(self, x):
        y = self.weight * self.conv(x)
        return (y if self.depth is None else y * self.depth(y)) + x


class ScaledBranch(nn.Module):
    """MetaFormer's residual sum, of a norm that is scaled by a parameter."""

    def __init__(self):
        super().__init__()
        self.norm, self.weight = nn.BatchNorm2d(16), nn.Parameter(torch.randn(16, 1, 1))

    def forward(self, x):
        return x + self.weight * self.norm(x)


class LearnedAffine(nn.Module):
    """By one scale and one shift, as in PP-HGNet."""

    def __init__(self):
        super().__init__()
        self.norm, self.scale, self.shift = nn.BatchNorm2d(16), nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.scale * F.relu(self.norm(x)) + self.shift


class GatedBefore(nn.Module):
    """What is behind the gate, if it comes first."""

    def __init__(self, *layers):
        super().__init__()
        self.gate, self.layers = Gate(), nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x * self.gate(x))


class GatedShortcut(ScaledResidual):
    """Where squeeze-and-excitation's residual block has another number of channels."""

    def __init__(self):
        super().__init__(Gate())
        self.shortcut = nn.Sequential(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16))

    def forward(self, x):
        y = self.norm(self.conv(x))
        return F.relu(y * self.scale(y) + self.shortcut(x))


class InFloat32(nn.Module):
    """In the middle of a net of a half type."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.float()

    def forward(self, x):
        return self.layer(x.float())


class GlobalResponse(nn.Module):
    """ConvNeXt V2's normalization by all positions, behind an activation."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))

    def forward(self, x):
        x = F.gelu(x)
        response = x.norm(p=2, dim=(1, 2), keepdim=True)
        response = response / (response.mean(-1, keepdim=True) + 1e-6)
        return x + torch.addcmul(self.bias, self.weight, x * response)


class Affine(nn.Module):
    """ResMLP's."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))

    def forward(self, x):
        return torch.addcmul(self.bias, self.weight, x.float())


class PostNorm(nn.Module):
    """Swin V2's residual sum, with stochastic depth."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.depth = nn.Linear(16, 16), nn.LayerNorm(16), StochasticDepth()

    def forward(self, x):
        x = x.contiguous()
        return x + self.norm(self.fc(x)) * self.depth(x)


class Normalized(nn.Module):
    """Attention's queries, each divided by its length."""

    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        heads = self.fc(x).flatten(1, 2).unflatten(2, (4, 16)).transpose(1, 2)
        heads = F.normalize(heads, dim=-1)
        return self.out(Keep.apply(heads).transpose(1, 2).flatten(2)).view(x.shape)


class StandardizedConvolution(nn.Conv2d):
    """An NFNet's, with weights of a learned variance and mean 0."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(self.out_channels))

    def forward(self, x):
        weight = F.batch_norm(self.weight.reshape(1, len(self.weight), -1), None, None, self.gain, training=True)
        return self._conv_forward(x, weight.reshape_as(self.weight), None)


class Swiglu(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return F.silu(self.gate(x)) * self.up(x)


class SwigluOfHalves(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 32)

    def forward(self, x):
        gate, up = self.fc(x).chunk(2, -1)
        return F.silu(gate) * up


class RmsNorm(nn.Module):
    """As transformers composes it."""

    def __init__(self, size=16):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x):
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normed.to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Of queries of two heads that are normalized: each, as in Qwen3, or both together, as in OLMo2."""

    def __init__(self, together=False):
        super().__init__()
        self.fc, self.norm, self.together = nn.Linear(16, 32), RmsNorm(32 if together else 16), together
        self.out = nn.Linear(32, 16)

    def forward(self, x):
        queries = self.fc(x).flatten(1, 2)
        heads = self.norm(queries).unflatten(2, (2, 16)) if self.together else self.norm(queries.unflatten(2, (2, 16)))
        heads = heads.transpose(1, 2)
        angles = torch.arange(heads.size(2), device=x.device).unsqueeze(1) / 10 ** torch.arange(16, device=x.device)
        cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
        first, second = heads.chunk(2, -1)
        heads = heads * cos + torch.cat([-second, first], -1) * sin
        return self.out(Keep.apply(heads).transpose(1, 2).flatten(2)).view(x.shape)


class Modulated(nn.Module):
    """A diffusion transformer's norm, whose scale and shift follow from the condition."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(16, elementwise_affine=False), nn.Linear(16, 32)

    def forward(self, x):
        scale, shift = self.fc(x.mean((1, 2), keepdim=True)).chunk(2, -1)
        return self.norm(x) * (1 + scale) + shift


class Rows(nn.Module):
    """Of channels as the last dimension."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Transposed(nn.Module):
    """Of channels as the last dimension, with the samples in the second, as attention takes them."""

    def __init__(self):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        rows = self.norm(x.permute(0, 2, 3, 1).flatten(1, 2).float())
        return self.fc(rows.transpose(0, 1)).permute(1, 2, 0).reshape(x.shape)


CHAINS = {
    "batch norm, relu": lambda: nn.Sequential(nn.BatchNorm2d(16), nn.ReLU()),
    "batch norm, relu6": lambda: nn.Sequential(nn.BatchNorm2d(16), nn.ReLU6(inplace=True)),
    "batch norm, silu": lambda: nn.Sequential(nn.BatchNorm2d(16), nn.SiLU(inplace=True)),
    "batch norm, hardswish": lambda: nn.Sequential(nn.BatchNorm2d(16), nn.Hardswish()),
    "batch norm, gate": Gated,
    "residual": Residual,
    "residuals": lambda: nn.Sequential(Residual(), Residual(), Residual()),
    "gate, residual": lambda: ScaledResidual(Gate()),
    "stochastic depth, residual": lambda: ScaledResidual(StochasticDepth()),
    "layer scale, residuals": lambda: nn.Sequential(*(LayerScale() for _ in range(4))),
    "layer scale, stochastic depth, residuals": lambda: nn.Sequential(*(LayerScale(StochasticDepth()) for _ in range(4))),
    "gate, batch norm, our silu": lambda: GatedBefore(nn.BatchNorm2d(16), activations_cuda.SiLU(inplace=True)),
    "batch norm, gate, our relu6": lambda: nn.Sequential(nn.BatchNorm2d(16), GatedBefore(activations_cuda.ReLU6())),
    "gate, two norms": GatedShortcut,
    "batch norm, layer scale, residual": ScaledBranch,
    "batch norm, relu, scale, shift": LearnedAffine,
    "batch norm in float32": lambda: InFloat32(nn.BatchNorm2d(16)),
    "gelu, batch norm": lambda: nn.Sequential(nn.GELU(), nn.BatchNorm2d(16)),
    "standardized weights": lambda: StandardizedConvolution(16, 16, 3, padding=1),
    "two norms": lambda: Residual(nn.Sequential(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16))),
    "group norm, silu": lambda: nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU()),
    "group norm, relu": lambda: nn.Sequential(nn.GroupNorm(2, 16), nn.ReLU(inplace=True)),
    "instance norm, leaky relu": lambda: nn.Sequential(nn.InstanceNorm2d(16, affine=True), nn.LeakyReLU(0.1)),
    "layer norm": lambda: Rows(nn.LayerNorm(16)),
    "layer norm, gelu": lambda: Rows(nn.LayerNorm(16), nn.GELU()),
    "layer norm, transposed": Transposed,
    "layer norm without bias": lambda: Rows(nn.LayerNorm(16, bias=False)),
    "layer norm, scale and shift": lambda: Rows(Modulated()),
    "layer norm, stochastic depth, residual": lambda: Rows(PostNorm(), nn.Linear(16, 16)),
    "global response": lambda: Rows(GlobalResponse()),
    "affine": lambda: Rows(Affine()),
    "normalized heads": lambda: Rows(Normalized()),
    "rms norm": lambda: Rows(RmsNorm()),
    "rms norm, rotary embedding": lambda: Rows(RotaryEmbedding()),
    "rms norm of all heads, rotary embedding": lambda: Rows(RotaryEmbedding(together=True)),
    "swiglu": lambda: Rows(Swiglu()),
    "swiglu of halves": lambda: Rows(SwigluOfHalves()),
    "new gelu": lambda: Rows(nn.Linear(16, 16), NewGelu()),
    "dropout": lambda: nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.3)),
    "dropout, residual": lambda: Rows(nn.Linear(16, 16), nn.Dropout(0.3), nn.LayerNorm(16)),
    "masked": lambda: nn.Sequential(nn.BatchNorm2d(16), Masked()),
    "our silu": lambda: nn.Sequential(nn.BatchNorm2d(16), activations_cuda.SiLU(inplace=True)),
    "our silu, whose input has other readers": lambda: nn.Sequential(nn.BatchNorm2d(16), Both(activations_cuda.SiLU())),
    "our hardswish": lambda: nn.Sequential(nn.GroupNorm(4, 16), activations_cuda.Hardswish(inplace=True)),
    "our gelu": lambda: Rows(nn.LayerNorm(16), activations_cuda.GELU("tanh")),
    "our mish, residual": lambda: Branch(activations_cuda.Mish(inplace=True)),
    "our mish, two norms": lambda: Residual(nn.Sequential(nn.BatchNorm2d(16), activations_cuda.Mish(inplace=True))),
    "hardtanh": lambda: nn.Sequential(nn.BatchNorm2d(16), activations_cuda.Hardtanh(-0.4, 0.6)),
}


class Both(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.activation = activation

    def forward(self, x):
        return self.activation(x) * Keep.apply(x)


class Masked(nn.Module):
    """By a mask that is broadcast."""

    def forward(self, x):
        mask = torch.rand(x.shape[0], x.shape[1], x.shape[2], 1, device=x.device) > 0.5
        return F.relu(x.float() * mask * 2)


class Net(nn.Module):
    def __init__(self, chain):
        super().__init__()
        self.stem, self.chain, self.head = nn.Conv2d(3, 16, 3, padding=1), chain, nn.Conv2d(16, 16, 1)

    def forward(self, x):
        y = self.head(self.chain(self.stem(x)))
        return y


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 7])
@pytest.mark.parametrize("name", CHAINS)
def test_chain(name, size, dtype, layout, device):
    """In training, with everything compared."""
    torch.manual_seed(0)
    net = Net(CHAINS[name]()).to(device, memory_format=layout)
    for parameter in net.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    images = torch.randn(4, 3, size, size, device=device).contiguous(memory_format=layout)

    is_half = dtype is not torch.float32

    def loss(model):
        with torch.autocast(device, dtype if is_half else torch.bfloat16, enabled=is_half):
            return Keep.apply(model(images)).float().square().mean()

    before, after, _ = compare(net, loss, steps=3)
    assert after < before


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [Residual, LayerScale, lambda: LayerScale(StochasticDepth())], ids=["norm", "scale", "depth"])
def test_every_second_of_a_chain_of_sums_is_remembered(block, dtype, layout, device):
    """The last follows from all others, which needn't wait for their own readers' turn: a program computes two on its way."""
    net = Net(nn.Sequential(*(block() for _ in range(8)))).to(device, memory_format=layout)
    images = torch.randn(4, 3, 16, 16, device=device).contiguous(memory_format=layout)
    counts = []

    def count(scope):
        found, left = set(), scope.values()
        while left:
            value = left.pop()
            if isinstance(value, _C.recipes.Value) and value not in found:
                found.add(value)
                left += value.operands
        counts.append(sum(value.remembers for value in found))

    for _ in range(2):  # the first step tries formulas
        with torch.autocast(device, torch.bfloat16, enabled=dtype is not torch.float32), Scope() as scope:
            y = net.chain(net.stem(images))
            loss = Keep.apply(y).float().square().mean()
        y.register_hook(lambda grad, scope=scope: count(scope))
        loss.backward()
    assert 0 < counts[-1] <= 5


class Sums(nn.Module):
    """Residual sums of so few channels that no form computes them."""

    def __init__(self, device):
        super().__init__()
        self.images = torch.randn(2, 9, 8, 8, device=device).contiguous(memory_format=torch.channels_last)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(9, 9, 1), nn.BatchNorm2d(9)) for _ in range(6)).to(device)

    def forward(self):
        x = self.images
        for block in self.blocks:
            x = F.relu(block(x) + x)
        return x

    def leaves(self):
        return [*self.parameters()]


def test_sums_within_hooks_that_give_back_once(device, deterministic):
    """What a program reads isn't asked for again by the ops that are called where it has no form."""
    check_within_hooks_that_give_back_once(Sums(device))


@pytest.mark.cuda
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=["float32", "autocast", "bfloat16"],
)
@pytest.mark.parametrize("name", sorted(set(CHAINS) - {"masked", "our mish, two norms"}))
def test_a_common_chain_is_not_interpreted(name, dtype, weights, layout):
    interpreted = {"global response"} if dtype is torch.float32 else set()  # whose GELU isn't part of a program
    if layout is torch.contiguous_format:
        interpreted |= {"dropout", "rms norm", "our silu, whose input has other readers", "gate, batch norm, our silu"}
        interpreted |= {"batch norm, gate, our relu6", "gate, two norms", "batch norm, layer scale, residual"}
        interpreted |= {"batch norm, relu, scale, shift", "gelu, batch norm", "global response", "affine"}
    elif dtype is torch.float32:
        interpreted |= {"standardized weights"}  # a copy of them is saved
    if weights is not torch.float32:
        interpreted |= {"layer norm, transposed", "new gelu", "global response", "affine", "batch norm in float32"}
        interpreted |= {"layer norm, stochastic depth, residual"}
    if name in interpreted:
        pytest.skip("served by the interpreter")
    net = Net(CHAINS[name]()).to("cuda", weights, memory_format=layout)
    images = torch.randn(32, 3, 32, 32, device="cuda", dtype=weights).contiguous(memory_format=layout)
    for _ in range(2):  # the first step tries formulas
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype is not weights), Scope():
            loss = Keep.apply(net(images)).float().square().mean()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            loss.backward()
    kernels = [event.name for event in profiler.events() if "run_kernel" in event.name]
    tables = 1 if (name, dtype) == ("new gelu", torch.bfloat16) else 0
    assert kernels and sum("interpreted" in name for name in kernels) == tables


def kernels_of(value):
    """Those that compute a value, which it returns too."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        found = _C.recipes.fused(value)
        torch.cuda.synchronize()
    return found, [event.name for event in profiler.events() if "run_kernel" in event.name]


def normed_in_columns(x, formula=norms.batch_norm_elementwise):
    parameters = [numbers((x.size(1),), x.device) for _ in range(4)]
    return Op(formula, x, *parameters, arguments=(1e-5,))


def gate_of(x):
    return numbers((*x.shape[:2], 1, 1), x.device, x.dtype)


IN_COLUMNS = {
    "norm": lambda x: Op(torch.relu, normed_in_columns(x)),
    "gate": lambda x: Op(torch.mul, Op(torch.relu, normed_in_columns(x)), gate_of(x)),
    "gate, residual": lambda x: Op(
        torch.relu, Op(formulas.add, Op(torch.mul, normed_in_columns(x), gate_of(x)), torch.randn_like(x), arguments=(1,))
    ),
    "float32": lambda x: Op(torch.Tensor.to, normed_in_columns(x.float()), arguments=(x.dtype,)),
}


@pytest.mark.cuda
@pytest.mark.parametrize("channels", [27, 36, 38, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", IN_COLUMNS)
def test_channels_that_are_no_vectors(name, dtype, channels):
    """Several rows are one of vectors, if there are as many in a sample."""
    torch.manual_seed(0)
    for size, is_joined in (64, True), (63, channels == 64 or "gate" not in name):
        x = numbers((16, channels, size, size), "cuda", dtype).contiguous(memory_format=torch.channels_last)
        expected = IN_COLUMNS[name](x)
        found, kernels = kernels_of(expected.value)
        assert is_identical(found, expected.tensor)
        is_vector = dtype is torch.float32 and channels == 36
        assert len(kernels) == 1 and ("interpreted" not in kernels[0]) == (is_joined or is_vector)


@pytest.mark.cuda
def test_what_is_copied_into_other_strides_is_copied_in_rows():
    """As heads are for attention. PyTorch's copy takes more than twice as long."""
    x = torch.randn(4, 32, 8, 64, device="cuda", requires_grad=True)
    for dtype in DTYPES:
        for _ in range(2):  # the first step tries formulas
            with Scope() as scope:
                heads = Keep.apply(x.to(dtype)).clone()
                loss = Keep.apply(heads).sum() + Keep.apply(heads.transpose(1, 2).contiguous()).sum()  # no other kernel's
            assert scope.count[True] >= 1
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                loss.backward()
        assert any("run_kernel" in event.name for event in profiler.events())
    compare(nn.Linear(64, 64).cuda(), lambda net: Keep.apply(Keep.apply(net(x)).transpose(1, 2).contiguous()).sum())


def test_what_a_shared_sum_reads_is_computed_once():
    """By PyTorch's op, and for both who need the sum."""
    low, x, y = (nn.Parameter(torch.randn(4, 16, size, size)) for size in (8, 16, 16))
    for _ in range(2):  # the first step tries formulas
        with recompute():
            shared = F.interpolate(low, scale_factor=2, mode="bilinear") + x
            loss = (Keep.apply(shared) + Keep.apply(F.relu(shared + y))).sum()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            loss.backward()
    assert [event.name for event in profiler.events()].count("aten::upsample_bilinear2d") == 1


@pytest.mark.parametrize("op", ["embedding", "cat"])
def test_what_an_op_computes_for_several_is_computed_once(op):
    """E.g. for an embedding's readers and a norm's behind it: a program of the norm would read no more than its output, but
    not at once.
    """
    weight, norm = nn.Parameter(torch.randn(99, 64)), nn.LayerNorm(64)
    tokens = torch.randint(99, (16, 24))
    for _ in range(2):  # the first step tries formulas
        with recompute():
            shared = (F.embedding(tokens, weight) if op == "embedding" else torch.cat([weight, weight])) * 1.5
            loss = (Keep.apply(shared) + Keep.apply(F.relu(norm(shared)))).sum()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            loss.backward()
    assert [event.name for event in profiler.events()].count(f"aten::{op}") == 1


@pytest.mark.parametrize(
    "of",
    [lambda x: x[:, :64] * 1.5, lambda x: x.view(64, 2, 64).select(1, 0) * 1.5, lambda x: x * 1.5 + x],
    ids=["slice", "select", "sum of the same"],
)
def test_what_follows_from_one_tensor_is_computed_by_each_reader(of, device):
    """Which reads no more than to remember it would. A CPU doesn't read a tensor twice for it."""
    x, remembered = nn.Parameter(torch.randn(64, 128, device=device)), []
    for _ in range(2):  # the first step tries formulas
        with Scope() as scope:
            shared = of(x)
            loss = sum(Keep.apply(shared).sum() for _ in range(4))  # which read it last
            y = F.relu(shared)
            loss = loss + Keep.apply(y).sum()
        value = scope.values()[0]
        y.register_hook(lambda grad, value=value: remembered.append(value.remembers))
        loss.backward()
    assert value.readers == 5 and remembered[-1] is (device == "cpu" and value.source == "AddBackward0")


class Op:
    """What an op computes, and its recipe."""

    def __init__(self, formula, *operands, arguments=()):
        tensors, values = ([getattr(each, name, each) for each in operands] for name in ("tensor", "value"))
        self.tensor = formula(*tensors, *arguments)
        self.value = _C.recipes.recipe(self.tensor, formula, tuple(values), arguments)


# Operands of a shape that lie in memory as the output or otherwise.
OPERANDS = {
    "dense": lambda shape: shape,
    "in rows that are apart": lambda shape: (*shape[:-1], shape[-1] + 8),
    "in rows that are not aligned": lambda shape: (*shape[:-1], shape[-1] + 3),
    "a column": lambda shape: shape[-1:],
    "a row": lambda shape: (*shape[:-1], 1),
    "a sample": lambda shape: (shape[0], *[1] * (len(shape) - 1)),
    "a number": lambda shape: (),
    "transposed": lambda shape: (*shape[:-2], shape[-1], shape[-2]),
    "every second": lambda shape: (*shape[:-1], 2 * shape[-1]),
}


def operand(kind, shape, device, dtype):
    x = numbers(OPERANDS[kind](shape), device, dtype)
    if kind == "transposed":
        return x.transpose(-1, -2)
    return x[..., ::2] if kind == "every second" else x[..., : shape[-1]] if x.dim() and x.size(-1) > 1 else x


@pytest.mark.parametrize("shape", [(4, 6, 64), (5, 3, 20), (3, 7, 7), (2, 3, 5, 3), (4, 2, 3, 2, 16), (9, 1001)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operands_that_lie_anywhere(dtype, shape, device):
    """In a program that has no form."""
    torch.manual_seed(0)
    for kind, other in itertools.product(OPERANDS, OPERANDS):
        x, dense = numbers(shape, device, dtype), numbers(shape, device, dtype)
        mask = torch.rand(shape, device=device) > 0.3
        of_half = operand(kind, shape, device, torch.bfloat16 if dtype is torch.float32 else dtype)
        product = Op(torch.mul, Op(torch.mul, x, of_half), Op(formulas.dropout, dense, mask, arguments=(1.25, 1.25)))
        expected = Op(formulas.add, Op(torch.relu, product), operand(other, shape, device, dtype), arguments=(1,))
        assert is_identical(_C.recipes.fused(expected.value), expected.tensor), (kind, other)


def widened(x):
    return Op(torch.Tensor.to, x, arguments=(torch.float32,))


def some_of_one(x):
    return Op(torch.mul, Op(torch.relu, Op(torch.mul, Op(torch.mul, x, 1.7), 0.9)), 0.3)


def slice_of(x, start, end, step=1, dim=-1):
    return Op(torch.ops.aten.slice, x, arguments=(dim, start, end, step))


def chunk_of(x, output_nr, dim=-1):
    tensor = getattr(x, "tensor", x)
    return Op(SPLIT.formula, x, arguments=(output_nr, tensor.size(dim) // 2, dim))


def joined(first, second, dim=-1):
    return Op(formulas.cat, first, second, arguments=(dim,))


# Of an input and half the size of its last dimension. These are read in place.
ROTATED = {
    "slices": lambda x, half: joined(Op(torch.neg, slice_of(x, half, sys.maxsize)), slice_of(x, 0, half)),
    "slices from the end": lambda x, half: joined(Op(torch.neg, slice_of(x, -half, 2 * half)), slice_of(x, None, -half)),
    "chunks": lambda x, half: joined(Op(torch.neg, chunk_of(x, 1)), chunk_of(x, 0, dim=3), dim=3),
}
NOT_ROTATED = {
    "the first half negated": lambda x, half: joined(Op(torch.neg, slice_of(x, 0, half)), slice_of(x, half, 2 * half)),
    "the same half twice": lambda x, half: joined(Op(torch.neg, chunk_of(x, 1)), chunk_of(x, 1)),
    "the last negated": lambda x, half: joined(chunk_of(x, 1), Op(torch.neg, chunk_of(x, 0))),
    "none negated": lambda x, half: joined(chunk_of(x, 1), chunk_of(x, 0)),
    "another function": lambda x, half: joined(Op(torch.relu, chunk_of(x, 1)), chunk_of(x, 0)),
    "every second": lambda x, half: joined(Op(torch.neg, chunk_of(x, 1)), slice_of(x, 0, 2 * half, 2)),
    "halves of another dimension": lambda x, half: joined(Op(torch.neg, chunk_of(x, 1, 2)), chunk_of(x, 0, 2), dim=2),
    "halves of two tensors": lambda x, half: joined(
        Op(torch.neg, chunk_of(Op(torch.relu, x), 1)), chunk_of(Op(torch.mul, x, 2.0), 0)
    ),
    "in the middle": lambda x, half: joined(Op(torch.neg, slice_of(x, half // 2, half // 2 + half)), slice_of(x, 0, half)),
    "joined along another dimension": lambda x, half: joined(Op(torch.neg, chunk_of(x, 1)), chunk_of(x, 0), dim=2),
}


def embedded(x, rotated, cos, sin):
    """By a program, and the ops that this calls."""
    expected = Op(formulas.add, Op(torch.mul, x, cos), Op(torch.mul, rotated, sin), arguments=(1,))
    for _ in range(2):  # at first the device gets its constants
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            found = _C.recipes.fused(expected.value)
    assert is_identical(found, expected.tensor)
    return {event.name for event in profiler.events()}


@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("half", [4, 8, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", ROTATED)
def test_rotary_embedding(way, dtype, half, transposed, normed, device):
    """Halves are read where they are, if they are vectors: no op joins them."""
    samples, heads, length = 2, 3, 5
    x = numbers((samples, length, heads, 2 * half) if transposed else (samples, heads, length, 2 * half), device, dtype)
    cos, sin = numbers((length, 2 * half), device, dtype), numbers((1, length, 2 * half), device, dtype)
    if normed:
        weight, rstd = numbers((2 * half,), device, dtype), torch.rand(*x.shape[:-1], 1, device=device)
        x = Op(torch.mul, Op(torch.Tensor.to, Op(torch.mul, widened(x), rstd), arguments=(dtype,)), weight)
    else:
        x = Op(formulas.same, x)
    x = Op(torch.transpose, x, arguments=(1, 2)) if transposed else x
    ops = embedded(x, ROTATED[way](x, half), cos, sin)
    assert ("aten::neg" in ops) == (half == 4)


@pytest.mark.parametrize("way", NOT_ROTATED)
def test_what_is_no_rotary_embedding(way, device):
    rotated = NOT_ROTATED[way](Op(torch.mul, numbers((2, 3, 6, 64), device), 1.5), 32)
    x, cos, sin = (numbers(rotated.tensor.shape, device) for _ in range(3))
    assert "aten::cat" in embedded(x, rotated, cos, sin)


def group_normed(x, groups):
    samples, channels, *positions = x.tensor.shape
    parameters, statistics = ([numbers(size, x.tensor.device) for _ in range(2)] for size in ((channels,), (samples, groups)))
    return Op(norms.group_norm_folded, x, *parameters, *statistics, arguments=(samples, channels, math.prod(positions), groups))


def dropped(x):
    packed = torch.randint(256, (x.tensor.numel() // 8,), dtype=torch.uint8, device=x.tensor.device)
    bits = packed[:, None].bitwise_right_shift(torch.arange(8, dtype=torch.uint8, device=packed.device)).bitwise_and(1)
    mask = bits.bool().view(x.tensor.shape)
    mask = SimpleNamespace(tensor=mask, value=_C.recipes.recipe(mask, _C.recipes.unpack_mask(), (packed,), ()))
    return Op(formulas.dropout, x, mask, arguments=(1.25, 1.25))


def rotated_of(x):
    return ROTATED["slices"](x, x.tensor.size(-1) // 2)


def wider(x):
    return Op(torch.reshape, x, arguments=((2, 3, 16, 64),))


@pytest.mark.parametrize(
    "chain",
    [
        lambda x: Op(torch.mul, rotated_of(rotated_of(x)), 2.0),
        lambda x: Op(torch.mul, Op(torch.transpose, rotated_of(x), arguments=(2, 3)), 2.0),
        lambda x: Op(torch.mul, rotated_of(dropped(x)), 2.0),
        lambda x: Op(formulas.add, wider(Op(torch.mul, x, 3.0)), rotated_of(wider(x)), arguments=(1,)),
        lambda x: Op(formulas.add, rotated_of(wider(x)), wider(Op(torch.mul, x, 3.0)), arguments=(1,)),
    ],
    ids=["twice", "transposed", "bits", "before other sizes", "after other sizes"],
)
def test_rotations_in_other_chains(chain, device):
    expected = chain(Op(formulas.same, numbers((2, 3, 32, 32), device)))
    found = _C.recipes.fused(expected.value)
    assert found is None or is_identical(found, expected.tensor)


def test_norms_of_different_groups(device):
    x = Op(formulas.same, numbers((6, 64), device))
    expected = Op(formulas.add, group_normed(x, 4), group_normed(x, 8), arguments=(1,))
    found = _C.recipes.fused(expected.value)
    assert found is None or is_identical(found, expected.tensor)


def test_groups_of_channels_that_are_rotated(device):
    """Groups aren't halves, so where these are of the same dimension no program has both."""
    x, y = (Op(formulas.same, numbers((6, 64), device)) for _ in range(2))
    expected = Op(formulas.add, group_normed(x, 4), rotated_of(y), arguments=(1,))
    found = _C.recipes.fused(expected.value)
    assert found is None or is_identical(found, expected.tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("of", ["another input", "another weight", "another factor", "products that aren't rounded"])
def test_halves_of_others(of, dtype, device):
    """What is the program of a rotary embedding but for one tensor, or for where it rounds."""
    x, y, cos, sin = (numbers((2, 3, 5, 32), device, dtype) for _ in range(4))
    weights = [numbers((32,), device, dtype) for _ in range(2)]
    factors = [torch.rand(2, 3, 5, 1, device=device) for _ in range(2)]
    is_rounded = of != "products that aren't rounded"

    def normed(x, weight, factor):
        product = Op(torch.mul, widened(x), factor)
        return Op(torch.mul, Op(torch.Tensor.to, product, arguments=(dtype,)) if is_rounded else product, weight)

    one = normed(x, weights[0], factors[0])
    other = (
        one
        if not is_rounded
        else normed(
            *(
                each[of == name]
                for name, each in (("another input", (x, y)), ("another weight", weights), ("another factor", factors))
            )
        )
    )
    rotated = ROTATED["slices"](other, 16)
    total = Op(formulas.add, Op(torch.mul, one, cos), Op(torch.mul, rotated, sin), arguments=(1,))
    expected = total if is_rounded else Op(torch.Tensor.to, total, arguments=(dtype,))
    assert is_identical(_C.recipes.fused(expected.value), expected.tensor)


def test_rows_that_are_no_halves(device):
    """In the program of a rotary embedding."""
    x, weight, rows, z = (numbers(shape, device) for shape in ((6, 5, 16), (16,), (6, 5, 1), (5, 16)))
    expected = Op(formulas.add, Op(torch.mul, x, z), Op(torch.mul, Op(torch.mul, x, rows), weight), arguments=(1,))
    assert is_identical(_C.recipes.fused(expected.value), expected.tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("formula", [torch.div, formulas.sub], ids=lambda formula: formula.__name__)
def test_what_does_not_commute(formula, dtype, device):
    """Where either operand, or both, could be part of the program, and where the first is smaller."""
    x, y = (numbers((6, 64), device, dtype) for _ in range(2))
    arguments = () if formula is torch.div else (1,)
    of_x, of_y, smaller = Op(torch.mul, x, 1.7), Op(torch.relu, y), Op(torch.mul, x[:1], 1.7)
    for first, second in (of_x, y), (x, of_y), (of_x, of_y), (smaller, y), (smaller, of_y):
        expected = Op(torch.relu, Op(formula, first, second, arguments=arguments))
        assert is_identical(_C.recipes.fused(expected.value), expected.tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "formula", [formulas.add, formulas.sub, torch.mul, torch.div, formulas.multiply_add], ids=lambda formula: formula.__name__
)
def test_a_number_of_another_dtype(formula, dtype, device):
    """Which an op of a half type rounds first."""
    x, number = numbers((6, 64), device, dtype), torch.tensor(1.2345678, device=device)
    others = (x, number) if formula is formulas.multiply_add else (number,)
    arguments = (1,) if formula in (formulas.add, formulas.sub) else ()
    expected = Op(torch.relu, Op(formula, x, *others, arguments=arguments))
    assert expected.tensor.dtype is dtype and is_identical(_C.recipes.fused(expected.value), expected.tensor)


def of_others(value, w, count):
    for _ in range(count):
        value = Op(formulas.add, value, w.clone(), arguments=(1,))
    return value


CHAINS_OF_ONE = {
    "relu": lambda x, w: some_of_one(x),
    "relu, gate": lambda x, w: Op(torch.mul, some_of_one(x), x),
    "quick gelu": lambda x, w: Op(torch.mul, Op(torch.sigmoid, Op(torch.mul, x, 1.7)), x),
    "and another tensor": lambda x, w: Op(torch.mul, some_of_one(x), w),
    "and its first column": lambda x, w: Op(torch.mul, some_of_one(x), x[:, :1].expand_as(x)),
    "and many others": lambda x, w: of_others(some_of_one(x), w, 10),
    "and as many as there may be": lambda x, w: of_others(some_of_one(x), w, 11),
    "beside another tensor": lambda x, w: Op(torch.mul, Op(torch.mul, Op(torch.mul, x, 0.5), w), some_of_one(x)),
    "in float32": lambda x, w: Op(torch.mul, Op(torch.mul, Op(torch.mul, widened(some_of_one(x)), 1.7), 0.3), w),
}


@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CHAINS_OF_ONE)
def test_chain_of_one_tensor(name, dtype, transposed, device):
    """Which of many elements is a table."""
    numbers = torch.arange(2**16, dtype=torch.int32, device=device).to(torch.int16).view(dtype)
    x = numbers.repeat(9).view(768, 768)
    x = x.t().contiguous().t() if transposed else x
    expected = CHAINS_OF_ONE[name](x, torch.randn(x.shape, device=device).to(dtype))
    found = _C.recipes.fused(expected.value)
    if found is None and (device, name) == ("cpu", "quick gelu"):
        pytest.skip("the CPU's sigmoid isn't that of each number alone")
    assert is_identical(found, expected.tensor)


def test_a_table_is_of_many_elements(device):
    """Each is made anew, of numbers that stay."""
    program = """
        import sys
        import torch
        from activations_cuda import _C
        for rows in 4, 8, 8:
            x = torch.randn(rows, 2**16, device=sys.argv[1]).bfloat16()
            value = x
            for _ in range(4):
                value = _C.recipes.recipe(x, torch.mul, (value, 1.7), ())
            with torch.profiler.profile() as profiler:
                assert torch.equal(_C.recipes.fused(value), x * 1.7 * 1.7 * 1.7 * 1.7)
            print(any(event.name == "aten::arange" for event in profiler.events()))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), device]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["False", "True", "False"]


@pytest.mark.parametrize("readers", [3, 6])
def test_a_sum_that_many_read_is_computed_once(readers):
    x, y, *others = (nn.Parameter(torch.randn(64, 64)) for _ in range(readers + 1))
    remembered = []
    for _ in range(2):  # the first step tries formulas
        with Scope() as scope:
            shared = x + y
            loss = Keep.apply(shared).sum()  # read last
            sums = [F.relu(shared + other) for other in others]
            loss = loss + sum(Keep.apply(each).sum() for each in sums)
        value = scope.values()[0]
        assert value.readers == readers
        sums[-1].register_hook(lambda grad, value=value: remembered.append(value.remembers))
        loss.backward()
    assert remembered[-1] == (readers == 6)


def test_what_has_other_readers_is_read_or_computed_once():
    """A norm's output that two read is computed once for both, in one pass each."""
    x = torch.randn(4, 8, 6, 6, requires_grad=True)
    net = nn.BatchNorm2d(8)
    with activations_cuda.recompute():
        z = net(Keep.apply(x * 1))
        y = F.relu(z)
        loss = (Keep.apply(y) * Keep.apply(z)).sum()
    (grad,) = torch.autograd.grad(loss, x)
    z = net(Keep.apply(x * 1))
    (expected,) = torch.autograd.grad((Keep.apply(F.relu(z)) * Keep.apply(z)).sum(), x)
    assert torch.equal(grad, expected)


def test_a_program_that_gives_other_bits_is_not_used(set_facts):
    """What is wrong with a program shows at its first use, and the formula computes it."""
    x = torch.randn(64, 64, requires_grad=True)
    set_facts({torch.relu: Facts(program=(programs.instruction("clamp", 0.25, math.inf),))})
    try:
        forget_choices()
        with activations_cuda.recompute(check=True):
            Keep.apply(F.relu(x * 1 + x)).sum().backward()
        assert torch.relu in _C.recipes.chosen().values()
    finally:
        forget_choices()


def test_formulas_that_differ_beside_the_mean_alone():
    """In bfloat16 throughout, all sums of a batch norm may be exact in float32, until a small bias is added to one of them."""
    torch.manual_seed(0)
    steps = torch.randint(1, 30, (2, 8, 4, 4))
    x = (25 + torch.cat([steps, -steps, torch.zeros_like(steps)])).div(64).bfloat16()  # the mean is one of the elements
    weight, bias = torch.ones(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)
    candidates = RULES["NativeBatchNormBackward0"].formula
    _, *statistics = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, 1e-5)
    formula, _ = candidates.choose(x, weight, bias, *statistics, 1e-5)
    assert formula is not norms.batch_norm_elementwise  # CUDA's


@pytest.mark.cuda
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(4, 16, 16, 16), (32, 16, 14, 14), (8, 32, 7, 7), (64, 16, 56, 56)], ids=str)
def test_formulas_of_cudnn(shape, dtype, layout):
    """It has several kernels, for each of which one fits: none is left to the op."""
    torch.manual_seed(0)
    x = torch.randn(shape, device="cuda", dtype=dtype).contiguous(memory_format=layout)
    weight, bias, *running = (torch.rand(shape[1], device="cuda") for _ in range(4))
    _, *statistics, _ = torch.cudnn_batch_norm(x, weight, bias, *running, True, 0.1, 1e-5)
    candidates = RULES["CudnnBatchNormBackward0"].formula
    formula, fuses = candidates.choose(x, weight, bias, *statistics, 1e-5)
    assert formula in norms.CUDNN and fuses


def test_comparison_in_parts(monkeypatch):
    monkeypatch.setattr(verification, "ELEMENTS_COMPARED", 32)
    for x in (
        torch.randn(7, 16),
        torch.randn(7, 4, 4).mT,
        torch.tensor(math.nan),
        torch.empty(0, 3),
        torch.tensor([0.0] * 99 + [math.nan]),
    ):
        assert is_identical(x, x.clone())
    for i in (0, 40, 111):
        x = torch.zeros(7, 16)
        y = x.clone()
        y.view(-1)[i] = -0.0
        assert not is_identical(x, y)
        assert is_identical(x.masked_fill(y.signbit(), math.nan), x.masked_fill(y.signbit(), -math.nan))


def test_trials_run_no_formula_by_ops_where_the_kernel_fits():
    """It would take three times the tensor's memory, in a step that has none to spare."""
    ran = []

    def formula(x, w, b, mean, rstd, shape):
        ran.append(formula)
        return norms.layer_norm_centered(x, w, b, mean, rstd, shape)

    x, w, b = torch.randn(32, 16), torch.ones(16), torch.zeros(16)
    _, mean, rstd = torch.native_layer_norm(x, (16,), w, b, norms.EPS)
    candidates = Candidates((norms.layer_norm_centered, formula), norms._layer_norm_op, norms._closest_of_rows)
    assert candidates.choose(x, w, b, mean, rstd, (16,)) == (norms.layer_norm_centered, True)
    assert not ran


@pytest.mark.parametrize("bounds", [(math.nan, math.nan), (math.nan, 1.0), (1.0, math.nan)], ids=str)
def test_bounds_that_are_nan(bounds, device):
    """By the op, which makes NaN of everything."""
    x = torch.linspace(-2, 2, 4096, device=device)
    assert fused(F.hardtanh, (x,), (-1.0, 1.0), x) is not None
    assert fused(F.hardtanh, (x,), bounds, x) is None


def test_subnormals_that_the_cpu_flushes():
    torch.set_flush_denormal(True)
    try:
        x = torch.full((64,), 1e-40)
        assert fused(torch.relu, (x,), (), x) is None
    finally:
        torch.set_flush_denormal(False)


def test_a_chain_of_any_length():
    """One that has no room in a program is several."""
    x = torch.randn(16, 16, requires_grad=True)

    def loss(model):
        y = Keep.apply(model.weight * 2)
        for k in range(40):
            y = F.hardtanh(y * 1.01, -4 + k / 20, 4)
            y = y + y if k % 10 == 0 else y
        return Keep.apply(y).sum()

    model = nn.Module()
    model.weight = nn.Parameter(x.detach())
    compare(model, loss)


def test_movements_of_a_half_type_are_computed_once():
    def movements(dtype):
        x = torch.randn(16, 16, requires_grad=True)
        with recompute():
            narrow = (x * 1.5).to(dtype)
            y, loss = narrow.float(), (narrow * narrow).sum()
            for _ in range(6):
                y = torch.cat([y, y.roll(1, 1), y.roll(2, 1), y.roll(3, 1)], 1)[:, ::4]
            loss = loss + (y * y).sum()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            loss.backward()
        return sum(event.name == "aten::roll" for event in profiler.events())

    assert movements(torch.bfloat16) == movements(torch.float32) > 0


@pytest.mark.cuda
@pytest.mark.slow
def test_past_two_to_the_31():
    x = torch.randn(2**31 // 64 + 8, 64, device="cuda", dtype=torch.bfloat16)
    weight, bias = torch.randn(64, device="cuda"), torch.randn(64, device="cuda")
    mean, rstd = torch.randn(len(x), 1, device="cuda"), torch.rand(len(x), 1, device="cuda")
    found = fused(norms.layer_norm_centered, (x, weight, bias, mean, rstd), ((64,),), x)
    for rows in (slice(0, 4096), slice(-4096, None)):
        expected = norms.layer_norm_centered(x[rows], weight, bias, mean[rows], rstd[rows], (64,))
        assert is_identical(found[rows], expected)


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("odd", [0, 1])
def test_bits_of_many_elements(odd):
    """Of odd planes the second half's bits would begin within a byte."""
    x = torch.randn(3, 5, 2**30 // 15 // 8 * 8 + 8 + odd, device="cuda", dtype=torch.bfloat16)
    packed = torch.randint(256, (x.numel() // 8 + 1,), device="cuda", dtype=torch.uint8)
    mask = _C.recipes.recipe(torch.empty_like(x, dtype=torch.bool), _C.recipes.unpack_mask(), (packed,), ())
    parameters = operands_of(norms.batch_norm_elementwise, x[:1])[0]
    z = _C.recipes.recipe(x, norms.batch_norm_elementwise, (x, *parameters), (1e-5,))
    found = fused(formulas.dropout, (z, mask), (1.25, 1.25), x)
    if odd:
        assert found is None
    else:
        mask = packed[:, None].bitwise_right_shift(torch.arange(8, device="cuda", dtype=torch.uint8)).bitwise_and(1)
        mask = mask.flatten()[: x.numel()].view(x.shape)
        for sample in (slice(0, 1), slice(-1, None)):
            part = norms.batch_norm_elementwise(x[sample], *parameters, 1e-5)
            assert is_identical(found[sample], formulas.dropout(part, mask[sample].bool(), 1.25, 1.25))


@pytest.mark.cuda
@pytest.mark.slow
def test_samples_of_many_elements():
    """Parts of one sample have a kernel of their own, too."""
    x = torch.randn(2, 3, 2**29, device="cuda", dtype=torch.bfloat16)
    parameters = operands_of(norms.batch_norm_elementwise, x[:1, :, :8])[0]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        found = fused(norms.batch_norm_elementwise, (x, *parameters), (1e-5,), x)
    assert not any("interpreted" in event.name for event in profiler.events())
    for places in slice(0, 4096), slice(-4096, None):
        part = x[..., places].contiguous()
        assert is_identical(found[..., places].contiguous(), norms.batch_norm_elementwise(part, *parameters, 1e-5))


@pytest.mark.cuda
@pytest.mark.slow
def test_far_apart_elements_of_a_large_tensor():
    """PyTorch's ops copy them: parts whose indices have 32 bits would be too many."""
    x = torch.empty(64, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    assert fused(formulas.same, (x.transpose(0, 1),), (), torch.empty(8192, 64, 8192, device="cuda", dtype=x.dtype)) is None


@pytest.mark.cuda
@pytest.mark.slow
def test_planes_past_two_to_the_31():
    x = torch.randn(2**31 // (64 * 49) + 8, 64, 7, 7, device="cuda", dtype=torch.bfloat16)
    parameters = operands_of(norms.batch_norm_elementwise, x[:1])[0]
    found = fused(norms.batch_norm_elementwise, (x, *parameters), (1e-5,), x)
    for samples in (slice(0, 64), slice(-64, None)):
        assert is_identical(found[samples], norms.batch_norm_elementwise(x[samples], *parameters, 1e-5))


def test_every_instruction_is_reached():
    opcodes = {each[0] for program in PROGRAMS.values() for each in program}
    assert opcodes | {"load", "stash", "look_up", "gradient", "silu_gradient", "tanh_gradient", "addend"} == set(
        _C.recipes.opcodes
    )


def test_formulas_of_batch_norm_have_programs():
    assert {*norms.NATIVE, *norms.CUDNN} <= set(PROGRAMS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_where_ops_round(dtype, device):
    """Else the program would be refused, and PyTorch's ops give the right bits."""
    torch.manual_seed(0)
    x = torch.randn(64, 64, device=device, dtype=dtype, requires_grad=True)
    forget_choices()
    with Scope() as scope:
        loss = Keep.apply(F.relu(x * 0.3 + x)).sum()
    recipes = [value for value in scope.values() if value.is_recipe]
    assert recipes and all(value.fuses for value in recipes)
    loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_between_operands_in_float32(dtype, device):
    x, w = numbers((16, 64), device), numbers((16, 64), device)
    half = _C.recipes.recipe(x.to(dtype), torch.Tensor.to, (x,), (dtype,))
    wide = _C.recipes.recipe(x, torch.Tensor.to, (half,), (torch.float32,))
    assert is_identical(fused(torch.mul, (wide, w), (), x), x.to(dtype).float() * w)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_power_by_a_tensor_has_no_table(dtype, device):
    model, x = nn.Module(), torch.rand(64, 64, device=device, dtype=dtype)
    model.exponent = nn.Parameter(torch.full((64,), 2.5, device=device, dtype=dtype))

    def loss(model):
        return Keep.apply(F.relu(Keep.apply(x * model.exponent).pow(model.exponent) * 2)).sum()

    before, after, _ = compare(model, loss)
    assert after < before


def test_tables_of_zeros_of_either_sign(device):
    x = torch.randn(64, 64, device=device).bfloat16()
    scale = torch.ones(64, device=device, dtype=torch.bfloat16, requires_grad=True)
    for value in 0.0, -0.0:
        with activations_cuda.recompute(check=True):  # raises an error if bits differ
            loss = Keep.apply(activations_cuda.threshold(x * scale * 1.5, 0.1, value)).sum()
        loss.backward()


def test_trials_have_the_strides_of_what_they_stand_for():
    """By which PyTorch's ops on the CPU may read in vectors or not."""
    candidates, strides = RULES["NativeBatchNormBackward0"].formula, set()

    def op(x, w, b, *others):
        strides.update((each.stride(), each.storage_offset()) for each in (w, b))
        return candidates.op(x, w, b, *others)

    w, b = torch.randn(64, 2).unbind(1)
    x = torch.randn(128, 64)
    _, *statistics = torch.native_batch_norm(x, w, b, None, None, True, 0.0, 1e-5)
    formula, _ = dataclasses.replace(candidates, op=op).choose(x, w, b, *statistics, 1e-5)
    assert formula is not None
    assert strides == {((2,), 0), ((2,), 1)}
