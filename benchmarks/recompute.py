"""Trains real models for a few steps on the GPU at hand, unmodified and by convert(model, batch, recompute=True): the peak
memory of a step, its time and that of its kernels.

Writes benchmarks/results/<device>-recompute.json. Exits with 1 if a row misses its target, if any loss or any weight of the
first steps, by deterministic algorithms and on a quarter of the batch, differs, or if any recipe of a step on all of it gives
other bits. Names of models on the command line run those alone; the other rows stay, each with the commit that it is of.
"""

import copy
import sys
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

import activations_cuda
from benchmarks import record
from benchmarks.models import (
    IMAGE,
    OwnLoss,
    Training,
    autocast,
    chosen_models,
    compare,
    deterministic,
    free_memory,
    from_torchvision,
    from_transformers,
    is_short,
    same,
    table,
)
from benchmarks.timing import KernelClock, StepClock, alternate

STEPS = 4  # whose losses are compared, and the weights after them


class UNet(nn.Module):
    """Of four levels, each two convolutions with batch norm and ReLU; max pooling down, nearest upsampling up."""

    def __init__(self, widths=(64, 128, 256, 512)):
        super().__init__()
        self.down = nn.ModuleList(map(self.two, (3, *widths), widths))
        self.up = nn.ModuleList(self.two(low + high, high) for high, low in pairwise(widths))
        self.head = nn.Linear(widths[0], 1000)

    @staticmethod
    def two(inputs, outputs):
        def one(inputs):
            return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)

        return nn.Sequential(*one(inputs), *one(outputs))

    def forward(self, x):
        levels = [self.down[0](x)]
        for layer in self.down[1:]:
            levels.append(layer(F.max_pool2d(levels[-1], 2)))
        x = levels.pop()
        for layer in reversed(self.up):
            x = layer(torch.cat([F.interpolate(x, scale_factor=2), levels.pop()], 1))
        return self.head(x.mean((2, 3)))


class DiffusionBlock(nn.Module):
    """A residual block of a diffusion model: group norm, SiLU and a convolution, twice."""

    def __init__(self, width):
        super().__init__()
        layers = [(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(2)]
        self.layers = nn.Sequential(*layers[0], *layers[1])

    def forward(self, x):
        return x + self.layers(x)


def diffusion_blocks(width=128, depth=4):
    blocks = [DiffusionBlock(width) for _ in range(depth)]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000)
    )


