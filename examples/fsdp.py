"""Trains a small transformer sharded by FSDP2 over two processes, once unmodified and once with recompute.

Runs on two GPUs, or else on the CPU. Prints whether losses and weights are equal, bit for bit, and on GPUs the peak memory.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import activations_cuda

PROCESSES = 2


class Block(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, width, depth, vocabulary=256):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(arguments, device, recompute):
    """The loss of every step, this process's part of the weights and, on a GPU, the peak memory in bytes."""
    torch.manual_seed(0)
    model = Transformer(arguments.width, arguments.depth).to(device)
    if recompute:
        activations_cuda.convert(model, recompute=True)  # before it is sharded
    options = {
        "mesh": init_device_mesh(device.type, (PROCESSES,)),  # by default on a GPU, if there is one
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    losses = []
    for _ in range(arguments.steps):
        tokens = torch.randint(256, (arguments.batch, arguments.length + 1), generator=generator).to(device)
        loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    weights = [weight.to_local() for weight in model.parameters()]
    return torch.stack(losses), weights, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def run(rank, arguments, rendezvous):
    on_gpu = torch.cuda.device_count() >= PROCESSES
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True)
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, init_method=f"file://{rendezvous}", rank=rank, world_size=PROCESSES)
    before, weights_before, peak_before = train(arguments, device, recompute=False)
    after, weights_after, peak_after = train(arguments, device, recompute=True)
    same_weights = all(map(torch.equal, weights_before, weights_after))
    lines = [f"rank {rank}: losses equal: {torch.equal(before, after)}; weights equal: {same_weights}"]
    if peak_before is not None:
        lines.append(f"rank {rank}: {peak_before / 2**20:.0f} MiB unmodified, {peak_after / 2**20:.0f} MiB with recompute")
    print("\n".join(lines), flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="training steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a process's batch (default: %(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens in a sequence (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the model (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=4, help="of the model (default: %(default)s)")
    arguments = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS asks for
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (arguments, os.path.join(folder, "rendezvous")), nprocs=PROCESSES)


if __name__ == "__main__":
    main()
