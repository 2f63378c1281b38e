"""Whole networks in the scope: losses, weights and buffers equal to the bit, and fewer bytes kept."""

import pytest
import torch
import torch.nn.functional as F

from nets import NETS, TRANSFORMERS, images, transformer, transformers_loss
from recomputing import compare

pytestmark = pytest.mark.usefixtures("no_hidden_errors")

STEPS = {"cpu": 3, "cuda": 20}
MODES = "float32", "bfloat16 autocast", "float16 autocast", "bfloat16", "channels_last"
# Of what PyTorch keeps, at most this: what was measured, and a few points more.
KEPT = {
    "mobilenet": 0.40,
    "resnet": 0.60,
    "resnet_out_of_place": 0.62,
    "densenet": 0.58,
    "unet": 0.45,
    "efficientnet": 0.35,
    "diffusion": 0.40,
    "convnext": 0.56,
    "vit": 0.80,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NETS)
def test_net(name, mode, device):
    torch.manual_seed(0)
    net, dtype, layout = NETS[name]().to(device), torch.float32, torch.contiguous_format
    if mode == "bfloat16":
        net, dtype = net.bfloat16(), torch.bfloat16
    if mode == "channels_last":
        layout = torch.channels_last
        net = net.to(memory_format=layout)
    autocast = getattr(torch, mode.split()[0]) if "autocast" in mode else None

    def loss(model):
        with torch.autocast(device, autocast or torch.bfloat16, enabled=autocast is not None):
            return F.cross_entropy(model(images(dtype, device, layout)).float(), torch.arange(4, device=device))

    before, after, _ = compare(net, loss, steps=STEPS[device])
    print(f"{name} {mode}: {before} -> {after}, {after / before:.3f}")
    assert after <= KEPT[name] * before


@pytest.mark.parametrize("name", ["fcn_resnet50", "lraspp_mobilenet_v3_large"])
def test_segmentation(name, device):
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    net = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=4).to(device)
    labels = torch.zeros(2, 64, 64, dtype=torch.long, device=device)

    def loss(model):
        return F.cross_entropy(model(torch.randn(2, 3, 64, 64, device=device))["out"], labels)

    before, after, _ = compare(net, loss)
    assert after < 0.7 * before


def test_detection(device):
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    make = torchvision.models.detection.fasterrcnn_mobilenet_v3_large_320_fpn
    net = make(weights=None, weights_backbone=None, num_classes=4, trainable_backbone_layers=6).to(device)
    boxes = torch.tensor([[10.0, 10.0, 40.0, 50.0]], device=device)

    def loss(model):
        targets = [{"boxes": boxes, "labels": torch.ones(1, dtype=torch.long, device=device)}] * 2
        return sum(model([torch.randn(3, 96, 96, device=device)] * 2, targets).values())

    before, after, _ = compare(net, loss)
    assert after < 0.9 * before


@pytest.mark.parametrize("mode", ["float32", "bfloat16 autocast", "bfloat16"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name, mode, device):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    net = transformer(name).to(device, torch.bfloat16 if mode == "bfloat16" else torch.float32)

    def loss(model):
        with torch.autocast(device, torch.bfloat16, enabled="autocast" in mode):
            return transformers_loss(name, model)

    before, after, _ = compare(net, loss, steps=STEPS[device])
    print(f"{name} {mode}: {before} -> {after}, {after / before:.3f}")
    assert after < 0.9 * before
