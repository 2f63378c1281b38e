"""Runs the ops and a small net beside PyTorch's own: whether they are equal, what they save and how long they take."""

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import activations_cuda
from activations_cuda._load import has_gpu
from activations_cuda.memory import saved_bytes

ROUNDS = 11
ON_GPU = (4096, 393216)  # the shape this project began with: 6.4 GB in float32
ON_CPU = (4096, 1024)
COLUMNS = "{:<12} {:<19} {:>7} {:>11} {:>12} {:>10} {:>12} {:>15} {:>7}"

OPS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "hardtanh": (activations_cuda.hardtanh, F.hardtanh),
    "hardsigmoid": (activations_cuda.hardsigmoid, F.hardsigmoid),
}


def choose_shape():
    """The device to run on and the shape it has the memory for."""
    if not has_gpu():
        return torch.device("cpu"), ON_CPU
    free, _ = torch.cuda.mem_get_info()
    rows, columns = ON_GPU
    most = free // (8 * columns * 4)  # eight float32 tensors live at once
    return torch.device("cuda"), (min(rows, most), columns)


def seconds(function, device):
    """How long one call takes, on the device's own clock."""
    if device.type == "cpu":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def alternate(functions, device):
    """For each function the seconds of every round, taken in turn so that all meet the same machine; the first warms up."""
    rounds = [[seconds(function, device) for function in functions] for _ in range(ROUNDS + 1)]
    return list(zip(*rounds[1:], strict=True))


def same_bits(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def rows(device, shape):
    """Yields for each op and pass what the table's row says."""
    x = torch.randn(shape, device=device).mul_(3)
    grad = torch.randn(shape, device=device)
    leaf = x.detach().requires_grad_()
    for name, functions in OPS.items():
        passes = {
            "forward": ([lambda f=f: f(x) for f in functions], 8, [0, 0]),
            "forward + backward": (
                [lambda f=f: torch.autograd.grad(f(leaf), leaf, grad)[0] for f in functions],
                16.25,
                [saved_bytes(f, leaf) for f in functions],
            ),
        }
        for label, (calls, bytes_per_element, saved) in passes.items():
            equal = same_bits(*(call() for call in calls))
            times = alternate(calls, device)
            ours, theirs = map(statistics.median, times)
            ratios = sorted(b / a for a, b in zip(*times, strict=True))
            yield name, label, equal, saved, ours, theirs, ratios, bytes_per_element * x.numel() / ours


def train():
    """What a step of a small net saves, and how long it takes, without and within recompute(); and whether gradients agree."""
    torch.manual_seed(0)
    on_gpu = has_gpu()
    device, width, batch = torch.device("cuda" if on_gpu else "cpu"), 64 if on_gpu else 16, 256 if on_gpu else 8
    layers = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(6):
        layers += [nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, width, 3, padding=1)]
    net = nn.Sequential(*layers).to(device, memory_format=torch.channels_last)
    images = torch.randn(batch, 3, 56, 56, device=device).to(memory_format=torch.channels_last)
    recomputed = activations_cuda.recompute()(net)

    def step(model):
        return torch.autograd.grad(model(images).square().mean(), list(net.parameters()))

    with torch.backends.cudnn.flags(enabled=on_gpu, deterministic=True):
        equal = all(map(torch.equal, step(net), step(recomputed)))
        saved = [saved_bytes(model, images) for model in (net, recomputed)]
        times = alternate([lambda: step(net), lambda: step(recomputed)], device)
    return equal, saved, [statistics.median(each) for each in times]


def main():
    info = activations_cuda.build_info()
    device, shape = choose_shape()
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, threads: {torch.get_num_threads()}"
    print(f"activations_cuda {info['version']}, torch {torch.__version__}, {name}, {shape} float32\n")
    print(COLUMNS.format("op", "pass", "equal", "saved, MiB", "PyTorch, MiB", "ms", "PyTorch, ms", "times faster", "GB/s"))
    all_equal = True
    for op, label, equal, saved, ours, theirs, ratios, rate in rows(device, shape):
        all_equal &= equal
        print(
            COLUMNS.format(
                op,
                label,
                "yes" if equal else "NO",
                *(f"{size / 2**20:.1f}" for size in saved),
                f"{ours * 1e3:.3f}",
                f"{theirs * 1e3:.3f}",
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})",
                f"{rate / 1e9:.0f}",
            )
        )
    print(f"\nMedians of {ROUNDS} alternated rounds; in brackets the spread. GB/s counts what this package reads and writes.")
    equal, (plain, within), (before, after) = train()
    all_equal &= equal
    print(
        "\nWithin recompute() a step of seven convolutions, with batch norm and ReLU between, saves "
        f"{within / 2**20:.1f} MiB instead of {plain / 2**20:.1f}, in {after * 1e3:.1f} ms instead of {before * 1e3:.1f}. "
        f"The gradients {'are equal' if equal else 'DIFFER'}."
    )
    if not all_equal:
        sys.exit("The results differ from PyTorch's.")
