"""Whole networks in the scope: losses, weights and buffers equal to the bit, and fewer bytes kept."""

import pytest
import torch
import torch.nn.functional as F

from nets import NETS, TRANSFORMERS, images, transformer, transformers_loss
from recomputing import compare

pytestmark = pytest.mark.usefixtures("no_hidden_errors")

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

    before, after, _ = compare(net, loss, steps=3)
    print(f"{name} {mode}: {before} -> {after}, {after / before:.3f}")
    assert after <= KEPT[name] * before


@pytest.mark.parametrize("mode", ["float32", "bfloat16 autocast", "bfloat16"])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name, mode, device):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    net = transformer(name).to(device, torch.bfloat16 if mode == "bfloat16" else torch.float32)

    def loss(model):
        with torch.autocast(device, torch.bfloat16, enabled="autocast" in mode):
            return transformers_loss(name, model)

    before, after, _ = compare(net, loss, steps=3)
    print(f"{name} {mode}: {before} -> {after}, {after / before:.3f}")
    assert after < 0.9 * before
