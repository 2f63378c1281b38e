"""A converted model trains to the same bits as the unmodified one: every loss, and every weight at the end."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import activations_cuda
from activations_cuda.replacements import OURS

FORMATS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
DTYPES = [torch.float32, torch.bfloat16]  # the latter by autocast


def convolution(inputs, outputs, activation, **options):
    return nn.Sequential(nn.Conv2d(inputs, outputs, bias=False, **options), nn.BatchNorm2d(outputs), activation)


class InvertedResidual(nn.Module):
    """MobileNetV2's block (Sandler et al., 2018), with a gate if one is given."""

    def __init__(self, width, activation, gate=None):
        super().__init__()
        self.expand = convolution(width, 4 * width, activation(), kernel_size=1)
        self.depthwise = convolution(4 * width, 4 * width, activation(), kernel_size=3, padding=1, groups=4 * width)
        self.gate = gate and nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(4 * width, 4 * width, 1), gate())
        self.project = convolution(4 * width, width, nn.Identity(), kernel_size=1)

    def forward(self, x):
        y = self.depthwise(self.expand(x))
        return x + self.project(self.gate(y) * y if self.gate else y)


def inverted_residuals(activation, gate=None, width=8):
    """The last activation stands before global pooling, whose gradient is expanded."""
    return nn.Sequential(
        convolution(3, width, activation(), kernel_size=3, stride=2, padding=1),
        InvertedResidual(width, activation, gate),
        InvertedResidual(width, activation, gate),
        convolution(width, 4 * width, activation(), kernel_size=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def discriminator(width=8):
    """DCGAN's (Radford et al., 2015)."""
    options = {"kernel_size": 4, "stride": 2, "padding": 1}
    return nn.Sequential(
        nn.Conv2d(3, width, **options),
        nn.LeakyReLU(0.2, inplace=True),
        convolution(width, 2 * width, nn.LeakyReLU(0.2, inplace=True), **options),
        convolution(2 * width, 4 * width, nn.LeakyReLU(0.2), **options),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


class Transposed(nn.Module):
    """Gradients in another order than the activations': transposed, sliced, summed over rows."""

    def __init__(self, width=8):
        super().__init__()
        self.first = convolution(3, width, nn.Hardtanh(-0.5, 0.5), kernel_size=3, padding=1)
        self.second = nn.Linear(32, 10)
        self.act = nn.Softshrink(0.1)

    def forward(self, x):
        y = self.first(x).transpose(1, 3)[:, :, :, ::2].mean(1)
        return self.second(self.act(y.transpose(1, 2)).mean(1))


SMALL = {
    "ReLU6": lambda: inverted_residuals(lambda: nn.ReLU6(inplace=True)),
    "Hardtanh": lambda: inverted_residuals(nn.Hardtanh),
    "LeakyReLU and hard sigmoid gates": lambda: inverted_residuals(nn.LeakyReLU, nn.Hardsigmoid),
    "Threshold and Hardshrink": lambda: inverted_residuals(lambda: nn.Threshold(0.1, 0.0), nn.Hardshrink),
    "ReLU": lambda: inverted_residuals(nn.ReLU),
    "SiLU and hard sigmoid gates": lambda: inverted_residuals(lambda: nn.SiLU(inplace=True), nn.Hardsigmoid),
    "Hardswish and Mish gates": lambda: inverted_residuals(nn.Hardswish, nn.Mish),
    "GELU": lambda: inverted_residuals(nn.GELU),
    "GELU by tanh": lambda: inverted_residuals(lambda: nn.GELU("tanh")),
    "a discriminator": discriminator,
    "transposed": Transposed,
}

# The family in models of timm and torchvision: all their modules of it converted, and what pays, of functions and ReLU too.
LARGE = {
    "timm:mobilenetv2_140": ["all"],
    "timm:mobilenetv2_100": ["all"],
    "timm:mobilenetv2_050": ["all"],
    "timm:efficientnet_lite2": ["all"],
    "timm:efficientnet_lite0": ["all"],
    "timm:rexnet_100": ["all"],
    "timm:darknet53": ["all", "what pays"],
    "timm:cspdarknet53": ["all"],
    "timm:cspresnext50": ["all"],
    "timm:mobilenetv3_large_100": ["all"],
    "timm:ghostnet_100": ["all", "what pays"],
    "timm:lcnet_050": ["all"],
    "torchvision:mobilenet_v2": ["all", "what pays"],
    "torchvision:mobilenet_v3_large": ["what pays"],  # where dropout writes to Hardswish's output
    "torchvision:resnet18": ["all"],
    "torchvision:googlenet": ["what pays"],
    "torchvision:squeezenet1_1": ["what pays"],
    "torchvision:shufflenet_v2_x1_0": ["what pays"],
    "torchvision:efficientnet_b0": ["all"],
    "torchvision:convnext_tiny": ["all"],
    "torchvision:swin_t": ["all"],
    "timm:mobilevit_s": ["all"],
}


def autocast(device, dtype):
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


def train(model, steps, shape, dtype, memory_format):
    """Every loss, and the weights and buffers at the end."""
    device = next(model.parameters()).device
    model = model.to(memory_format=memory_format).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)  # the batch, and dropout
        images = torch.randn(shape, device=device).to(memory_format=memory_format)
        labels = torch.randint(10, shape[:1], device=device)
        with autocast(device, dtype):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), model.state_dict()


def assert_trains_the_same(model, convert, steps, shape, dtype, memory_format):
    with autocast(next(model.parameters()).device, dtype):
        converted = convert(copy.deepcopy(model))
    assert activations_cuda.converted(converted)
    (losses, state), (other_losses, other_state) = (train(m, steps, shape, dtype, memory_format) for m in (model, converted))
    assert len(losses.unique()) > 1
    assert torch.equal(losses, other_losses)
    different = [name for name in state if not torch.equal(state[name], other_state[name])]
    assert not different


def convert_all(model):
    """Whether it pays or not."""
    return activations_cuda.convert(model, classes=OURS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.usefixtures("deterministic")
def test_small_nets_train_the_same(name, memory_format, dtype, device):
    torch.manual_seed(0)
    model = SMALL[name]().to(device)
    assert_trains_the_same(model, convert_all, 10, (4, 3, 32, 32), dtype, FORMATS[memory_format])


def create(spec):
    library, name = spec.split(":")
    module = pytest.importorskip(library, exc_type=Exception)
    options = {"aux_logits": False, "init_weights": True} if name == "googlenet" else {}
    return module.create_model(name) if library == "timm" else module.models.get_model(name, **options)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("spec, converts", [(spec, how) for spec, hows in LARGE.items() for how in hows])
@pytest.mark.usefixtures("deterministic")
def test_models_train_the_same(spec, converts, memory_format, dtype):
    torch.manual_seed(0)
    model = create(spec).cuda()
    images = torch.empty(8, 3, 96, 96, device="meta")
    convert = convert_all if converts == "all" else partial(activations_cuda.convert, example_inputs=images)
    assert_trains_the_same(model, convert, 50, images.shape, dtype, FORMATS[memory_format])
