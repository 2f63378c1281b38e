"""Trains models in bfloat16 on the GPU at hand by each way to save memory: time, memory, and whether the bits stay the same.

Each way takes its steps in turn with the unmodified model. Writes benchmarks/results/<device>-alternatives.json and draws it.
Names of models on the command line run those alone; the other models' rows stay, each with the commit that it is of.
"""

import copy
import time
from functools import partial

import torch
from tabulate import tabulate
from torch._functorch import config
from torch._inductor.utils import fresh_cache
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from tqdm import tqdm

import activations_cuda
from activations_cuda.recipes.verification import is_identical
from benchmarks import record
from benchmarks.models import Training, autocast, chosen_models, compare, deterministic, free_memory, same
from benchmarks.plot import draw_alternatives
from benchmarks.recompute import CASES, STEPS
from benchmarks.timing import StepClock, alternate

MODELS = "mobilenet_v2", "efficientnet_b0", "resnet50", "convnext_tiny", "vit_b_16", "GPT-2", "Llama"
BLOCKS = "InvertedResidual", "MBConv", "Bottleneck", "CNBlock", "EncoderBlock", "GPT2Block", "LlamaDecoderLayer"  # of these
aten = torch.ops.aten
EXPENSIVE = [  # whose outputs selective checkpointing saves
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]

# Each makes of a model, and of a batch on the meta device, the forward pass.
convert = activations_cuda.convert
recompute = partial(convert, recompute=True)


def checkpointed(model, batch, first=convert, every=1, **options):
    model = first(model, batch)
    for block in [module for module in model.modules() if type(module).__name__ in BLOCKS][::every]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    return model


def unmodified(model, batch):
    return model


def offloaded(model, batch, first=unmodified):
    model = first(model, batch)

    def forward(batch):
        with save_on_cpu(pin_memory=True):
            return model(batch)

    return forward


def compiled(model, batch, budget=1.0):
    model = torch.compile(model)

    def forward(batch):
        with config.patch(activation_memory_budget=budget):
            return model(batch)

    return forward


WAYS = {
    "converted": convert,
    "recompute": recompute,
    "recompute, every 2nd block checkpointed": partial(checkpointed, first=recompute, every=2),
    "checkpoint": partial(checkpointed, first=unmodified),
    "selective checkpoint": partial(
        checkpointed, first=unmodified, context_fn=partial(create_selective_checkpoint_contexts, EXPENSIVE)
    ),
    "save_on_cpu": offloaded,
    "recompute within save_on_cpu": partial(offloaded, first=recompute),
    "torch.compile": compiled,  # with a budget of 1
    "torch.compile, budget 0.5": partial(compiled, budget=0.5),
}


def measure(model, case, way):
    torch._dynamo.reset()  # what it compiled holds on to its model, and has another budget
    earlier = free_memory()
    dtype = case.dtype or torch.float32  # without autocast
    batch = case.batch("cuda")
    after = copy.deepcopy(model)
    with autocast(dtype):
        forward = WAYS[way](after, case.batch("meta"))
    eager = Training(copy.deepcopy(model), batch, dtype)
    other = Training(after, batch, dtype, lambda _: forward)
    seconds = None
    if "compile" in way:
        eager(), eager()
        start = time.perf_counter()
        with fresh_cache():
            other(), other()
            torch.cuda.synchronize()
        seconds = round(time.perf_counter() - start, 1)
    else:
        with deterministic():  # under which a compiled model would be compiled once more: it differs without
            for training in (eager, other):
                for _ in range(STEPS):
                    training()
    equal = same([eager, other])
    parameters = zip(eager.model.parameters(), after.parameters(), strict=True)
    equal["parameters_equal"] = all(is_identical(*pair) for pair in parameters)
    peaks = eager.peak([other]) - earlier, other.peak([eager]) - earlier
    return {**equal, **compare(*alternate(StepClock(rounds=7), eager, other), *peaks), "compile_s": seconds}


def rows_of(name):
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model().cuda()
    for way in tqdm(WAYS, desc=name, unit=" ways"):
        row = {"model": name, "way": way, "batch": case.shape[0]}
        try:
            yield {**row, **measure(model, case, way)}
        except RuntimeError as error:
            yield {**row, "failure": str(error).splitlines()[0]}


COLUMNS = ["model", "way", "before_ms", "after_ms", "time", "spread", "before_gib", "after_gib", "memory", "compile_s"]
COLUMNS += ["losses_equal", "weights_equal", "parameters_equal", "failure"]


def main():
    chosen = chosen_models("python -m benchmarks.alternatives", __doc__, list(MODELS))
    rows = record.Rows(record.path("-alternatives"), MODELS, chosen)
    rows[:] = [row for row in rows if row["way"] in WAYS]
    for name in chosen:
        for row in rows_of(name):
            rows.add(row)
    draw_alternatives(rows.path)
    print(tabulate([[row.get(column) for column in COLUMNS] for row in rows], headers=COLUMNS, disable_numparse=True))
    print("\nbefore: unmodified. compile_s: the first two steps. weights_equal: parameters and buffers.")


if __name__ == "__main__":
    main()
