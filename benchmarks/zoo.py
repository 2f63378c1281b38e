"""Trains small nets of timm, torchvision and transformers for a few steps on the GPU at hand, unmodified and by convert(net,
batch, recompute=True): whether the bits stay the same, and the peak memory of a step.

It takes the nets of benchmarks/catalogue.py in one dtype and layout after the other, several at a time: no time is measured.
Nets that don't train unmodified are skipped. Writes benchmarks/results/<device>-zoo.json. Exits with 1 if losses, weights or
buffers differ in a net that repeats itself, if a step needs over 1 MiB more, or if a net fails that trains unmodified.
"""

import argparse
import copy
import os
import statistics
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context

import torch
from tabulate import tabulate
from tqdm import tqdm

import activations_cuda
from benchmarks import record
from benchmarks.catalogue import BATCH, TOKENS, choices
from benchmarks.models import GIB, Training, autocast, deterministic, free_memory, same, with_logits

STEPS = 3  # whose losses are compared, and the weights and buffers after them
DTYPES = torch.bfloat16, torch.bfloat16, torch.float16, torch.float32  # of autocast
FORMATS = torch.channels_last, torch.channels_last, torch.contiguous_format
WORKERS = max(1, min(8, len(os.sched_getaffinity(0))))  # which share the GPU's memory


def trained(net, batch, dtype):
    training = Training(net, batch, dtype, with_logits)
    with deterministic():
        for _ in range(STEPS):
            training()
    return training


def is_equal(*trainings):
    equal = same(trainings)
    return equal["losses_equal"] and equal["weights_equal"]


def measure(label, choice, dtype, memory_format):
    """A row, or None if there is no small net."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    row = {"net": label, "dtype": str(dtype).removeprefix("torch.")}
    try:
        found = choice()
        if found is None:
            return None
        row["net"], net, batch = found
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.dim() == 1:  # of zeros and ones, as norms and gates begin with, many formulas make the same
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        earlier = free_memory()
        net, batch = net.cuda().train(), batch.cuda()
        if batch.dim() == 4:
            row["memory_format"] = str(memory_format).removeprefix("torch.")
            net, batch = net.to(memory_format=memory_format), batch.to(memory_format=memory_format)
        fresh = copy.deepcopy(net)
        before = trained(net, batch, dtype)
    except Exception as error:  # of the unmodified net
        return {**row, "skipped": f"{type(error).__name__}: {error}"}
    try:
        with autocast(dtype):
            converted = activations_cuda.convert(copy.deepcopy(fresh), batch, recompute=True)
        after = trained(converted, batch, dtype)
        equal = is_equal(before, after)
        if not equal and not is_equal(before, trained(fresh, batch, dtype)):
            equal = None  # it doesn't repeat itself
        del fresh
        for training in (before, after):
            training()  # verifies what the algorithms of the steps above haven't
        peaks = [training.peak([other]) - earlier for training, other in ((before, after), (after, before))]
    except Exception as error:
        return {**row, "failure": f"{type(error).__name__}: {error}"}
    gib = [round(peak / GIB, 3) for peak in peaks]
    return {**row, "equal": equal, "before_gib": gib[0], "after_gib": gib[1], "memory": round(peaks[1] / peaks[0], 4)}


def is_short(row):
    more = round(row.get("after_gib", 0) - row.get("before_gib", 0), 3)
    # The allocator's blocks may be up to 1 MiB larger than requested.
    return "failure" in row or row.get("equal") is False or more > 0.001


def main():
    argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=__doc__).parse_args()
    origin, path = record.origin(), record.path("-zoo")
    origin |= {library: version(library) for library in ("timm", "torchvision", "transformers")}
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
        runs = [
            pool.submit(measure, label, choice, DTYPES[i % len(DTYPES)], FORMATS[i % len(FORMATS)])
            for i, (label, choice) in enumerate(choices())
        ]
        rows = []
        for run in tqdm(runs, unit=" nets"):
            try:
                row = run.result()
            except Exception as error:  # e.g. of a process that died
                row = {"failure": repr(error)}
            if row:
                rows.append(row)
                record.write(path, {**origin, "batch": BATCH, "tokens": TOKENS, "steps": STEPS, "rows": rows})
    print(tabulate(rows, headers="keys", disable_numparse=True, maxcolwidths=60))
    memory = [row["memory"] for row in rows if "memory" in row]
    skipped = sum("skipped" in row for row in rows)
    print(f"\n{len(memory)} nets; memory: {min(memory):.2f} to {max(memory):.2f}, median {statistics.median(memory):.2f};")
    print(f"{skipped} don't train unmodified.")
    print("equal: None where two unmodified trainings differ. gib: the peak of a step, with the weights and their momentum.")
    sys.exit(1 if any(map(is_short, rows)) else 0)


if __name__ == "__main__":
    main()
