"""Trains real models for a few steps on the GPU at hand, unmodified and converted: step time and peak memory of both.

Converted means convert(model, batch); some models are trained under torch.compile too, unmodified. Writes
benchmarks/results/<device>-models.json and draws it. Exits with 1 if a row misses its target, or if any loss or any weight of
the first steps, by deterministic algorithms, differs. Names of models on the command line run those alone; the other models'
results stay, each with the commit that it is of.
"""

import argparse
import copy
import gc
import sys
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import activations_cuda
from activations_cuda._load import has_gpu
from activations_cuda.recipes.verification import is_identical
from benchmarks import record
from benchmarks.plot import draw_models
from benchmarks.timing import KernelClock, StepClock, alternate, spread

GIB = 2**30
STEPS = 20  # whose losses are compared, and the weights after them


def from_torchvision(name, **options):
    import torchvision

    return torchvision.models.get_model(name, **options)


def mlp(width=4096, activation=nn.Hardtanh):
    linear = [nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(4)]
    return nn.Sequential(linear[0], activation(), linear[1], activation(), linear[2], activation(), linear[3])


def from_timm(name):
    import timm

    return timm.create_model(name)


class SpeechFrontEnd(nn.Module):
    """The convolutions of Deep Speech 2 (Amodei et al., 2015) on spectrograms of 161 frequencies, and a linear layer."""

    def __init__(self, characters=29):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), stride=(2, 2), padding=(20, 5), bias=False),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20, inplace=True),
            nn.Conv2d(32, 32, (21, 11), stride=(2, 1), padding=(10, 5), bias=False),
            nn.BatchNorm2d(32),
            nn.Hardtanh(0, 20, inplace=True),
        )
        self.linear = nn.Linear(32 * 41, characters)

    def forward(self, spectrograms):
        return self.linear(self.convolutions(spectrograms).flatten(1, 2).mean(-1))


class Bottleneck(nn.Module):
    """As in the YOLO networks: two convolutions, and their input added."""

    def __init__(self, channels):
        super().__init__()
        self.convolutions = nn.Sequential(*convolution(channels, channels), *convolution(channels, channels))

    def forward(self, x):
        return x + self.convolutions(x)


