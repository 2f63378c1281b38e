"""The largest batch with which a training step fits into the memory of a common card, in bfloat16 on the GPU at hand: of the
unmodified model, of the converted one and by recompute.

The caching allocator may have so much; so what lies between its blocks counts. Writes benchmarks/results/<device>-batches.json.
Names of models on the command line run those alone; the other models' results stay, each with the commit that it is of.
"""

import copy

import torch
from tabulate import tabulate
from tqdm import tqdm

from benchmarks import record
from benchmarks.alternatives import convert, recompute, unmodified
from benchmarks.models import GIB, Training, autocast, chosen_models, free_memory
from benchmarks.recompute import CASES

CAP = 12 * GIB
STEPS = 3
# In steps of so many, below so many.
MODELS = {
    "mobilenet_v2": (8, 1024),
    "efficientnet_b0": (8, 1024),
    "resnet50": (8, 1024),
    "vit_b_16": (8, 512),
    "convnext_tiny": (8, 512),
    "BERT-base": (4, 128),
}
WAYS = {"eager": unmodified, "converted": convert, "recompute": recompute}


def fits(model, case, way, count):
    model = copy.deepcopy(model).cuda()
    with autocast(torch.bfloat16):
        model = way(model, case.batch("meta"))
    try:
        training = Training(model, case.batch("cuda", count), torch.bfloat16)
        for _ in range(STEPS):
            training()
    except torch.OutOfMemoryError:
        return False
    return True


def largest_batch(model, case, way, step, limit):
    low, high = 0, limit // step
    while high - low > 1:
        middle = (low + high) // 2
        if fits(model, case, way, middle * step):
            low = middle
        else:
            high = middle
        free_memory()
    return low * step


def main():
    chosen = chosen_models("python -m benchmarks.batches", __doc__, list(MODELS))
    rows = record.Rows(record.path("-batches"), MODELS, chosen, cap_gib=CAP / GIB)
    torch.cuda.set_per_process_memory_fraction(CAP / torch.cuda.get_device_properties(0).total_memory)
    for name in tqdm(chosen, unit=" models"):
        model = CASES[name].model()
        batches = {way: largest_batch(model, CASES[name], WAYS[way], *MODELS[name]) for way in WAYS}
        rows.add({"model": name, **batches})
    print(tabulate(rows, headers="keys"))
    print(f"\nThe largest batch within {CAP / GIB:.0f} GiB.")


if __name__ == "__main__":
    main()
