"""The gradient of what was concatenated in float32 for a cast to a half type, as in a U-Net under autocast: PyTorch's bits."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

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
    what_is_seen,
)

pytestmark = pytest.mark.usefixtures("no_hidden_errors")

LAYOUTS = {
    1: [torch.contiguous_format],
    2: [torch.contiguous_format, torch.channels_last],
    3: [torch.contiguous_format, torch.channels_last_3d],
}


class Level(nn.Module):
    """A U-Net's: what is upsampled and what skipped, joined for a convolution. Casts are those of autocast."""

    def __init__(
        self,
        device="cpu",
        dtype=torch.bfloat16,
        dims=2,
        layout=torch.contiguous_format,
        parts="up, skip",
        size=8,
        channels=(16, 24),
        **options,
    ):
        super().__init__()
        torch.manual_seed(0)
        self.dtype, self.parts, self.options = dtype, parts.split(", "), options
        low, high = channels
        width = sum(low if part == "up" else high for part in self.parts)
        shapes = {"low": (2, low, *[size] * dims), "high": (2, high, *[2 * size] * dims), "weight": (8, width, *[3] * dims)}
        for name, shape in shapes.items():
            x = torch.randn(shape, device=device).to(dtype)
            self.register_parameter(name, nn.Parameter(x.contiguous(memory_format=layout)))
        self.conv = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dims]

    def part(self, name):
        match name:
            case "up":
                return F.interpolate((self.low * 1).float(), scale_factor=2, **self.options)
            case "skip":
                return (self.high * 1).float()
            case "half":  # which `cat` casts
                return self.high * 1
            case "other":
                return (self.high * 1).float() * 2
            case "none":
                return self.high.detach().float()

    def joined(self):
        return torch.cat([self.part(name) for name in self.parts], 1)

    def forward(self):
        return self.conv(self.joined().to(self.dtype), self.weight, padding=1)

    def leaves(self):
        used = {"low": "up" in self.parts, "high": {"skip", "half", "other"} & {*self.parts}, "weight": True}
        return [getattr(self, name) for name in used if used[name]]


def casts(loss, net):
    """The leaves' gradients, and the shapes of what is cast for them."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        result = torch.autograd.grad(loss, net.leaves())
    shapes = [event.input_shapes[0] for event in profiler.events() if event.name == "aten::_to_copy"]
    return result, [shape for shape in shapes if shape]  # no numbers


def check(net, is_ours=True):
    """That all is cast as a whole unless the hook computes the parts, and no more is cast than without it."""
    whole = list(net.joined().shape)
    expected, before = casts(net().sum(), net)
    for _ in range(3):
        with recompute():
            loss = net().sum()
        found, after = casts(loss, net)
        assert all(map(is_identical, found, expected))
        assert all(one.stride() == other.stride() for one, other in zip(found, expected, strict=True))
        assert not is_ours or sum(map(math.prod, after)) <= sum(map(math.prod, before))
        assert (whole in after) != is_ours


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dims", "layout"), [(dims, layout) for dims in LAYOUTS for layout in LAYOUTS[dims]])
def test_the_bits_are_the_ops(dims, layout, dtype, device):
    check(Level(device, dtype, dims, layout))


@pytest.mark.parametrize("parts", ["up, half", "skip, up", "skip, skip", "up, up, half, skip"])
def test_parts(parts, device):
    check(Level(device, parts=parts))


@pytest.mark.parametrize("parts", ["up, other", "skip, other", "half, other", "up, none"])
def test_other_parts(parts, device):
    check(Level(device, parts=parts), is_ours=False)


@pytest.mark.parametrize("layout", LAYOUTS[2], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("channels", [(1, 1), (8, 1), (1, 8), (3, 5), (128, 64)])
@pytest.mark.parametrize("size", [1, 3])
def test_sizes(size, channels, layout, device):
    check(Level(device, layout=layout, size=size, channels=channels))


@pytest.mark.parametrize("mode", ["nearest-exact", "bilinear"])
def test_other_upsampling(mode, device):
    check(Level(device, mode=mode), is_ours=False)


class Variant(Level):
    def __init__(self, device, name):
        super().__init__(device)
        self.name = name

    def joined(self):
        up, skip = self.part("up"), self.part("skip")
        match self.name:
            case "a part that others read":
                return torch.cat([up, skip + up.mean()], 1)
            case "a part that is read twice":
                return torch.cat([up, skip, skip], 1)
            case "an empty part":
                return torch.cat([torch.empty(0, device=up.device, requires_grad=True), up, skip], 1)
            case "of samples":
                return torch.cat([up, up], 0)
            case "a sum of it":
                joined = torch.cat([up, skip], 1)
                return joined + joined.mean()

    def forward(self):
        joined = self.joined().to(self.dtype)
        return (joined * 2).cos() * joined


@pytest.mark.parametrize(
    "name", ["a part that others read", "a part that is read twice", "an empty part", "of samples", "a sum of it"]
)
def test_variants(name, device):
    net = Variant(device, name)
    leaves = [net.low, net.high] if name != "of samples" else [net.low]
    net.leaves = lambda: leaves
    expected = gradients(net)
    for _ in range(3):
        found = gradients(net, recompute())
        assert all(map(is_identical, found, expected))
        assert all(one.stride() == other.stride() for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("which", ["up", "skip", "joined", "cast", "low"])
@pytest.mark.parametrize("how", HOW_TO_SEE)
def test_who_sees_the_gradient(how, which, device):
    net = Level(device)

    def read(scope):
        with scope:
            low, high = net.low * 1, net.high * 1
            wide, skip = low.float(), high.float()
            up = F.interpolate(wide, scale_factor=2)
            joined = torch.cat([up, skip], 1)
            cast = joined.to(net.dtype)
            loss = net.conv(cast, net.weight).sum()
        tensors = {"up": up, "skip": skip, "joined": joined, "cast": cast, "low": wide}
        del low, high, wide, skip, up, joined, cast
        return what_is_seen(how, tensors, which, loss, net)

    check_same(read)


def test_autograd(device):
    net = Level(device)
    check_several_passes(net)
    check_second_derivatives(net)
    check_within_hooks_that_give_back_once(net)
    check_several_threads([Level(device), Level(device, layout=torch.channels_last)])


def test_some_leaves(device):
    net = Level(device)
    for leaves in ([net.low], [net.high], [net.weight, net.high]):
        net.leaves = lambda leaves=leaves: leaves
        for _ in range(2):
            assert all(map(is_identical, gradients(net, recompute()), gradients(net)))


@pytest.mark.cuda
def test_a_captured_graph():
    check_captured(Level("cuda", layout=torch.channels_last))
