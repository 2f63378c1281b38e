"""Trains compiled models for a few steps on the GPU at hand: unmodified, converted, and with the pass for Inductor.

Writes benchmarks/results/<device>-compiled.json. Exits with 1 where the pass costs more time or memory than the best of them.
"""

import copy
import sys
from functools import partial

import torch
from tabulate import tabulate
from torch import nn
from tqdm import tqdm

from activations_cuda import inductor
from activations_cuda._load import has_gpu
from benchmarks import record
from benchmarks.models import GIB, MODELS, Model, Training, both, mlp, normal
from benchmarks.timing import StepClock, alternate, spread

CASES = {
    "MLP, 4 x 4096": Model(mlp, (8192, 4096)),
    "MLP, 4 x 4096, GELU": Model(partial(mlp, activation=nn.GELU), (8192, 4096)),
    "mobilenet_v2": MODELS["mobilenet_v2"],
}
TIME_AT_MOST, MEMORY_AT_MOST = 1.005, 1.0  # of the best


def captured(training):
    """A compiled step as a CUDA graph: in bfloat16 it would else wait for the host."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training()
    return graph.replay


def measure(name, model):
    before, after = both(model, torch.bfloat16)
    batch = normal(model.shape, next(before.parameters()).dtype)
    contenders = {
        "unmodified": (before, torch.compile),
        "converted": (after, torch.compile),
        "with the pass": (copy.deepcopy(after), partial(torch.compile, options=inductor.options())),
    }
    trainings = []
    for contender, compile in contenders.values():
        torch._dynamo.reset()
        trainings.append(Training(contender, batch, torch.bfloat16, compile, captured=True))
        trainings[-1]()
    # Now: captured graphs hold memory of their own.
    peaks = [training.peak([other for other in trainings if other is not training]) for training in trainings]
    times = alternate(StepClock(rounds=50, calls=8), *map(captured, trainings))
    best, least = min(times, key=lambda time: time.median), min(peaks)
    return [
        {
            "model": name,
            "dtype": "bfloat16",
            "batch": model.shape[0],
            "compiled": contender,
            "ms": round(time.median / 1e3, 3),
            "time": round(time.median / best.median, 4),
            "spread": spread(time, best),
            "gib": round(peak / GIB, 3),
            "memory": round(peak / least, 6),
        }
        for contender, time, peak in zip(contenders, times, peaks, strict=True)
    ]


def is_short(row):
    return row["compiled"] == "with the pass" and (row["time"] > TIME_AT_MOST or row["memory"] > MEMORY_AT_MOST)


def main():
    if not has_gpu():
        sys.exit("python -m benchmarks.compiled: needs a GPU and a build of activations_cuda for it")
    rows = [row for name, model in tqdm(CASES.items(), unit=" models") for row in measure(name, model)]
    record.write(record.path("-compiled"), {**record.origin(), "rows": rows})
    cells = [[*row.values(), "ABOVE ITS BOUND" if is_short(row) else ""] for row in rows]
    print(tabulate(cells, headers=[*rows[0], ""], disable_numparse=True))
    print("\nms: a training step on the GPU, the median; time, its spread and memory: to the best of the three.")
    sys.exit(1 if any(map(is_short, rows)) else 0)


if __name__ == "__main__":
    main()
