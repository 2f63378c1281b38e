"""Trains models in parallel on two GPUs for a few steps, unmodified and converted, some with recompute: step time and peak
memory of both.

Writes benchmarks/results/<device>-x2-distributed.json. Exits with 1 where a loss or a weight differs. Names of models on the
command line run those alone; the other models' rows stay, each with the commit that it is of.
"""

import copy
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import activations_cuda
from activations_cuda._load import has_gpu
from benchmarks import record
from benchmarks.models import (
    IMAGE,
    STEPS,
    Training,
    chosen_models,
    compare,
    deterministic,
    from_torchvision,
    is_short,
    mlp,
    same,
    table,
)
from benchmarks.recompute import llama
from benchmarks.timing import StepClock, alternate

RANKS = 2


@dataclass(frozen=True)
class Case:
    parallel: str
    model: str
    create: Callable
    parallelize: Callable
    shape: tuple  # of a rank's batch
    autocast: bool  # to bfloat16; or else the model is of that dtype
    recompute: bool = False
    vocabulary: int | None = None

    def batch(self):
        if self.vocabulary:
            return torch.randint(1, self.vocabulary, self.shape, device="cuda")
        batch = torch.randn(self.shape, device="cuda")
        return batch.to(memory_format=torch.channels_last) if self.autocast else batch.bfloat16()


def data_parallel(model):
    return DistributedDataParallel(model.to(memory_format=torch.channels_last))


def fully_sharded(model):
    for block in model.features:
        fully_shard(block)
    return fully_shard(model)


def fully_sharded_llama(model):
    for layer in model.model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def tensor_parallel(model):
    """In pairs, and with plain tensors between the layers: PyTorch's hardtanh has no derivative on DTensors."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "6": RowwiseParallel()}
    device = next(model.parameters()).device.type
    return parallelize_module(model, init_device_mesh(device, (dist.get_world_size(),)), plan)


CASES = [
    *(
        Case(parallel, model, partial(from_torchvision, model), parallelize, (128, *IMAGE), autocast=True)
        for model in ("mobilenet_v2", "efficientnet_b0")
        for parallel, parallelize in (("DDP", data_parallel), ("FSDP2", fully_sharded))
    ),
    Case("tensor parallel", "MLP, 4 x 4096", mlp, tensor_parallel, (8192, 4096), autocast=False),
    *(
        Case("DDP", model, partial(from_torchvision, model), data_parallel, (128, *IMAGE), autocast=True, recompute=True)
        for model in ("efficientnet_b0", "resnet50")
    ),
    Case(
        "FSDP2",
        "Llama",
        lambda: llama().bfloat16(),
        fully_sharded_llama,
        (2, 2048),
        autocast=False,
        recompute=True,
        vocabulary=32000,
    ),
]

NAMES = [*dict.fromkeys(case.model for case in CASES)]


class Parallel(Training):
    """Trains a parallel model. What a rank holds of it between steps is measured: it may be a part."""

    def __init__(self, case, model, batch):
        before = torch.cuda.memory_allocated()
        parallel = case.parallelize(model.cuda().train())
        super().__init__(parallel, batch, torch.bfloat16 if case.autocast else torch.float32)
        with deterministic():
            for _ in range(STEPS):
                self()
        self.between_steps = torch.cuda.memory_allocated() - before

    def held(self):
        return self.between_steps


def on_all_ranks(condition):
    conditions = [None] * dist.get_world_size()
    dist.all_gather_object(conditions, condition)
    return all(conditions)


def measure(case):
    torch.manual_seed(0)  # on every rank alike
    model = case.create()
    batch = case.batch()
    converted = activations_cuda.convert(copy.deepcopy(model), recompute=case.recompute)
    before, after = trainings = [Parallel(case, m, batch) for m in (model, converted)]
    equal = same(trainings)
    times = alternate(StepClock(), *trainings)
    peaks = before.peak([after]), after.peak([before])
    return {
        "model": case.model,
        "dtype": "bfloat16",
        "mode": f"{case.parallel}, recompute" if case.recompute else case.parallel,
        "batch": case.shape[0],
        "steps": equal["steps"],
        **{what: on_all_ranks(equal[what]) for what in ("losses_equal", "weights_equal")},
        **compare(*times, *peaks),
    }


def work(rank, rendezvous, path, chosen):
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=RANKS, device_id=torch.device("cuda", rank))
    rows = record.Rows(path, NAMES, chosen, ranks=RANKS)
    for case in tqdm([case for case in CASES if case.model in chosen], unit=" runs", disable=rank != 0):
        row = measure(case)
        torch.cuda.empty_cache()
        if rank == 0:
            rows.add(row)
    dist.destroy_process_group()


def main():
    if not has_gpu() or torch.cuda.device_count() < RANKS:
        sys.exit(f"python -m benchmarks.distributed: needs {RANKS} GPUs and a build of activations_cuda for them")
    chosen = chosen_models("python -m benchmarks.distributed", __doc__, NAMES)
    path = record.path(f"-x{RANKS}-distributed")
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = (Path(directory) / "rendezvous").as_uri()
        torch.multiprocessing.spawn(work, (rendezvous, path, chosen), nprocs=RANKS)
    rows = json.loads(path.read_text())["rows"]
    print(table(rows))
    print("\nbefore: unmodified; after: converted. batch: of each GPU. Time and memory are those of the first GPU.")
    sys.exit(1 if any(map(is_short, rows)) else 0)


if __name__ == "__main__":
    main()
