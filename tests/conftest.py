import pytest

from activations_cuda.demo import has_gpu

requires_cuda = pytest.mark.skipif(not has_gpu(), reason="needs a GPU and a build for it")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=requires_cuda)])
def device(request):
    return request.param
