"""How times are taken: contenders in turn, so that all meet the same machine, and medians with their spread."""

import statistics
import time
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

WARM_UP = 3


@dataclass(frozen=True)
class Time:
    """Microseconds of one contender, round by round."""

    rounds: tuple

    @property
    def median(self):
        return statistics.median(self.rounds)


def spread(time, reference):
    """Between which ratios eight tenths of the rounds lie."""
    ratios = sorted(a / b for a, b in zip(time.rounds, reference.rounds, strict=True))
    tenth = len(ratios) // 10
    return [round(ratios[tenth], 3), round(ratios[-1 - tenth], 3)]


def elapsed(function, calls=1):
    """Microseconds on the GPU of calls in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


class StepClock:
    """Time on the GPU, per call; several calls in a row even out what the host adds."""

    def __init__(self, rounds=25, calls=1):
        self.rounds = rounds
        self.calls = calls

    def __call__(self, function):
        return elapsed(function, self.calls) / self.calls


class KernelClock:
    """The time of a call's kernels, by the profiler: what the call would take if the GPU never waited for the host."""

    rounds = 3

    def __call__(self, function):
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            function()
            torch.cuda.synchronize()
        return sum(event.device_time_total for event in profiler.events() if event.device_type == DeviceType.CUDA)


class GpuClock:
    """Time on the GPU, per call, with the L2 cache flushed before every call.

    The flush keeps the GPU busy, some 0.2 ms, while the host queues the call, so that launching costs nothing here. An H200's
    events come in steps of a sixth of a microsecond: a round of short calls is the mean of several.
    """

    rounds = 25

    def __init__(self, calls=1):
        self.calls = calls
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        self.flush = torch.empty(16 * l2, dtype=torch.uint8, device="cuda")

    def __call__(self, function):
        return statistics.fmean(self.once(function) for _ in range(self.calls))

    def once(self, function):
        self.flush.zero_()
        return elapsed(function)


class HostClock:
    """Time on the host, per call, in loops long enough for the clock. On a GPU the loop is not waited for."""

    rounds = 25

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, function):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(self.calls):
            function()
        return (time.perf_counter() - start) / self.calls * 1e6


def alternate(clock, *functions):
    """A Time for each function."""
    rounds = [[clock(function) for function in functions] for _ in range(WARM_UP + clock.rounds)]
    return [Time(times) for times in zip(*rounds[WARM_UP:], strict=True)]
