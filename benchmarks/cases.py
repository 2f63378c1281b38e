"""What is measured: each case pairs a call of ours with a reference's on the same random normal inputs, with a target."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

import activations_cuda
from benchmarks import peers
from benchmarks.timing import GpuClock, HostClock

ops = torch.ops.fastact
aten = torch.ops.aten
FLOAT, HALF, BFLOAT = DTYPES = torch.float32, torch.float16, torch.bfloat16
MISSION = (4096, 393216)  # the shape this project began with
AT_THE_LIMIT = 0.99  # at least, where both run at the rate of a copy


@dataclass(frozen=True)
class Op:
    ours: Callable
    pytorch: Callable
    with_mask: Callable
    backward: Callable  # PyTorch's, called as backward(grad, x)
    slope: float


OPS = {
    "hardtanh": Op(
        activations_cuda.hardtanh,
        F.hardtanh,
        lambda x: ops.hardtanh_with_mask(x, -1.0, 1.0),
        lambda grad, x: aten.hardtanh_backward(grad, x, -1.0, 1.0),
        1.0,
    ),
    "hardsigmoid": Op(
        activations_cuda.hardsigmoid,
        F.hardsigmoid,
        ops.hardsigmoid_with_mask,
        aten.hardsigmoid_backward,
        float(torch.tensor(1 / 6, dtype=FLOAT)),
    ),
}


@dataclass(frozen=True)
class Smooth:
    ours: Callable
    pytorch: Callable
    forward: float  # at least, in bfloat16
    both: float  # at least, forward + backward


SMOOTH = {
    "gelu": Smooth(activations_cuda.gelu, F.gelu, 1.25, 1.05),
    "gelu, tanh": Smooth(partial(activations_cuda.gelu, approximate="tanh"), partial(F.gelu, approximate="tanh"), 1.08, 0.90),
    "silu": Smooth(activations_cuda.silu, F.silu, 1.00, 0.86),
    "hardswish": Smooth(activations_cuda.hardswish, F.hardswish, 0.98, 0.87),
    "mish": Smooth(activations_cuda.mish, F.mish, 1.70, 1.55),
}


@dataclass
class Case:
    """One row. `ours` and `reference` are called without arguments."""

    case: str
    op: str
    x: torch.Tensor
    reference_name: str
    ours: Callable
    reference: Callable
    at_least: float | None
    clock: Callable
    equal: bool = True  # whether both must return the same bits


def normal(shape, dtype, device):
    return torch.randn(shape, device=device, dtype=FLOAT).to(dtype)


def backward_of(op, x, device):
    """Our backward pass and PyTorch's, from the same gradient."""
    grad, mask = normal(x.shape, x.dtype, device), op.with_mask(x)[1]
    return partial(ops.masked_scale, grad, mask, op.slope, 0.0), partial(op.backward, grad, x)


def step(function, x, grad):
    return torch.autograd.grad(function(x), x, grad)[0]


def steps_of(ours, reference, x, device):
    """Forward and backward of both."""
    leaf, grad = x.requires_grad_(), normal(x.shape, x.dtype, device)
    return partial(step, ours, leaf, grad), partial(step, reference, leaf, grad)


