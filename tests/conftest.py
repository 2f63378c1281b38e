import pytest
import torch

import activations_cuda

has_cuda = torch.cuda.is_available() and activations_cuda.build_info()["cuda"] is not None
requires_cuda = pytest.mark.skipif(not has_cuda, reason="needs a GPU and a build for it")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=requires_cuda)])
def device(request):
    return request.param
