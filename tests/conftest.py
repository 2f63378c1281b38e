import pytest
import torch

from activations_cuda._load import has_gpu

GPUS = torch.cuda.device_count() if has_gpu() else 0


def pytest_runtest_setup(item):
    needed = max((mark.kwargs.get("gpus", 1) for mark in item.iter_markers("cuda")), default=0)
    if needed > GPUS:
        pytest.skip(f"needs {needed} GPU(s), and a build for CUDA")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    return request.param
