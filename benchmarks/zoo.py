"""Trains nets of timm and torchvision for a few steps on the GPU at hand, unmodified and by convert(net, batch,
recompute=True): whether the bits stay the same, and the peak memory of a step.

It takes the first small net of each module of timm and all small classifiers of torchvision, in one dtype and layout after the
other. Several are trained at a time: no time is measured. Writes benchmarks/results/<device>-zoo.json. Exits with 1 if losses,
weights or buffers differ in a net that repeats itself, if a step needs more memory, or if one fails that doesn't unmodified.
"""

import argparse
import copy
import gc
import os
import statistics
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch
from tabulate import tabulate
from tqdm import tqdm

import activations_cuda
from benchmarks import record
from benchmarks.models import GIB, Training, autocast, deterministic, from_timm, from_torchvision, same

BATCH = 16
STEPS = 3  # whose losses are compared, and the weights and buffers after them
MAX_PARAMETERS = 40e6
DTYPES = torch.bfloat16, torch.bfloat16, torch.float16, torch.float32  # of autocast
FORMATS = torch.channels_last, torch.channels_last, torch.contiguous_format
WORKERS = max(1, min(16, len(os.sched_getaffinity(0))))


def choices():
    """Names of nets, of each of which one is to be trained, and what creates a net of a name."""
    import timm
    import torchvision

    for module in timm.list_modules():
        yield [f"timm {name}" for name in timm.list_models(module=module)], from_timm
    for name in torchvision.models.list_models(module=torchvision.models):
        yield [f"torchvision {name}"], partial(from_torchvision, weights=None)


def is_small(create, name):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in create(name).parameters()) <= MAX_PARAMETERS


def images(name, net):
    """A batch of the size that the net is meant for."""
    if hasattr(net, "pretrained_cfg"):
        return torch.randn(BATCH, *net.pretrained_cfg["input_size"])
    import torchvision

    size = torchvision.models.get_model_weights(name).DEFAULT.transforms().crop_size[0]
    return torch.randn(BATCH, 3, size, size)


def with_logits(net):
    """Its forward pass, without what some nets return beside the logits."""

    def forward(batch):
        outputs = net(batch)
        return outputs if isinstance(outputs, torch.Tensor) else outputs[0]

    return forward


def trained(net, batch, dtype):
    training = Training(net, batch, dtype, with_logits)
    with deterministic():
        for _ in range(STEPS):
            training()
    return training


def is_equal(*trainings):
    found = same(trainings)
    return found["losses_equal"] and found["weights_equal"]


def measure(names, create, dtype, memory_format):
    """A row, or None if there is no small net, or the one there is can't be trained unmodified either."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    name = next((each for each in names if is_small(create, each.split()[1])), None)
    if name is None:
        return None
    gc.collect()
    torch.cuda.empty_cache()
    earlier = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    net = create(name.split()[1]).cuda().to(memory_format=memory_format).train()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() == 1:  # of zeros and ones, as norms and gates begin with, many formulas make the same
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    batch = images(name.split()[1], net).cuda().to(memory_format=memory_format)
    fresh = copy.deepcopy(net)
    row = {
        "net": name,
        "dtype": str(dtype).removeprefix("torch."),
        "memory_format": str(memory_format).removeprefix("torch."),
    }
    try:
        before = trained(net, batch, dtype)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    try:
        with autocast(dtype):
            converted = activations_cuda.convert(copy.deepcopy(fresh), batch.to("meta"), recompute=True)
        after = trained(converted, batch, dtype)
        equal = is_equal(before, after)
        if not equal and not is_equal(before, trained(fresh, batch, dtype)):
            equal = None  # it doesn't repeat itself
        del fresh
        peaks = [training.peak([other]) - earlier for training, other in ((before, after), (after, before))]
    except Exception as error:
        return {**row, "failure": f"{type(error).__name__}: {error}"}
    gib = [round(peak / GIB, 3) for peak in peaks]
    return {**row, "equal": equal, "before_gib": gib[0], "after_gib": gib[1], "memory": round(peaks[1] / peaks[0], 4)}


def is_short(row):
    return "failure" in row or row["equal"] is False or row["memory"] > 1


def main():
    argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__).parse_args()
    origin, path = record.origin(), record.path("-zoo")
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
        runs = {
            names[0]: pool.submit(measure, names, create, DTYPES[i % len(DTYPES)], FORMATS[i % len(FORMATS)])
            for i, (names, create) in enumerate(choices())
        }
        rows = []
        for name, run in tqdm(runs.items(), unit=" nets"):
            try:
                row = run.result()
            except Exception as error:  # e.g. of a process that died
                row = {"net": name, "failure": repr(error)}
            if row:
                rows.append(row)
                record.write(path, {**origin, "batch": BATCH, "steps": STEPS, "rows": rows})
    print(tabulate(rows, headers="keys", disable_numparse=True))
    memory = [row["memory"] for row in rows if "failure" not in row]
    print(f"\n{len(rows)} nets; memory: {min(memory):.2f} to {max(memory):.2f}, median {statistics.median(memory):.2f}.")
    print("equal: None where two unmodified trainings differ. gib: the peak of a step, with the weights and their momentum.")
    sys.exit(1 if any(map(is_short, rows)) else 0)


if __name__ == "__main__":
    main()
