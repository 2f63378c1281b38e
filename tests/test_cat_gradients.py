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

SCALARS = 16  # numbers that are cast
LAYOUTS = {
    1: [torch.contiguous_format],
    2: [torch.contiguous_format, torch.channels_last],
    3: [torch.contiguous_format, torch.channels_last_3d],
}


class Level(nn.Module):
    """A U-Net's: what is upsampled and what skipped, joined for a convolution. Casts are those of autocast."""

    def __init__(
        self, device="cpu", dtype=torch.bfloat16, layout=torch.contiguous_format, parts="up, skip", dims=2, dim=1, **sizes
    ):
        super().__init__()
        torch.manual_seed(0)
        self.dtype, self.parts, self.dim, self.mode = dtype, parts.split(", "), dim, "nearest"
        sizes = {"samples": 2, "low": 16, "high": 24, "size": 8, **sizes}
        shapes = {name: [sizes["samples"], sizes[name], *[sizes["size"]] * dims] for name in ("low", "high")}
        shapes["high"][2:] = [2 * size for size in shapes["high"][2:]]
        channels = [sizes["low" if part == "up" else "high"] for part in self.parts]
        shapes["weight"] = [8, sum(channels) if dim == 1 else channels[0], *[3] * dims]
        for name, shape in shapes.items():
            x = torch.randn(shape, device=device).to(dtype)
            self.register_parameter(name, nn.Parameter(x.contiguous(memory_format=layout)))
        self.wide = nn.Parameter(self.high.detach().float())
        self.conv = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dims]

    def part(self, name):
        match name:
            case "up":
                return F.interpolate((self.low * 1).float(), scale_factor=2, mode=self.mode)
            case "skip":
                return (self.high * 1).float()
            case "half":  # which `cat` casts
                return self.high * 1
            case "leaf":
                return self.high
            case "other":
                return (self.high * 1).float() * 2
            case "wide":
                return self.wide

    def joined(self):
        return torch.cat([self.part(name) for name in self.parts], self.dim)

    def forward(self):
        return self.conv(self.joined().to(self.dtype), self.weight, padding=1)

    def leaves(self):
        used = {"low": {"up"}, "high": {"skip", "half", "leaf", "other"}, "wide": {"wide"}}
        return [self.weight, *(getattr(self, name) for name, parts in used.items() if parts & {*self.parts})]


def casts(loss, net):
    """The leaves' gradients, the elements that are cast for them, and whether cat's node computes something."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        result = torch.autograd.grad(loss, net.leaves())
    (node,) = (event for event in profiler.events() if event.name == "CatBackward0")
    elements = sum(math.prod(event.input_shapes[0]) for event in profiler.events() if event.name == "aten::_to_copy")
    return result, elements, any(child.name == "aten::narrow" for child in node.cpu_children)


def check(net, is_ours=True):
    expected, before, _ = casts(net().sum(), net)
    for _ in range(3):
        with recompute():
            loss = net().sum()
        found, after, is_theirs = casts(loss, net)
        assert all(map(is_identical, found, expected))
        assert all(one.dtype == other.dtype for one, other in zip(found, expected, strict=True))
        assert all(one.stride() == other.stride() for one, other in zip(found, expected, strict=True))
        assert is_theirs != is_ours
        assert not is_ours or after <= before + SCALARS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dims", "layout"), [(dims, layout) for dims in LAYOUTS for layout in LAYOUTS[dims]])
def test_the_bits_are_the_ops(dims, layout, dtype, device):
    check(Level(device, dtype, layout, dims=dims))


@pytest.mark.parametrize("parts", ["skip", "up, half", "up, leaf", "skip, up", "skip, skip", "up, up, half, skip"])
def test_parts(parts, device):
    check(Level(device, parts=parts))


@pytest.mark.parametrize("parts", ["up, other", "skip, other", "half, other", "up, wide", "skip, wide"])
def test_other_parts(parts, device):
    check(Level(device, parts=parts), is_ours=False)


@pytest.mark.parametrize("layout", LAYOUTS[2], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize(("low", "high"), [(1, 1), (8, 1), (1, 8), (3, 5), (128, 64)])
@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("parts", ["up, skip", "up, leaf"])
def test_sizes(parts, samples, size, low, high, layout, device):
    check(Level(device, layout=layout, parts=parts, samples=samples, size=size, low=low, high=high))


@pytest.mark.parametrize("dim", [0, 2, -1])
def test_dimensions(dim, device):
    check(Level(device, parts="skip, up" if dim == 0 else "skip, half", dim=dim, low=24, high=24))


@pytest.mark.parametrize("mode", ["nearest-exact", "bilinear"])
def test_other_upsampling(mode, device):
    net = Level(device)
    net.mode = mode
    check(net, is_ours=False)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float64, None])
def test_a_leaf_whose_gradient_is_of_another_dtype(grad_dtype, device):
    net = Level(device, parts="up, leaf")
    net.high.grad_dtype = grad_dtype
    check(net, is_ours=False)


@pytest.mark.parametrize("name", ["a part that others read", "a part that is read twice", "an empty part", "others read it"])
def test_others(name, device):
    class Other(Level):
        def joined(self):
            up, skip = self.part("up"), self.part("skip")
            match name:
                case "a part that others read":
                    return torch.cat([up, skip + up.mean()], 1)
                case "a part that is read twice":
                    return torch.cat([up, skip, skip], 1)
                case "an empty part":
                    return torch.cat([torch.empty(0, device=up.device, requires_grad=True), up, skip], 1)
                case "others read it":
                    joined = torch.cat([up, skip], 1)
                    self.others = joined.sum()
                    return joined

        def forward(self):
            joined = self.joined().to(self.dtype)
            y = (joined * 2).cos() * joined
            return y if name != "others read it" else y + self.others

        def leaves(self):
            return [self.low, self.high]

    check(Other(device), is_ours=False)


@pytest.mark.cuda
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_under_autocast(half):
    class Net(Level):
        def forward(self):
            with torch.autocast("cuda", half):
                x = F.interpolate(F.relu(self.conv(self.low, self.first)), scale_factor=2)
                y = F.relu(self.conv(self.high, self.second))
                return self.conv(torch.cat([x, y], 1), self.weight)

    net = Net("cuda", torch.float32)
    net.first, net.second = (nn.Parameter(torch.randn(c, c, 1, 1, device="cuda")) for c in (16, 24))
    net.leaves = lambda: [net.low, net.high, net.weight, net.first, net.second]
    del net.wide
    check(net)


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
            found, expected = gradients(net, recompute()), gradients(net)
            assert all(map(is_identical, found, expected))
            assert [each.stride() for each in found] == [each.stride() for each in expected]


@pytest.mark.cuda
def test_a_captured_graph():
    check_captured(Level("cuda", layout=torch.channels_last))