class CrossStage(nn.Module):
    """Half of the channels by way of some bottlenecks, and all that came about on the way, concatenated."""

    def __init__(self, channels, depth):
        super().__init__()
        self.first = convolution(channels, channels)
        self.bottlenecks = nn.ModuleList(Bottleneck(channels // 2) for _ in range(depth))
        self.last = convolution(channels // 2 * (depth + 2), channels)

    def forward(self, x):
        parts = list(self.first(x).chunk(2, 1))
        for bottleneck in self.bottlenecks:
            parts.append(bottleneck(parts[-1]))
        return self.last(torch.cat(parts, 1))


def convolution(inputs, outputs, size=3, stride=1):
    padding = size // 2
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, padding, bias=False), nn.BatchNorm2d(outputs), nn.SiLU(True))


def yolo_like(widths=(32, 64, 128, 256, 512)):
    layers = [convolution(3, widths[0], stride=2)]
    for inputs, outputs in pairwise(widths):
        layers += [convolution(inputs, outputs, stride=2), CrossStage(outputs, 2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 1000))


class Logits(nn.Module):
    """A model of transformers, which returns logits alone: of each sequence or image or, if it predicts tokens, each token."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs):
        return self.model(inputs).logits.flatten(0, -2)


def with_logits(net):
    """Its forward pass, without what some nets return beside the logits."""

    def forward(batch):
        outputs = net(batch)
        return outputs if isinstance(outputs, torch.Tensor) else outputs[0]

    return forward


class OwnLoss(nn.Module):
    """A language model of transformers, which returns its own loss of predicting each token of its input."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs):
        return self.model(inputs, labels=inputs).loss


def from_transformers(name, config, returning=Logits, **options):
    import transformers

    return returning(getattr(transformers, name)(getattr(transformers, config)(num_labels=1000, pad_token_id=0, **options)))


@dataclass(frozen=True)
class Model:
    create: Callable
    shape: tuple  # of a batch
    dtypes: tuple = (torch.float32, torch.bfloat16)
    vocabulary: int | None = None  # the batch is of tokens
    compiled: bool = False  # in bfloat16 trained under torch.compile too, unmodified

    def batch(self, device):
        if self.vocabulary:
            return torch.randint(1, self.vocabulary, self.shape, device=device)
        batch = torch.randn(self.shape, device=device)
        return batch.to(memory_format=torch.channels_last) if batch.dim() == 4 else batch


IMAGE = 3, 224, 224
Smooth = partial(Model, dtypes=(torch.bfloat16,), compiled=True)
MODELS = {
    "mobilenet_v2": Model(lambda: from_torchvision("mobilenet_v2"), (256, *IMAGE)),
    "mobilenet_v3_large": Model(lambda: from_torchvision("mobilenet_v3_large"), (256, *IMAGE), compiled=True),
    "timm efficientnet_lite0": Model(lambda: from_timm("efficientnet_lite0"), (256, *IMAGE)),
    "speech front end": Model(SpeechFrontEnd, (64, 1, 161, 800)),
    "timm darknet53": Model(lambda: from_timm("darknet53"), (64, *IMAGE)),
    # ReLU, in modules and in functions: most of it costs nothing, and what does is found.
    "squeezenet1_1": Model(lambda: from_torchvision("squeezenet1_1"), (256, *IMAGE)),
    "timm ghostnet_100": Model(lambda: from_timm("ghostnet_100"), (256, *IMAGE)),
    "googlenet": Model(lambda: from_torchvision("googlenet", aux_logits=False, init_weights=False), (256, *IMAGE)),
    "resnet50": Model(lambda: from_torchvision("resnet50"), (128, *IMAGE)),
    # SiLU and GELU, from a few bits in bfloat16.
    "efficientnet_b0": Smooth(lambda: from_torchvision("efficientnet_b0"), (128, *IMAGE)),
    "efficientnet_v2_s": Smooth(lambda: from_torchvision("efficientnet_v2_s"), (64, *IMAGE)),
    "convnext_tiny": Smooth(lambda: from_torchvision("convnext_tiny"), (64, *IMAGE)),
    "vit_b_16": Smooth(lambda: from_torchvision("vit_b_16"), (64, *IMAGE)),
    "swin_t": Smooth(lambda: from_torchvision("swin_t"), (64, *IMAGE)),
    "timm mobilevit_s": Smooth(lambda: from_timm("mobilevit_s"), (64, 3, 256, 256)),
    "YOLO-like": Smooth(yolo_like, (64, 3, 320, 320)),
    "BERT-base": Smooth(
        lambda: from_transformers("BertForSequenceClassification", "BertConfig", hidden_act="gelu"),
        (32, 512),
        vocabulary=30522,
    ),
    "GPT-2": Smooth(
        lambda: from_transformers("GPT2ForSequenceClassification", "GPT2Config", activation_function="gelu_pytorch_tanh"),
        (16, 1024),
        vocabulary=50257,
    ),
}

# At most this much of the time and of the memory of the unmodified model.
TARGETS = {
    ("mobilenet_v2", "float32"): (0.97, 0.72),
    ("mobilenet_v2", "bfloat16"): (0.97, 0.72),
}
KERNELS_AT_MOST = 1.02  # of the kernels' time, in every model


def autocast(dtype):
    return nullcontext() if dtype == torch.float32 else torch.autocast("cuda", dtype=dtype)


class Training:
    """A model, its optimizer and one batch. Calling it takes a step and notes the loss."""

    def __init__(self, model, batch, dtype, wrap=None, captured=False):
        self.losses = []
        self.model = model.cuda().train()
        self.forward = wrap(self.model) if wrap else self.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        self.batch = batch
        self.autocast = autocast(dtype)
        self.captured = captured

    def __call__(self):
        if not self.captured:  # a CUDA graph has its own seeds
            torch.manual_seed(len(self.losses))  # dropout is the same in either training
        with self.autocast:
            outputs = self.forward(self.batch)
            is_loss = outputs.dim() == 0
            loss = outputs if is_loss else F.cross_entropy(outputs, torch.zeros(len(outputs), dtype=torch.long, device="cuda"))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def held(self):
        """The bytes of what stays between steps: parameters with their momentum, buffers."""
        return sum(2 * p.nbytes for p in self.model.parameters()) + sum(b.nbytes for b in self.model.buffers())

    def peak(self, others):
        """The most memory that a step needs, without what the other trainings hold."""
        torch.cuda.reset_peak_memory_stats()
        self()
        return torch.cuda.max_memory_allocated() - sum(other.held() for other in others)


def free_memory():
    """Frees what is garbage, and returns how many bytes something still holds on to, e.g. a compiler to earlier models."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def normal(shape, dtype=torch.float32):
    batch = torch.randn(shape, device="cuda", dtype=dtype)
    return batch.to(memory_format=torch.channels_last) if batch.dim() == 4 else batch


def both(model, dtype):
    """The unmodified model, and the converted one, with the same weights."""
    torch.manual_seed(0)
    before = model.create().cuda().to(memory_format=torch.channels_last).train()
    with autocast(dtype):
        return before, activations_cuda.convert(copy.deepcopy(before), example_inputs=(model.batch("meta"),))


def local(tensor):
    """What this process has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def deterministic():
    """By default cuDNN in float32 and the backward passes of fused attention and of some embeddings don't repeat themselves."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def same(trainings):
    """Whether every loss so far is the same to the bit, and whether every weight and buffer now is; a NaN is a NaN."""
    losses = [torch.stack(training.losses) for training in trainings]
    states = [training.model.state_dict().values() for training in trainings]
    return {
        "steps": len(losses[0]),
        "losses_equal": is_identical(*losses),
        "weights_equal": all(is_identical(*map(local, pair)) for pair in zip(*states, strict=True)),
    }


def compare(before, after, peak_before, peak_after):
    """What a row says of two trainings' Times and of their peaks in bytes."""
    return {
        "before_ms": round(before.median / 1e3, 3),
        "after_ms": round(after.median / 1e3, 3),
        "time": round(after.median / before.median, 4),
        "spread": spread(after, before),
        "before_gib": round(peak_before / GIB, 3),
        "after_gib": round(peak_after / GIB, 3),
        "memory": round(peak_after / peak_before, 6),
    }


def measure(name, model, dtype):
    torch._dynamo.reset()  # what it compiled holds on to its model
    earlier = free_memory()
    batch = model.batch("cuda")
    trainings = [Training(m, batch, dtype) for m in both(model, dtype)]
    with deterministic():
        for training in trainings:
            for _ in range(STEPS):
                training()
    equal = same(trainings)
    if model.compiled and dtype == torch.bfloat16:
        trainings.append(Training(copy.deepcopy(trainings[0].model), batch, dtype, torch.compile))
        for _ in range(2):  # compiles
            trainings[-1]()
    peaks = [training.peak([other for other in trainings if other is not training]) - earlier for training in trainings]
    times = alternate(StepClock(), *trainings)
    kernels_before, kernels_after = (time.median for time in alternate(KernelClock(), *trainings[:2]))
    key = name, str(dtype).removeprefix("torch.")
    time_at_most, memory_at_most = TARGETS.get(key, (None, None))
    row = {
        **dict(zip(("model", "dtype"), key, strict=True)),
        "mode": "eager",
        "batch": model.shape[0],
        **equal,
        **compare(*times[:2], *peaks[:2]),
        "before_kernels_ms": round(kernels_before / 1e3, 3),
        "after_kernels_ms": round(kernels_after / 1e3, 3),
        "kernels": round(kernels_after / kernels_before, 4),
        "time_at_most": time_at_most,
        "memory_at_most": memory_at_most,
        "kernels_at_most": KERNELS_AT_MOST,
    }
    if len(trainings) > 2:
        row |= {"compiled_ms": round(times[2].median / 1e3, 3), "compiled_gib": round(peaks[2] / GIB, 3)}
    return row


def missed(row):
    """What a row misses of its targets."""
    at_most = {what: row.get(f"{what}_at_most") for what in ("time", "memory", "kernels")}
    return [what for what, bound in at_most.items() if bound and row[what] > bound]


def differs(row):
    """What of an eager row's training differs."""
    return [what for what in ("losses", "weights", "recipes") if row.get(f"{what}_equal") is False]


def is_short(row):
    return bool(missed(row)) or differs(row)


COLUMNS = ["model", "batch", "dtype", "mode", "before_ms", "after_ms", "time", "before_gib", "after_gib", "memory"]
COLUMNS += ["kernels", "compiled_ms", "compiled_gib"]


def table(rows, columns=COLUMNS):
    cells = [
        [
            *(row.get(column) for column in columns),
            "-".join(map(str, row["spread"])),
            f"{' and '.join(differs(row)).upper()} DIFFER" if differs(row) else "",
            " and ".join(f"{what.upper()} ABOVE {row[f'{what}_at_most']}" for what in missed(row)),
        ]
        for row in rows
    ]
    return tabulate(cells, headers=[*columns, "spread of time", "", ""], disable_numparse=True)


def chosen_models(prog, description, names):
    """Those on the command line, or all."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("models", nargs="*", metavar="model", help=f"of {', '.join(names)}; by default all")
    chosen = parser.parse_args().models or names
    if unknown := set(chosen) - set(names):
        parser.error(f"expected names among {', '.join(names)}, got {', '.join(sorted(unknown))}")
    if not has_gpu():
        parser.error("needs a GPU and a build of activations_cuda for it")
    return chosen


def main():
    chosen = chosen_models("python -m benchmarks.models", __doc__, list(MODELS))
    rows = record.Rows(record.path("-models"), MODELS, chosen)
    runs = [(name, dtype) for name in chosen for dtype in MODELS[name].dtypes]
    for name, dtype in tqdm(runs, unit=" runs"):
        rows.add(measure(name, MODELS[name], dtype))
    draw_models(rows.path)
    print(table(rows))
    print(
        "\nbefore: unmodified; after: converted; compiled: before, by torch.compile. ms: a step, the median;"
        " GiB: its peak memory; kernels: the time of a step's kernels, after to before."
    )
    sys.exit(1 if any(map(is_short, rows)) else 0)


if __name__ == "__main__":
    main()
