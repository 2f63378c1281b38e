"""Random programs of ops, and random nets of images: gradients equal to the bit, and no more memory."""

import contextlib
import copy
import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import activations_cuda
from activations_cuda import _C
from recomputing import Keep, Plain, Scope, assert_same, compare, copying_hooks

pytestmark = pytest.mark.usefixtures("no_hidden_errors")


UNARY = [
    F.relu,
    F.silu,
    F.gelu,
    torch.tanh,
    torch.sigmoid,
    torch.neg,
    F.hardswish,
    lambda x: x * 0.5,
    lambda x: x + 1,
    lambda x: x * x,
    lambda x: F.relu6(x.clone(), inplace=True),
    lambda x: x.mul_(1.5),
    lambda x: F.relu(x, inplace=True),
    lambda x: x.transpose(0, 1),
    lambda x: x.view(4, 2, 8).reshape(8, 8).contiguous(),
    lambda x: x.chunk(2, 1)[0].repeat(1, 2),
    lambda x: F.layer_norm(x, (8,)),
    lambda x: x.bfloat16(),
    lambda x: x.float(),
    lambda x: x[:, None].expand(-1, 2, -1)[:, 1],
    lambda x: x.t().clone(),
    lambda x: F.dropout(x, 0.2),
    lambda x: torch.native_dropout(x, 0.2, True)[0],
    lambda x: x.masked_fill(x > 1, 0),
    lambda x: F.threshold(x, 0.1, 7),
    lambda x: x.cumsum(0) * 0.1,
    lambda x: x.softmax(1),
    lambda x: x.detach() * x,
    lambda x: x.roll(1, 0),
    lambda x: x.flip(1),
]


BINARY = [
    torch.add,
    torch.mul,
    torch.sub,
    torch.maximum,
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: torch.cat([a, b], 0)[::2].contiguous(),
    lambda a, b: a.add_(b),
    lambda a, b: torch.lerp(a, b.to(a.dtype), 0.3),
]


NUMBER = st.integers(0, 99)


KINDS = "unary", "unary", "unary", "binary", "matmul", "convolution", "keep"


INSTRUCTION = st.tuples(st.sampled_from(KINDS), NUMBER, NUMBER, NUMBER)


def interpret(program, model, dtype):
    tensors = [Keep.apply(model.a @ model.b).to(dtype)]
    for kind, number, i, j in program:
        x, y = tensors[i % len(tensors)], tensors[j % len(tensors)]
        if kind == "unary":
            result = UNARY[number % len(UNARY)](x)
        elif kind == "binary":
            result = BINARY[number % len(BINARY)](x, y)
        elif kind == "matmul":
            result = (x.float() @ model.b).tanh()
        elif kind == "convolution":
            result = F.conv2d(x.float()[None, None], model.b[:3, :3][None, None], padding=1)[0, 0]
        else:
            result = Keep.apply(x)
        tensors.append(result)
    # All is differentiated: of a branch that isn't, a recipe may keep what the branch saved.
    return sum((each.float() * torch.linspace(0, 1, 8)).sum() for each in tensors)


@settings(max_examples=int(os.environ.get("EXAMPLES", "300")), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(INSTRUCTION, min_size=3, max_size=16),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.sampled_from([0, 200]),  # bytes: tensors of half types are smaller
    st.booleans(),
)
def test_programs(program, dtype, smallest, has_outer_hooks):
    torch.manual_seed(1)
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def run(scope):
        torch.manual_seed(0)
        model.zero_grad()
        with outer if isinstance(scope, Scope) else contextlib.nullcontext(), scope:
            loss = interpret(program, model, dtype)
        kept = scope.bytes(model) if isinstance(scope, Plain) else None
        loss.backward()
        return [loss.detach(), model.a.grad, model.b.grad], kept

    outer = contextlib.nullcontext()
    if has_outer_hooks:
        outer = copying_hooks()
    try:
        expected, _ = run(contextlib.nullcontext())
    except RuntimeError:
        return  # no program, or it writes to what is saved
    _, before = run(Plain())
    _C.recipes.set_smallest(smallest, smallest)
    try:
        found, after = run(Scope())
    finally:
        _C.recipes.set_smallest(0, 0)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    assert has_outer_hooks or after <= before


class Scale(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x):
        return x * self.weight[:, None, None]


class GroupNorm(nn.GroupNorm):
    def __init__(self, channels):
        super().__init__(1 if channels % 4 else 4, channels)

    def forward(self, x):
        return super().forward(x if x.is_cuda else x.contiguous())  # PyTorch's kernel for a CPU may crash in channels-last


class ChannelNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


ACTIVATIONS = [
    *(F.relu, F.relu6, F.silu, F.gelu, F.hardswish, F.mish, F.leaky_relu, F.elu, F.hardsigmoid, F.softplus, F.selu),
    *(torch.sigmoid, torch.tanh, activations_cuda.relu, activations_cuda.silu, partial(F.gelu, approximate="tanh")),
    lambda x: x * torch.sigmoid(1.702 * x),
    lambda x: 0.5 * x * (1.0 + torch.tanh(0.79788456 * (x + 0.044715 * torch.pow(x, 3.0)))),
]
INPLACE = F.relu, F.relu6, F.silu, F.hardswish, F.leaky_relu, F.hardtanh, F.elu, activations_cuda.relu6, activations_cuda.silu


