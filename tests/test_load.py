"""Under load, out of memory, and where a process forks or ends."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from family import FAMILY, assert_same_values, forms, sample

THREADS = 8
SECONDS = {"cpu": 10, "cuda": 60}


class Heap(ctypes.Structure):
    """The C library's struct mallinfo2."""

    names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in names]  # noqa: RUF012


def used_bytes(device):
    if device == "cuda":
        return torch.cuda.memory_allocated()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Heap
    heap = mallinfo()
    return heap.uordblks + heap.hblkhd  # what is resident counts free pages too, and libraries' pages that come and go


def test_threads_hammer(device):
    """Every thread has a stream and tensors of its own, and compares all that it gets."""
    grad = torch.randn(40_011, device=device)  # which PyTorch's own threads share on a CPU

    def cases(seed):
        for row in FAMILY:
            x = sample(row, len(grad), torch.float32, device, seed)
            expected = row.reference(x), row.scaled(grad, x)
            for form in forms(row):
                yield form, x.clone().requires_grad_(), expected

    def rounds(mine, until):
        stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext()
        count = 0
        start.wait()
        with stream:
            while time.monotonic() < until:
                outputs = [form(x) for form, x, _ in mine]
                gradients = [torch.autograd.grad(y, x, grad)[0] for y, (_, x, _) in zip(outputs, mine, strict=True)]
                for y, gradient, (_, _, expected) in zip(outputs, gradients, mine, strict=True):
                    assert_same_values(y.detach(), expected[0])
                    assert_same_values(gradient, expected[1])
                count += 1
        return count

    of_threads = [list(cases(seed)) for seed in range(THREADS)]
    if device == "cuda":
        torch.cuda.synchronize()
    start = threading.Barrier(THREADS)
    with ThreadPoolExecutor(THREADS) as pool:

        def hammer(seconds):
            counts = list(pool.map(rounds, of_threads, [time.monotonic() + seconds] * THREADS))
            assert min(counts) > 0
            return counts

        hammer(1)  # warms up
        before = used_bytes(device)
        counts = hammer(SECONDS[device])
    bit_of_each = sum(counts) * len(of_threads[0]) * len(grad) // 8
    assert used_bytes(device) - before <= (0 if device == "cuda" else bit_of_each // 8)


PROGRAMS = {
    "fork": """
# Importing has not touched the device: a child could not use it then.
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
x = torch.randn(1 << 20, device=device, requires_grad=True)
y = activations_cuda.hardtanh(x)
y.sum().backward()
same = torch.equal(y, x.clamp(-1, 1)) and torch.equal(x.grad, (x.abs() < 1).float())
os._exit(0 if same else 1)
""",
    "exit": """
# A graph is alive and, on a GPU, seconds of work are still to come.
x = torch.randn(1 << 20, device=device, requires_grad=True)

def work():
    outputs = [activations_cuda.hardtanh(x) for _ in range(100)]
    torch.autograd.backward(outputs[:50], [x.detach()] * 50)
    return outputs

work()  # loads the kernels and allocates, for which CUDA would wait below
if device == "cuda":
    torch.cuda._sleep(4_000_000_000)
outputs = work()
assert device == "cpu" or not torch.cuda.current_stream().query()
""",
    "out of memory": """
numel = 1 << 28
half_a_tensor, half_a_mask = numel, numel // 16  # bytes

def fails(call, spare):
    "The call runs out of memory, where there are so many bytes to spare."
    if device == "cuda":
        torch.cuda.empty_cache()
        most = torch.cuda.memory_reserved() + spare
        torch.cuda.set_per_process_memory_fraction(most / torch.cuda.get_device_properties(0).total_memory)
    else:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))
    try:
        call()
    except RuntimeError as error:
        return "memory" in str(error)
    finally:
        if device == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
        else:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

ops = torch.ops.fastact
piece = torch.randn(numel // 256, dtype=torch.bfloat16, device=device)
leaf = piece.repeat(256).requires_grad_()
copy = leaf * 1
output = ops.hardtanh(leaf)
ops.hardtanh_(torch.ones_like(piece, requires_grad=True) * 1).sum().backward()  # whatever is allocated only once
with torch.no_grad():
    assert fails(lambda: ops.hardtanh(leaf), half_a_tensor), "output"
assert fails(lambda: ops.hardtanh(leaf), half_a_tensor), "output, with a mask"
assert fails(lambda: ops.hardtanh(leaf), 2 * half_a_tensor + half_a_mask), "mask"
assert fails(lambda: ops.hardtanh_(copy), half_a_mask), "mask, in place"
assert fails(lambda: torch.autograd.grad(output, leaf, copy.detach(), retain_graph=True), half_a_tensor), "gradient"
for x in (leaf, copy):
    assert (x.view(256, -1) == piece).all(), "an input has changed"
expected = (piece.abs() < 1).repeat(256)
ones = torch.ones_like(leaf)  # which the engine's thread, if it were the last to have it, would free as the process ends
assert torch.equal(torch.autograd.grad(output, leaf, ones)[0], expected.to(leaf.dtype))
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_process(name, device):
    program = f"import os, resource, sys\nimport torch\nimport activations_cuda\ndevice = {device!r}\n{PROGRAMS[name]}"
    command = [sys.executable, "-X", "faulthandler", "-c", program]
    # Threads' arenas reserve addresses, where glibc finds memory when the limit leaves it none.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert run.returncode == 0, run.stderr
    assert "terminate" not in run.stderr
