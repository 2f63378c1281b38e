"""Small networks of the kinds that people train, each a function that makes one, and what it is trained on."""

import math

import torch
import torch.nn.functional as F
from torch import nn


def convolution(inputs, outputs, kernel=3, groups=1, activation=None):
    layers = [nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(outputs)]
    return nn.Sequential(*layers, *([activation] if activation else []))


class Head(nn.Module):
    """The mean of each channel, and classes."""

    def __init__(self, channels):
        super().__init__()
        self.linear = nn.Linear(channels, 10)

    def forward(self, x):
        return self.linear(F.dropout(x.mean((2, 3)), 0.2))


class Residual(nn.Module):
    def __init__(self, layers, last=None):
        super().__init__()
        self.layers, self.last = layers, last

    def forward(self, x):
        x = x + self.layers(x)
        return self.last(x) if self.last else x


class ResidualInPlace(Residual):
    def forward(self, x):
        y = self.layers(x)
        y += x
        return self.last(y)


def mobilenet(width=16):
    def block():
        return Residual(
            nn.Sequential(
                convolution(width, 3 * width, 1, activation=nn.ReLU6(True)),
                convolution(3 * width, 3 * width, 3, 3 * width, nn.ReLU6(True)),
                convolution(3 * width, width, 1),
            )
        )

    return nn.Sequential(convolution(3, width, activation=nn.ReLU6(True)), block(), block(), block(), Head(width))


def resnet(width=16, inplace=True):
    def block():
        layers = nn.Sequential(convolution(width, width, activation=nn.ReLU(inplace)), convolution(width, width))
        return (ResidualInPlace if inplace else Residual)(layers, nn.ReLU(inplace))

    stem = convolution(3, width, activation=nn.ReLU(inplace)), nn.MaxPool2d(3, 2, 1)
    return nn.Sequential(*stem, block(), block(), block(), Head(width))


class DenseNet(nn.Module):
    def __init__(self, growth=8):
        super().__init__()
        self.stem = nn.Conv2d(3, growth, 3, padding=1)
        self.layers = nn.ModuleList(
            self.layer(growth * (i + 1), nn.Conv2d(growth * (i + 1), growth, 3, padding=1)) for i in range(4)
        )
        self.transition = self.layer(5 * growth, nn.Conv2d(5 * growth, growth, 1), nn.AvgPool2d(2), Head(growth))

    @staticmethod
    def layer(channels, *rest):
        return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(True), *rest)

    def forward(self, x):
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.transition(torch.cat(features, 1))


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()

        def two(inputs, outputs):
            first, second = nn.ReLU(True), nn.ReLU(True)
            return nn.Sequential(
                convolution(inputs, outputs, activation=first), convolution(outputs, outputs, activation=second)
            )

        self.down1, self.down2, self.middle = two(3, width), two(width, 2 * width), two(2 * width, 4 * width)
        self.up2, self.up1, self.head = two(6 * width, 2 * width), two(3 * width, width), Head(width)

    def forward(self, x):
        fine = self.down1(x)
        coarse = self.down2(F.max_pool2d(fine, 2))
        middle = self.middle(F.max_pool2d(coarse, 2))
        up = self.up2(torch.cat([F.interpolate(middle, scale_factor=2), coarse], 1))
        return self.head(self.up1(torch.cat([F.interpolate(up, scale_factor=2), fine], 1)))


class NewGelu(nn.Module):
    """GPT-2's, as transformers composes it."""

    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class SqueezeExcitation(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.excite(F.silu(self.squeeze(x.mean((2, 3), keepdim=True)))))


def efficientnet(width=16):
    def block():
        wide = 4 * width
        expanded = convolution(width, wide, 1, activation=nn.SiLU(True)), convolution(wide, wide, 3, wide, nn.SiLU(True))
        return Residual(nn.Sequential(*expanded, SqueezeExcitation(wide), convolution(wide, width, 1)))

    return nn.Sequential(convolution(3, width, activation=nn.SiLU(True)), block(), block(), Head(width))


def diffusion(width=16):
    def block():
        layers = [(nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(2)]
        return Residual(nn.Sequential(*layers[0], *layers[1]))

    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), block(), block(), block(), Head(width))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.narrow(F.gelu(self.wide(y)))).permute(0, 3, 1, 2)


def convnext(width=16):
    return nn.Sequential(nn.Conv2d(3, width, 2, 2), *(ConvNeXtBlock(width) for _ in range(3)), Head(width))


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + F.dropout(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)), 0.1)
        return x + self.narrow(F.dropout(F.gelu(self.wide(self.norm2(x))), 0.1))


class ViT(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.patches, self.positions = nn.Conv2d(3, width, 4, 4), nn.Parameter(torch.randn(1, 16, width) * 0.02)
        self.blocks, self.norm = nn.Sequential(*(Attention(width) for _ in range(3))), nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


NETS = {
    "mobilenet": mobilenet,
    "resnet": resnet,
    "resnet_out_of_place": lambda: resnet(inplace=False),
    "densenet": DenseNet,
    "unet": UNet,
    "efficientnet": efficientnet,
    "diffusion": diffusion,
    "convnext": convnext,
    "vit": ViT,
}


def images(dtype=torch.float32, device="cpu", layout=torch.contiguous_format):
    return torch.randn(4, 3, 16, 16).to(device, dtype).contiguous(memory_format=layout)


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}

# The classes of transformers: a model's, its configuration's, and what that is given.
TRANSFORMERS = {
    **{
        name: (f"{name}ForCausalLM", f"{name}Config", SMALL | {"num_key_value_heads": 2} | more)
        for name, more in {
            "Llama": {},
            "Mistral": {},
            "Qwen2": {},
            "Gemma": {"head_dim": 8},
            "Mixtral": {"num_local_experts": 4},
        }.items()
    },
    "GPT2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99}),
    "OPT": (
        "OPTForCausalLM",
        "OPTConfig",
        {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
        | {"word_embed_proj_dim": 32, "max_position_embeddings": 64},
    ),
    "BERT": ("BertForMaskedLM", "BertConfig", SMALL),
    "RoBERTa": ("RobertaForMaskedLM", "RobertaConfig", SMALL),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 99, "decoder_start_token_id": 0},
    ),
    "ViT": ("ViTForImageClassification", "ViTConfig", SMALL | {"image_size": 16, "patch_size": 4}),
    "ConvNeXt": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 1, 1], "patch_size": 2},
    ),
    "Mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99, "state_size": 4},
    ),
}


def transformer(name):
    import transformers

    model, configuration, arguments = TRANSFORMERS[name]
    return getattr(transformers, model)(getattr(transformers, configuration)(**arguments)).train()


def transformers_loss(name, model):
    parameter = next(model.parameters())
    if name in ("ViT", "ConvNeXt"):
        size = 16 if name == "ViT" else 32
        return model(torch.randn(2, 3, size, size).to(parameter)).logits.float().square().mean()
    tokens = torch.randint(3, 99, (2, 16)).to(parameter.device)
    return model(input_ids=tokens, labels=tokens).loss.float()
