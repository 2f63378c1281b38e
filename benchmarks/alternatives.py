"""Trains models in bfloat16 on the GPU at hand by each way to save memory: time, memory, and whether the bits stay the same.

Each way takes its steps in turn with the model as it comes. Writes benchmarks/results/<device>-alternatives.json and draws it.
Names of models on the command line run those alone; the other models' results of the same commit stay.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from tabulate import tabulate
from torch._functorch import config
from torch._inductor.utils import fresh_cache
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import activations_cuda
from benchmarks import models, record
from benchmarks.models import IMAGE, STEPS, Training, both, chosen_models, compare, deterministic, same
from benchmarks.plot import draw_alternatives
from benchmarks.timing import StepClock, alternate

# Batches so large that none of the ways waits for the host.
BATCHES = {"mobilenet_v2": 512, "efficientnet_b0": 256, "vit_b_16": 128, "convnext_tiny": 128}
MODELS = {name: replace(models.MODELS[name], shape=(batch, *IMAGE)) for name, batch in BATCHES.items()}
BLOCKS = "InvertedResidual", "MBConv", "EncoderBlock", "CNBlock"  # their classes


def with_checkpoints(model):
    for module in model.modules():
        if type(module).__name__ in BLOCKS:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    return model


def with_save_on_cpu(model):
    def forward(batch):
        with save_on_cpu(pin_memory=True):
            return model(batch)

    return forward


def with_half_the_budget(model):
    compiled = torch.compile(model)

    def forward(batch):
        with config.patch(activation_memory_budget=0.5):
            return compiled(batch)

    return forward


@dataclass(frozen=True)
class Way:
    wrap: Callable | None = None
    converted: bool = False
    compiled: bool = False


WAYS = {
    "converted": Way(converted=True),
    "checkpoint": Way(with_checkpoints),
    "converted, checkpoint": Way(with_checkpoints, converted=True),
    "save_on_cpu": Way(with_save_on_cpu),
    "torch.compile": Way(torch.compile, compiled=True),  # with a budget of 1.0
    "torch.compile, budget 0.5": Way(with_half_the_budget, compiled=True),
}


def measure(name, way):
    torch._dynamo.reset()  # what it compiled holds on to its model, and has another budget
    gc.collect()
    torch.cuda.empty_cache()
    earlier = torch.cuda.memory_allocated()
    batch = MODELS[name].batch("cuda")
    before, after = both(MODELS[name], torch.bfloat16)
    if not way.converted:
        activations_cuda.revert(after)
    trainings = eager, other = Training(before, batch, torch.bfloat16), Training(after, batch, torch.bfloat16, way.wrap)
    seconds = None
    if way.compiled:
        eager(), eager()
        start = time.perf_counter()
        with fresh_cache():
            other(), other()
            torch.cuda.synchronize()
        seconds = round(time.perf_counter() - start, 1)
    else:
        with deterministic():  # under which a compiled model would be compiled once more: it differs without
            for training in trainings:
                for _ in range(STEPS):
                    training()
    equal = same(trainings)
    parameters = zip(before.parameters(), after.parameters(), strict=True)
    equal["parameters_equal"] = all(torch.equal(*pair) for pair in parameters)
    peaks = eager.peak([other]) - earlier, other.peak([eager]) - earlier
    return {**equal, **compare(*alternate(StepClock(rounds=10), *trainings), *peaks), "compile_s": seconds}


def table(rows):
    columns = ["model", "way", "before_ms", "after_ms", "time", "spread", "before_gib", "after_gib", "memory", "compile_s"]
    columns += ["losses_equal", "weights_equal", "parameters_equal"]
    return tabulate([[row[column] for column in columns] for row in rows], headers=columns, disable_numparse=True)


def main():
    chosen = chosen_models("python -m benchmarks.alternatives", __doc__, list(MODELS))
    origin, path = record.origin(), record.path("-alternatives")
    rows = [row for row in record.earlier(path, origin).get("rows", []) if row["model"] not in chosen]
    for name, label in tqdm([(name, label) for name in chosen for label in WAYS], unit=" runs"):
        rows.append({"model": name, "way": label, "batch": MODELS[name].shape[0], **measure(name, WAYS[label])})
        rows.sort(key=lambda row: list(MODELS).index(row["model"]))
        record.write(path, {**origin, "rows": rows})
    draw_alternatives(path)
    print(table(rows))
    print("\nbefore: the model as it comes. compile_s: the first two steps. weights_equal: parameters and buffers.")


if __name__ == "__main__":
    main()
