"""Trains nets of timm for a few steps on the GPU at hand, unmodified and by convert(net, batch, recompute=True): the peak
memory of a step and the time of its kernels. They are one of each of many families, in bfloat16 and channels-last.

Writes benchmarks/results/<device>-nets.json. Exits with 1 if a step needs more memory, or if its kernels take more than 5%
longer. Whether the bits stay the same is what benchmarks.zoo is for.
"""

import argparse
import copy
import statistics
import sys
from importlib.metadata import version

import torch
from tabulate import tabulate
from tqdm import tqdm

import activations_cuda
from benchmarks import record
from benchmarks.models import GIB, Training, autocast, free_memory, from_timm, with_logits
from benchmarks.timing import KernelClock

BATCH = 64
DTYPE = torch.bfloat16  # of autocast
ROUNDS = 2
KERNELS_AT_MOST = 1.05
NETS = [
    "coatnet_0_rw_224",
    "convnextv2_tiny",
    "deit3_small_patch16_224",
    "eca_nfnet_l0",
    "ecaresnet50d",
    "edgenext_small",
    "efficientformer_l1",
    "efficientnetv2_rw_s",
    "efficientvit_b2",
    "eva02_small_patch14_224",
    "fastvit_t12",
    "hgnetv2_b3",
    "hrnet_w18",
    "inception_next_tiny",
    "levit_256",
    "mambaout_tiny",
    "maxvit_tiny_tf_224",
    "mixer_b16_224",
    "mobilenetv4_conv_medium",
    "mobilevitv2_100",
    "poolformer_s24",
    "rdnet_tiny",
    "regnety_016",
    "repvit_m1_1",
    "res2net50_26w_4s",
    "resmlp_24_224",
    "resnest50d",
    "resnetv2_50",
    "rexnet_150",
    "seresnext50_32x4d",
    "swinv2_tiny_window8_256",
    "tf_efficientnetv2_s",
    "vit_base_patch16_siglip_224",
    "xcit_small_12_p16_224",
]


def measure(name):
    earlier = free_memory()
    torch.manual_seed(0)
    with torch.device("cuda"):
        before = from_timm(name)
    before.train().to(memory_format=torch.channels_last)
    batch = torch.randn(BATCH, *before.pretrained_cfg["input_size"], device="cuda").to(memory_format=torch.channels_last)
    with autocast(DTYPE):
        after = activations_cuda.convert(copy.deepcopy(before), batch.to("meta"), recompute=True)
    pair = [Training(net, batch, DTYPE, with_logits) for net in (before, after)]
    for training in 2 * pair:
        training()  # momentum, and verification
    peaks = [training.peak([other]) - earlier for training, other in zip(pair, reversed(pair), strict=True)]
    clock = KernelClock()
    times = zip(*([clock(training) for training in pair] for _ in range(ROUNDS)), strict=True)
    kernels = [statistics.median(each) for each in times]
    return {
        "net": name,
        "before_gib": round(peaks[0] / GIB, 3),
        "after_gib": round(peaks[1] / GIB, 3),
        "memory": round(peaks[1] / peaks[0], 4),
        "before_kernels_ms": round(kernels[0] / 1e3, 2),
        "kernels": round(kernels[1] / kernels[0], 4),
    }


def main():
    argparse.ArgumentParser(prog="python -m benchmarks.nets", description=__doc__).parse_args()
    facts = {**record.origin(), "timm": version("timm"), "batch": BATCH, "kernels_at_most": KERNELS_AT_MOST}
    rows = []
    for name in tqdm(NETS, unit=" nets"):
        rows.append(measure(name))
        record.write(record.path("-nets"), {**facts, "rows": rows})
    print(tabulate(rows, headers="keys"))
    sys.exit(any(row["memory"] > 1 or row["kernels"] > KERNELS_AT_MOST for row in rows))


if __name__ == "__main__":
    main()
