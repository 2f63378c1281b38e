"""The ops' schemas, and how they behave among PyTorch's modes and wrappers."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import activations_cuda
from family import assert_same_values

ops = torch.ops.fastact


@pytest.mark.parametrize(
    "schema",
    [
        "fastact::hardtanh(Tensor self, float min_val=-1., float max_val=1.) -> Tensor",
        "fastact::hardsigmoid(Tensor self) -> Tensor",
        "fastact::hardsigmoid.affine(Tensor self, float alpha, float beta) -> Tensor",
        "fastact::relu(Tensor self) -> Tensor",
        "fastact::relu6(Tensor self) -> Tensor",
        "fastact::leaky_relu(Tensor self, float negative_slope=0.01) -> Tensor",
        "fastact::hardshrink(Tensor self, float lambd=0.5) -> Tensor",
        "fastact::softshrink(Tensor self, float lambd=0.5) -> Tensor",
        "fastact::threshold(Tensor self, float threshold, float value) -> Tensor",
        "fastact::hardtanh_(Tensor(a!) self, float min_val=-1., float max_val=1.) -> Tensor(a!)",
        "fastact::hardsigmoid_.affine(Tensor(a!) self, float alpha, float beta) -> Tensor(a!)",
        "fastact::hardtanh_with_mask(Tensor self, float min_val, float max_val) -> (Tensor output, Tensor mask)",
        "fastact::hardsigmoid_with_mask(Tensor self) -> (Tensor output, Tensor mask)",
        "fastact::hardsigmoid_with_mask.affine(Tensor self, float alpha, float beta) -> (Tensor output, Tensor mask)",
        "fastact::masked_scale(Tensor grad, Tensor mask, float inside, float outside, *, SymInt[]? mask_strides=None, "
        "SymInt[]? strides=None) -> Tensor",
    ],
)
def test_schema(schema):
    expected = torch._C.parse_schema(schema)
    packet = getattr(ops, expected.name.removeprefix("fastact::"))
    assert getattr(packet, expected.overload_name or "default")._schema == expected


class Log(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_mode_sees_the_packed_ops(device):
    x = torch.randn(9, device=device, requires_grad=True)
    with Log() as log:
        y = activations_cuda.hardtanh(x)
        y.backward(torch.ones_like(y))
    assert "fastact.hardtanh_with_mask.default" in log.names
    assert "fastact.masked_scale.default" in log.names
    with Log() as log, torch.no_grad():
        activations_cuda.hardtanh(x)
    assert log.names == ["fastact.hardtanh.default"]
    with Log() as log:
        activations_cuda.hardtanh(x * 1, inplace=True).sum().backward()
    assert "fastact.hardtanh_with_mask.default" in log.names
    assert "fastact.masked_scale.default" in log.names
    with Log() as log, torch.no_grad():
        activations_cuda.hardtanh(x.detach(), inplace=True)
    assert "fastact.hardtanh_.default" in log.names
    with FlopCounterMode(display=False):
        assert_same_values(activations_cuda.hardtanh(x), y)


def test_autocast_leaves_the_dtype(device):
    x = torch.randn(9, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert activations_cuda.hardtanh(x).dtype == torch.float32
        assert activations_cuda.hardtanh(x.bfloat16()).dtype == torch.bfloat16


def test_torch_function_subclass_and_mode_see_the_op(device):
    seen = []

    class Subclass(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return super().__torch_function__(function, types, args, kwargs)

    y = activations_cuda.hardtanh(torch.randn(9, device=device).as_subclass(Subclass))
    assert type(y) is Subclass
    assert any("hardtanh" in name for name in seen)


def test_meta_tensors():
    x = torch.empty(6, 5, device="meta", requires_grad=True)
    y = activations_cuda.hardsigmoid(x)
    assert y.is_meta
    assert y.requires_grad
    output, mask = ops.hardtanh_with_mask(x, -1.0, 1.0)
    assert output.shape == x.shape
    assert mask.shape == (4,)