def gpu_cases(device="cuda"):
    clock, fine_clock = GpuClock(), GpuClock(calls=8)
    for name, op in OPS.items():
        for dtype in DTYPES:
            half = dtype != FLOAT
            for power in (24, 26, 28):
                x = normal(1 << power, dtype, device)
                yield Case("forward", name, x, "F", partial(op.ours, x), partial(op.pytorch, x), AT_THE_LIMIT, clock)
                at_least = 1.30 if power == 24 else 1.38 if half else 1.40
                yield Case("backward", name, x, "aten", *backward_of(op, x, device), at_least, clock)
            for power in (26, 28):
                x = normal(1 << power, dtype, device)
                copied = torch.empty(x.nbytes + x.numel() // 16, dtype=torch.uint8, device=device)
                copy = partial(torch.empty_like(copied).copy_, copied)
                yield Case("forward with mask", name, x, "copy, same bytes", partial(op.with_mask, x), copy, 0.97, clock, False)
                both = steps_of(op.ours, op.pytorch, x, device)
                yield Case("forward + backward", name, x, "F", *both, 1.16 if half else 1.18, clock)
        for power in range(25):
            x = normal(1 << power, FLOAT, device)
            yield Case("forward, by size", name, x, "F", partial(op.ours, x), partial(op.pytorch, x), 0.98, fine_clock)

        x = normal(MISSION, FLOAT, device)
        y = torch.empty_like(x)
        yield Case("forward", name, x, "copy", partial(op.ours, x), partial(y.copy_, x), AT_THE_LIMIT, clock, False)
        for naive, at_least in ((peers.naive, 1.5), (peers.naive_unrolled, 2.4)):
            kernel = partial(naive(name), x, y)
            yield Case("forward", name, x, naive.__doc__, partial(op.ours, x), kernel, at_least, clock, name == "hardtanh")
        del x, y, kernel
        yield from peer_cases(name, op, clock, device)
    yield from layout_cases(OPS["hardtanh"], clock, device)
    yield from smooth_cases(clock, fine_clock, device)
    yield from call_cases(OPS, FLOAT, device, 64, (0.85, 0.95, 0.95))
    yield from call_cases(SMOOTH, BFLOAT, device, 64, (1.0, 1.0, 1.0))


def peer_cases(name, op, clock, device):
    """Others side by side, without a target."""
    compiled, elementwise = torch.compile(op.pytorch, dynamic=False), peers.elementwise(name)
    for dtype in (FLOAT, BFLOAT):
        for power in (24, 28):
            x = normal(1 << power, dtype, device)
            if dtype == FLOAT:
                yield Case("forward", name, x, "CuPy", partial(op.ours, x), partial(elementwise, x), None, clock, False)
            both = steps_of(op.ours, compiled, x, device)
            yield Case("forward + backward", name, x, "torch.compile", *both, None, clock, False)


def layout_cases(op, clock, device):
    """Against our own aligned, contiguous case; against PyTorch's op where rows are sliced."""
    for dtype in DTYPES:
        storage = normal((1 << 26) + 1, dtype, device)
        aligned = storage[:-1]
        for label, x in (("odd numel", storage[:-2]), ("storage offset by one", storage[1:])):
            for which, function in (("forward", op.ours), ("forward with mask", op.with_mask)):
                ours, reference = partial(function, x), partial(function, aligned)
                yield Case(f"{which}, {label}", "hardtanh", x, "ours, aligned", ours, reference, 0.90, clock, False)
        plain = aligned.view(64, 64, 128, 128)
        for label, x in (
            ("channels-last", plain.to(memory_format=torch.channels_last)),
            ("permuted", plain.permute(3, 1, 0, 2)),
        ):
            ours, reference = partial(op.ours, x), partial(op.ours, plain)
            yield Case(f"forward, {label}", "hardtanh", x, "ours, contiguous", ours, reference, 0.98, clock, False)
        matrix = aligned.view(-1, 4096)
        for label, x in (
            ("x[:, :2048]", matrix[:, :2048]),
            ("x[:, :1001]", matrix[:, :1001]),
            ("x.chunk(2, -1)[1]", matrix.chunk(2, -1)[1]),
        ):
            yield Case(f"forward, {label}", "hardtanh", x, "F", partial(op.ours, x), partial(op.pytorch, x), 1.0, clock)


def smooth_cases(clock, fine_clock, device):
    for name, op in SMOOTH.items():
        for power in (26, 28):
            x = normal(1 << power, BFLOAT, device)
            yield Case("forward", name, x, "F", partial(op.ours, x), partial(op.pytorch, x), op.forward, clock)
            both = steps_of(op.ours, op.pytorch, x, device)
            yield Case("forward + backward", name, x, "F", *both, op.both, clock)
        x = normal(1 << 28, HALF, device)
        yield Case("forward + backward", name, x, "F", *steps_of(op.ours, op.pytorch, x, device), 0.80, clock)
        for power in range(0, 25, 4):
            x = normal(1 << power, BFLOAT, device)
            yield Case("forward, by size", name, x, "F", partial(op.ours, x), partial(op.pytorch, x), 0.98, fine_clock)


def call_cases(ops, dtype, device, numel, at_most):
    """What a call costs on the host: no grad, grad, forward + backward. At most 0.85 of the time is at least 1 / 0.85."""
    for name, op in ops.items():
        x = normal(numel, dtype, device)
        leaf = normal(numel, dtype, device).requires_grad_()
        pairs = {
            "call, no grad": (1000, partial(op.ours, x), partial(op.pytorch, x)),
            "call, grad": (1000, partial(op.ours, leaf), partial(op.pytorch, leaf)),
            "call, forward + backward": (200, *steps_of(op.ours, op.pytorch, normal(numel, dtype, device), device)),
        }
        for (label, (calls, ours, reference)), bound in zip(pairs.items(), at_most, strict=False):
            yield Case(label, name, x, "F", ours, reference, 1 / bound, HostClock(calls))


def cpu_cases(device="cpu"):
    clock, threads = HostClock(1), torch.get_num_threads()
    for count in sorted({1, min(2, threads)}):
        torch.set_num_threads(count)
        label = f"{count} thread{'s' * (count > 1)}"
        for name, op in OPS.items():
            for dtype in DTYPES:
                x = normal(1 << 22, dtype, device)  # glibc maps a block above 32 MiB anew each time: page faults on both sides
                yield Case(f"forward, {label}", name, x, "F", partial(op.ours, x), partial(op.pytorch, x), 1.0, clock)
                yield Case(f"backward, {label}", name, x, "aten", *backward_of(op, x, device), 1.20, clock)
    torch.set_num_threads(threads)
    for numel in (1, 64, 1024):
        yield from call_cases(OPS, FLOAT, device, numel, (0.90, 0.90))