def llama(name="LlamaForSequenceClassification", **options):
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12, "num_attention_heads": 16}
    return from_transformers(name, "LlamaConfig", vocab_size=32000, **sizes, **options)


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        shape: of a batch.
        memory_at_most, kernels_at_most, time_at_most: of the unmodified model's, if there is a target.
        dtype: of autocast; None: the model itself is in bfloat16.
        convolutions: whether depthwise convolutions are recomputed too.
        memory_format: of images, and of the model.
    """

    create: object
    shape: tuple
    memory_at_most: float | None = None
    kernels_at_most: float | None = None
    dtype: torch.dtype | None = torch.bfloat16
    vocabulary: int | None = None
    convolutions: bool = False
    time_at_most: float | None = None
    memory_format: torch.memory_format = torch.channels_last

    def model(self):
        model = self.create().to(memory_format=self.memory_format).train()
        return model.bfloat16() if self.dtype is None else model

    def batch(self, device, count=None):
        shape = (count or self.shape[0], *self.shape[1:])
        if self.vocabulary:
            return torch.randint(1, self.vocabulary, shape, device=device)
        return torch.randn(shape, device=device).to(memory_format=self.memory_format)


def vision(name, batch, memory_at_most=None, kernels_at_most=None, dtype=torch.bfloat16, **options):
    return Case(partial(from_torchvision, name), (batch, *IMAGE), memory_at_most, kernels_at_most, dtype, **options)


def language(name, config, **options):
    return partial(from_transformers, name, config, **options)


GPT2 = language("GPT2ForSequenceClassification", "GPT2Config")
GPT2_BY_TANH = language("GPT2ForSequenceClassification", "GPT2Config", activation_function="gelu_pytorch_tanh")
GPT2_WITH_LOSS = language("GPT2LMHeadModel", "GPT2Config", returning=OwnLoss)
LLAMA_WITH_LOSS = partial(llama, "LlamaForCausalLM", returning=OwnLoss)
BERT = language("BertForSequenceClassification", "BertConfig", hidden_act="gelu")
MODERNBERT = language("ModernBertForSequenceClassification", "ModernBertConfig")
QWEN3 = language(
    "Qwen3ForSequenceClassification",
    "Qwen3Config",
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
)

CASES = {
    "mobilenet_v2": vision("mobilenet_v2", 384, 0.40, 1.00),
    "mobilenet_v2, convolutions": vision("mobilenet_v2", 384, 0.25, 1.05, convolutions=True),
    "efficientnet_b0": vision("efficientnet_b0", 256, 0.38, 1.02),
    "efficientnet_b0, convolutions": vision("efficientnet_b0", 256, 0.38, 1.05, convolutions=True),
    "mobilenet_v3_large": vision("mobilenet_v3_large", 512, 0.47, 1.02),
    "resnet50": vision("resnet50", 256, 0.60, 1.04),
    "densenet121": vision("densenet121", 128, 0.50, 1.04),
    "vgg16": vision("vgg16", 128),
    "convnext_tiny": vision("convnext_tiny", 128, 0.57, 1.06),
    "vit_b_16": vision("vit_b_16", 128, 0.72, 1.04),
    "swin_t": vision("swin_t", 128, 0.66, 1.06),
    "diffusion blocks": Case(diffusion_blocks, (64, 3, 64, 64), 0.45, 1.04),
    "U-Net": Case(UNet, (32, 3, 256, 256), 0.75, 1.04),
    "GPT-2": Case(GPT2, (16, 1024), 0.70, 1.04, vocabulary=50257),
    "GPT-2, PyTorch's GELU": Case(GPT2_BY_TANH, (16, 1024), 0.70, 1.04, vocabulary=50257),
    "GPT-2, weights in bfloat16": Case(GPT2, (16, 1024), dtype=None, vocabulary=50257),
    "BERT-base": Case(BERT, (32, 512), 0.67, 1.04, vocabulary=30522),
    "ModernBERT-base": Case(MODERNBERT, (32, 512), vocabulary=50368),
    "Qwen3-0.6B": Case(QWEN3, (4, 1024), dtype=None, vocabulary=151936),
    "Llama": Case(llama, (4, 2048), 0.58, 1.03, dtype=None, vocabulary=32000),
    # With the logits of every token, and transformers' loss, which makes float32 of them.
    "GPT-2, language model": Case(GPT2_WITH_LOSS, (8, 1024), vocabulary=50257),
    "Llama, language model": Case(LLAMA_WITH_LOSS, (4, 2048), dtype=None, vocabulary=32000),
    "mobilenet_v2 float32": vision("mobilenet_v2", 192, 0.38, 1.00, torch.float32),
    "resnet50 float32": vision("resnet50", 128, 0.60, 1.04, torch.float32),
    "efficientnet_b0 float32": vision("efficientnet_b0", 128, 0.35, 1.03, torch.float32),
    # PyTorch's default layout.
    "resnet50, contiguous": vision("resnet50", 256, memory_format=torch.contiguous_format),
    "mobilenet_v2, contiguous": vision("mobilenet_v2", 384, memory_format=torch.contiguous_format),
    "efficientnet_b0, contiguous": vision("efficientnet_b0", 256, memory_format=torch.contiguous_format),
    "U-Net, contiguous": Case(UNet, (32, 3, 256, 256), memory_format=torch.contiguous_format),
    "resnet50, contiguous float32": vision("resnet50", 128, dtype=torch.float32, memory_format=torch.contiguous_format),
    # Small batches, whose steps wait for the host.
    "mobilenet_v2, few": vision("mobilenet_v2", 16, time_at_most=1.08),
    "efficientnet_b3, few": vision("efficientnet_b3", 16, time_at_most=1.08),
    "regnet_y_1_6gf, few": vision("regnet_y_1_6gf", 16, time_at_most=1.08),
    "convnext_tiny, few": vision("convnext_tiny", 16, time_at_most=1.08),
    "BERT-base, few": Case(BERT, (16, 128), vocabulary=30522, time_at_most=1.08),
}


def measure(name, case):
    earlier = free_memory()
    dtype = case.dtype or torch.float32  # without autocast
    torch.manual_seed(0)
    before = case.model().cuda()
    with autocast(dtype):
        scope = activations_cuda.recompute(convolutions=case.convolutions)
        after = activations_cuda.convert(copy.deepcopy(before), case.batch("meta"), recompute=scope)
    few = case.batch("cuda", max(1, case.shape[0] // 4))
    with deterministic():
        pair = [Training(before, few, dtype), Training(after, few, dtype)]
        for training in pair:
            for _ in range(STEPS):
                training()
        equal = same(pair)
    del pair, few
    batch = case.batch("cuda")
    try:
        Training(after, batch, dtype, activations_cuda.recompute(check=True))()
        bits_equal = True
    except RuntimeError as error:
        print(f"{name}: {error}")
        bits_equal = False
    free_memory()
    trainings = [Training(before, batch, dtype), Training(after, batch, dtype)]
    for training in trainings:
        training()  # momentum
    peaks = [training.peak([other for other in trainings if other is not training]) - earlier for training in trainings]
    times = alternate(StepClock(rounds=20), *trainings)
    kernels_before, kernels_after = (time.median for time in alternate(KernelClock(), *trainings))
    return {
        "model": name,
        "dtype": "bfloat16 weights" if case.dtype is None else str(case.dtype).removeprefix("torch."),
        "batch": case.shape[0],
        **equal,
        "recipes_equal": bits_equal,
        **compare(*times, *peaks),
        "before_kernels_ms": round(kernels_before / 1e3, 3),
        "after_kernels_ms": round(kernels_after / 1e3, 3),
        "kernels": round(kernels_after / kernels_before, 4),
        "memory_at_most": case.memory_at_most,
        "kernels_at_most": case.kernels_at_most,
        "time_at_most": case.time_at_most,
    }


COLUMNS = ["model", "batch", "dtype", "before_gib", "after_gib", "memory", "memory_at_most", "kernels", "kernels_at_most"]
COLUMNS += ["time"]


def main():
    chosen = chosen_models("python -m benchmarks.recompute", __doc__, list(CASES))
    rows = record.Rows(record.path("-recompute"), CASES, chosen)
    for name in tqdm(chosen, unit=" models"):
        rows.add(measure(name, CASES[name]))
    print(table(rows, COLUMNS))
    print("\nbefore: unmodified; after: convert(recompute=True). GiB: the peak of a step's memory; kernels: of their time.")
    sys.exit(1 if any(map(is_short, rows)) else 0)


if __name__ == "__main__":
    main()