def halves_gated(layer, x, y, number):
    value, gate = layer(x).chunk(2, 1)
    return value * ACTIVATIONS[number % len(ACTIVATIONS)](gate)


def alone(layer, x, y, number):
    return layer(x)


# For so many channels a layer, and what is called with it, its input, an earlier output and a number.
BLOCKS = {
    "convolution": (lambda c: nn.Conv2d(c, c, 3, padding=1, bias=False), alone),
    "pointwise convolution": (lambda c: nn.Conv2d(c, c, 1), alone),
    "depthwise convolution": (lambda c: nn.Conv2d(c, c, 3, padding=1, groups=c), alone),
    "batch norm": (nn.BatchNorm2d, alone),
    "batch norm in evaluation": (lambda c: nn.BatchNorm2d(c).eval(), alone),
    "batch norm without weights": (partial(nn.BatchNorm2d, affine=False), alone),
    "group norm": (GroupNorm, alone),
    "instance norm": (partial(nn.InstanceNorm2d, affine=True), alone),
    "layer norm": (ChannelNorm, alone),
    "scale": (Scale, alone),
    "activation": (nn.Identity, lambda layer, x, y, number: ACTIVATIONS[number % len(ACTIVATIONS)](x)),
    "activation in place": (nn.Identity, lambda layer, x, y, number: INPLACE[number % len(INPLACE)](x, inplace=True)),
    "activation of a copy": (nn.Identity, lambda layer, x, y, number: INPLACE[number % len(INPLACE)](x.clone(), inplace=True)),
    "residual": (nn.Identity, lambda layer, x, y, number: x + y),
    "residual in place": (nn.Identity, lambda layer, x, y, number: x.add_(y)),
    "product": (nn.Identity, lambda layer, x, y, number: x * y),
    "joined": (lambda c: nn.Conv2d(2 * c, c, 1), lambda layer, x, y, number: layer(torch.cat([x, y], 1))),
    "squeeze and excitation": (
        lambda c: nn.Conv2d(c, c, 1),
        lambda layer, x, y, number: x * torch.sigmoid(layer(x.mean((2, 3), keepdim=True))),
    ),
    "halves gated": (lambda c: nn.Conv2d(c, 2 * c, 1), halves_gated),
    "dropout": (nn.Identity, lambda layer, x, y, number: F.dropout(x, 0.2)),
    "stochastic depth": (nn.Identity, lambda layer, x, y, number: x * (torch.rand_like(x[:, :1, :1, :1]) > 0.2)),
    "max pooling": (nn.Identity, lambda layer, x, y, number: F.max_pool2d(x, 3, 1, 1)),
    "average pooling": (nn.Identity, lambda layer, x, y, number: F.avg_pool2d(x, 3, 1, 1)),
    "upsampling": (nn.Identity, lambda layer, x, y, number: F.interpolate(x, scale_factor=2)[:, :, ::2, ::2]),
    "padding": (nn.Identity, lambda layer, x, y, number: F.pad(x, (1, 1, 1, 1))[:, :, 1:-1, 1:-1]),
    "transposed": (nn.Identity, lambda layer, x, y, number: x.transpose(2, 3).contiguous().transpose(2, 3)),
    "cast": (nn.Identity, lambda layer, x, y, number: x.to([torch.float32, torch.bfloat16][number % 2])),
}


class Net(nn.Module):
    def __init__(self, channels, blocks):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = blocks
        self.layers = nn.ModuleList(BLOCKS[kind][0](channels) for kind, _, _ in blocks)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.2)

    def forward(self, images):
        outputs = [images * 1]
        for (kind, number, i), layer in zip(self.blocks, self.layers, strict=True):
            outputs.append(BLOCKS[kind][1](layer, outputs[-1], outputs[i % len(outputs)], number))
        weights = torch.linspace(0.5, 1.5, images.shape[3], device=images.device)
        return sum((each.float() * weights).sum() for each in outputs[1:])


@settings(max_examples=int(os.environ.get("EXAMPLES", "100")), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.tuples(st.sampled_from(list(BLOCKS)), NUMBER, NUMBER), min_size=3, max_size=12),
    st.sampled_from([(2, 16, 8, 8), (3, 8, 7, 9), (1, 12, 14, 14), (5, 32, 4, 4), (2, 7, 5, 6)]),
    st.sampled_from([torch.channels_last, torch.contiguous_format]),
    st.sampled_from(["float32", "bfloat16", "bfloat16 autocast", "float16 autocast"]),
)
def test_nets(device, blocks, shape, layout, mode):
    dtype, autocast = getattr(torch, mode.split()[0]), "autocast" in mode
    net = Net(shape[1], blocks).to(device, torch.float32 if autocast else dtype).to(memory_format=layout)
    images = torch.randn(shape, device=device, dtype=torch.float32 if autocast else dtype).contiguous(memory_format=layout)

    def loss(model):
        with torch.autocast(device, dtype if autocast else torch.bfloat16, enabled=autocast):
            return model(images)

    try:
        loss(copy.deepcopy(net)).backward()
    except RuntimeError:
        return  # it writes to what is saved, or there is no such op
    compare(net, loss)
