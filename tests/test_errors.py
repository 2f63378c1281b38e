"""What bad input raises: PyTorch's own exception type where it has one, the op's name, what was expected and what came."""

import re

import pytest
import torch
import torch.nn.functional as F

import activations_cuda
from family import FAMILY

ops = torch.ops.fastact


def test_min_above_max(device):
    x = torch.randn(3, device=device)
    with pytest.raises(ValueError, match="hardtanh: expected min_val <= max_val, got 2 and -1"):
        activations_cuda.hardtanh(x, 2.0, -1.0)
    with pytest.raises(ValueError):
        F.hardtanh(x, 2.0, -1.0)
    with pytest.raises(ValueError, match="hardtanh: expected min_val <= max_val"):
        ops.hardtanh_with_mask(x, 2.0, -1.0)


@pytest.mark.parametrize("what, kind", [([1.0], "list"), (None, "NoneType"), ("x", "str"), (1.0, "float")])
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_what_is_no_tensor(row, what, kind):
    parameters = {"alpha": row.parameters[0], "beta": row.parameters[1]} if row.overload == "affine" else row.parameters
    args, kwargs = ((), parameters) if isinstance(parameters, dict) else (parameters, {})
    for inplace in (False, True):
        with pytest.raises(TypeError, match=rf"^{row.name}\w*: expected a tensor, got {kind}$"):
            getattr(activations_cuda, row.name)(what, *args, inplace=inplace, **kwargs)


@pytest.mark.parametrize("row", [row for row in FAMILY if row.parameters and row.overload == "default"], ids=str)
def test_a_tensor_that_is_no_number(row, device):
    function = getattr(activations_cuda, row.name)
    x = torch.randn(3, device=device)
    *others, last = row.parameters
    learnt = torch.tensor(last, requires_grad=True)
    assert torch.equal(function(x, *others, learnt.detach()), row(x))
    for tensor, got in [(learnt, r"\[\] that requires grad"), (torch.tensor([last]), r"\[1\]$")]:
        with pytest.raises(TypeError):
            row.pytorch(x, *others, tensor)
        for inplace in (False, True):
            with pytest.raises(TypeError, match=rf"{row.name}_?: expected a number as parameter, got a tensor of shape {got}"):
                function(x, *others, tensor, inplace=inplace)


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_dtypes_without_order(row, dtype, device):
    x = torch.zeros(3, dtype=dtype, device=device)
    for mode in (torch.enable_grad, torch.inference_mode):
        with (
            mode(),
            pytest.raises(NotImplementedError, match=rf"{row.name}: expected a tensor of real numbers, got \w+"),
        ):
            row(x)
    if row.overload == "default":  # PyTorch has this op
        with pytest.raises(RuntimeError):  # of which NotImplementedError is a kind
            row.reference(x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn], ids=str)
def test_hardsigmoid_of_other_dtypes_raises_what_pytorch_raises(dtype, device):
    x = torch.zeros(3, device=device).to(dtype)
    with pytest.raises(NotImplementedError) as expected:
        F.hardsigmoid(x)
    with pytest.raises(NotImplementedError) as raised:
        activations_cuda.hardsigmoid(x)
    assert str(raised.value) == str(expected.value)
    with pytest.raises(NotImplementedError, match=r"hardsigmoid: expected a floating-point tensor, got \w+"):
        activations_cuda.hardsigmoid(x, alpha=0.2, beta=0.5)
    with pytest.raises(NotImplementedError, match="hardsigmoid_with_mask: expected a float64, float32, float16 or bfloat16"):
        ops.hardsigmoid_with_mask(x)


@pytest.mark.parametrize("lambd", [-1.0, float("inf"), float("nan")])
def test_lambd_that_softshrink_refuses(lambd, device):
    """In PyTorch's own words, or where PyTorch says nothing, in ours."""
    x = torch.randn(3, device=device)
    try:
        F.softshrink(x, lambd)
        expected, message = ValueError, "softshrink: expected a finite lambd >= 0, got"
    except RuntimeError as error:
        expected, message = RuntimeError, re.escape(str(error))
    for tensor in (x, x.clone().requires_grad_()):
        with pytest.raises(expected, match=message):
            activations_cuda.softshrink(tensor, lambd)
    with pytest.raises(expected, match=message):
        activations_cuda.softshrink(x.clone(), lambd, inplace=True)
    with pytest.raises(ValueError, match="softshrink: expected a finite lambd >= 0, got"):
        ops.softshrink_with_mask(x, lambd)


def test_negative_lambd_of_hardshrink_does_what_pytorch_does(device):
    x = torch.randn(99, device=device)
    assert torch.equal(activations_cuda.hardshrink(x, -1.0), F.hardshrink(x, -1.0))


@pytest.mark.parametrize("alpha, beta", [(0.0, 0.5), (float("nan"), 0.5), (0.2, float("nan"))])
def test_affine_parameters(alpha, beta, device):
    with pytest.raises(ValueError, match="hardsigmoid: expected a number other than 0 for alpha and a number for beta, got"):
        activations_cuda.hardsigmoid(torch.randn(3, device=device), alpha=alpha, beta=beta)


@pytest.mark.parametrize("parameters", [{"alpha": 0.2}, {"beta": 0.5}])
def test_half_of_the_affine_parameters(parameters):
    with pytest.raises(ValueError, match="hardsigmoid: expected both alpha and beta or neither, got alpha="):
        activations_cuda.hardsigmoid(torch.randn(3), **parameters)


def test_nan_bounds_have_no_mask(device):
    with pytest.raises(ValueError, match="hardtanh_with_mask: expected numbers within the range of Float, got nan and 1"):
        ops.hardtanh_with_mask(torch.randn(3, device=device), float("nan"), 1.0)


@pytest.mark.parametrize(
    "mask, message",
    [
        (torch.zeros(2, dtype=torch.int8), "expected a mask of dtype uint8, got Char"),
        (torch.zeros(1, dtype=torch.uint8), r"expected a contiguous mask of 2 bytes for 9 elements, got shape \[1\]"),
        (torch.zeros(3, dtype=torch.uint8), r"expected a contiguous mask of 2 bytes for 9 elements, got shape \[3\]"),
        (torch.zeros(1, 2, dtype=torch.uint8), r"expected a contiguous mask of 2 bytes for 9 elements, got shape \[1, 2\]"),
        (torch.zeros(4, dtype=torch.uint8)[::2], r"expected a contiguous mask of 2 bytes.* strides \[2\]"),
        (torch.zeros(1, dtype=torch.uint8).expand(2), r"expected a contiguous mask of 2 bytes.* strides \[0\]"),
    ],
)
def test_masks_are_not_trusted(mask, message, device):
    grad = torch.randn(9, device=device)
    strided = torch.zeros(4, dtype=mask.dtype, device=device).as_strided(mask.shape, mask.stride())
    with pytest.raises(RuntimeError, match="masked_scale: " + message):
        ops.masked_scale(grad, strided, 1.0, 0.0)


def test_mask_on_another_device():
    grad = torch.randn(9)
    with pytest.raises(RuntimeError, match="masked_scale: expected the mask on grad's device, cpu, got meta"):
        ops.masked_scale(grad, torch.zeros(2, dtype=torch.uint8, device="meta"), 1.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64], ids=str)
def test_masked_scale_of_other_dtypes(dtype, device):
    mask = torch.zeros(1, dtype=torch.uint8, device=device)
    with pytest.raises(NotImplementedError, match="masked_scale: expected grad to be float64, float32, float16 or bfloat16"):
        ops.masked_scale(torch.zeros(3, dtype=dtype, device=device), mask, 1.0, 0.0)
