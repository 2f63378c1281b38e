import os
import tempfile
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch.nn.attention import SDPBackend, sdpa_kernel

from activations_cuda import _C
from activations_cuda._load import has_gpu

GPUS = torch.cuda.device_count() if has_gpu() else 0

WITH_THREADS = {
    f"test_{name}" for name in ("exact", "exhaustive", "guards", "inplace", "mask", "programs", "rules", "smooth", "strides")
}

_C.recipes.set_smallest(0, 0)  # in the scope the tests' tensors follow from others whatever their size


def pytest_runtest_setup(item):
    needed = max((mark.kwargs.get("gpus", 1) for mark in item.iter_markers("cuda")), default=0)
    if needed > GPUS:
        pytest.skip(f"needs {needed} GPU(s), and a build for CUDA")


@pytest.fixture(scope="module", autouse=True)
def threads(request):
    """One in each process, but where tensors are large enough for several: to wake others takes longer than a small model."""
    before = torch.get_num_threads()
    if request.module.__name__ not in WITH_THREADS:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return request.param


@pytest.fixture
def no_hidden_errors(monkeypatch):
    """Recompute's hook keeps a tensor whatever goes wrong. Here that is an error."""
    from activations_cuda.recipes import hook

    hidden = []
    monkeypatch.setattr(hook.log, "debug", lambda *arguments: hidden.append(arguments) if arguments[0] == hook.KEPT else None)
    yield
    assert not hidden


@pytest.fixture
def set_facts():
    """To change what is known of some formulas."""
    from activations_cuda.recipes.formulas import FORMULAS

    yield _C.recipes.set_facts
    _C.recipes.set_facts(FORMULAS)


@pytest.fixture
def deterministic():
    """PyTorch's own kernels repeat themselves to the bit."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def most_memory():
    """Only one of the tests that run at the same time may take most of the GPU's memory."""
    with FileLock(Path(tempfile.gettempdir(), f"activations_cuda-{os.getuid()}.lock")):
        yield
        torch.cuda.empty_cache()
