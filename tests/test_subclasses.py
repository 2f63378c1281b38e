"""The ops among PyTorch's modes, tensor subclasses, and the dtypes and devices that the kernels don't take."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

import activations_cuda
from family import A_FEW, FAMILY, assert_same_values, forms, sample

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
HAS_REFERENCE = [row for row in FAMILY if row.overload == "default"]


def assert_equal(actual, expected):
    """Equal numbers. PyTorch's softshrink, which has the last word here, makes -0 or +0 of the same value."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def models(device):
    """A small net, unmodified and converted."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3), nn.ReLU6(inplace=True), nn.Conv2d(4, 4, 3), nn.Hardtanh(-0.3, 0.7))
    model = nn.Sequential(*layers).to(device)
    return model, activations_cuda.convert(copy.deepcopy(model))


def step(model, x):
    """The output and all gradients of a training step."""
    model.zero_grad()
    y = model(x)
    y.backward(torch.ones_like(y))
    return y.detach(), *(parameter.grad for parameter in model.parameters())


def assert_same_step(models, x):
    for expected, actual in zip(*(step(model, x) for model in models), strict=True):
        assert torch.equal(actual, expected)


def test_flops_are_pytorchs(device):
    x = torch.randn(2, 3, 8, 8, device=device)

    def flops(model):
        with FlopCounterMode(display=False) as counter:
            step(model, x)
        return counter.get_flop_counts()

    pytorchs, ours = map(flops, models(device))
    assert ours == pytorchs
    assert ours["Global"]


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("row", A_FEW, ids=str)
def test_a_profile_names_the_op(row, inplace, device):
    function = getattr(activations_cuda, row.name)
    x = torch.randn(9, device=device, requires_grad=True)
    with torch.profiler.profile() as profile:
        function(x * 1, *row.parameters, inplace=inplace).sum().backward()
    names = {event.name for event in profile.events()}
    assert {f"fastact::{row.name}{'_' if inplace else ''}", "MaskedScaleBackward", "fastact::masked_scale"} <= names


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_jagged_tensors(row, inplace, device):
    """Those included that PyTorch has no backward or no in-place op for."""
    values, lengths = sample(row, 600, torch.float32, device).view(150, 4), (100, 0, 50)
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    leaf = torch.nested.nested_tensor_from_jagged(values, offsets).detach().requires_grad_()
    nested = leaf.detach()
    try:
        row.reference(nested)
    except NotImplementedError as error:
        pytest.skip(f"this torch has no {error} of jagged tensors")
    y = forms(row)[inplace](leaf)
    assert y.is_nested
    assert_equal(y.detach().values(), row(values))
    gradient = torch.randn(values.shape, generator=torch.Generator().manual_seed(1)).to(device)
    (actual,) = torch.autograd.grad(y, leaf, torch.nested.nested_tensor_from_jagged(gradient, y.offsets()))
    assert_same_values(actual.values(), row.scaled(gradient, values))
    with torch.inference_mode():
        y = row(nested)
    assert_equal(y.values(), row(values))


class Wrapper(torch.Tensor):
    """A tensor around another that logs the ops it meets."""

    @staticmethod
    def __new__(cls, inner, log):
        return cls._make_wrapper_subclass(cls, inner.shape, inner.stride(), dtype=inner.dtype, device=inner.device)

    def __init__(self, inner, log):
        self.inner, self.log = inner, log

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        log = next(arg.log for arg in args if isinstance(arg, cls))
        log.append(str(function))
        args, kwargs = tree_map_only(cls, lambda wrapper: wrapper.inner, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, lambda inner: cls(inner, log), function(*args, **kwargs))


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_a_wrapper_sees_aten_ops(row, inplace, device):
    x = sample(row, 1003, torch.float32, device)
    log = []
    leaf = Wrapper(x, log).requires_grad_()
    y = forms(row)[inplace](leaf)
    gradient = torch.randn(1003, generator=torch.Generator().manual_seed(1)).to(device)
    (actual,) = torch.autograd.grad(y, leaf, Wrapper(gradient, log))
    assert isinstance(y, Wrapper)
    assert isinstance(actual, Wrapper)
    assert_equal(y.inner, row(x))
    assert_same_values(actual.inner, row.scaled(gradient, x))
    assert log
    assert all(name.startswith("aten.") for name in log)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_a_torch_function_subclass_has_the_gradient(row, inplace, device):
    x = sample(row, 1003, torch.float32, device)
    gradient = torch.randn(1003, generator=torch.Generator().manual_seed(1)).to(device)
    leaf = x.as_subclass(Subclass).requires_grad_()
    y = forms(row)[inplace](leaf)
    y.backward(gradient)
    assert type(y) is Subclass
    assert_same_values(y.detach().as_subclass(torch.Tensor), row(x))
    assert_same_values(leaf.grad.as_subclass(torch.Tensor), row.scaled(gradient, x))


def test_swapped_tensors(device):
    x = torch.randn(2, 3, 8, 8, device=device)
    both = models(device)
    assert_same_step(both, x)
    torch.manual_seed(1)
    for pairs in zip(*(model.parameters() for model in both), strict=True):
        new = torch.randn_like(pairs[0])
        for parameter in pairs:
            torch.utils.swap_tensors(parameter, nn.Parameter(new.clone()))
    assert_same_step(both, x)
    inputs = [torch.empty(1), torch.empty(1)]
    for tensor in inputs:
        torch.utils.swap_tensors(tensor, x.clone())
    (expected, *_), (actual, *_) = (step(model, tensor) for model, tensor in zip(both, inputs, strict=True))
    assert torch.equal(actual, expected)


def test_conversion_by_swapping(device):
    both = models(device)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for model in both:
            model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert_same_step(both, torch.randn(2, 3, 8, 8, device=device, dtype=torch.float64))


@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_default_device(row, device):
    """Where a tensor is counts, not where new ones are made."""
    x = sample(row, 1003, torch.float32, device)
    gradient = torch.randn(1003, generator=torch.Generator().manual_seed(1)).to(device)
    leaf = x.detach().requires_grad_()
    with torch.device("meta"):
        y = row(leaf)
        (actual,) = torch.autograd.grad(y, leaf, gradient)
    assert_same_values(y.detach(), row(x))
    assert_same_values(actual, row.scaled(gradient, x))


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_meta_tensors_have_pytorchs_layout(row, inplace):
    for x in (torch.empty(6, 5), torch.empty(6, 5).t(), torch.empty(6, 5)[:, ::2], torch.empty(5).expand(6, 5)):
        ours, theirs = (x.to("meta").requires_grad_() for _ in range(2))
        y, expected = forms(row)[inplace](ours), row.reference(theirs * 1 if inplace else theirs)
        assert y.is_meta
        assert y.dtype == expected.dtype
        assert y.shape == expected.shape
        assert y.stride() == expected.stride()
        # The family's own derivative, as on every device, in one node.
        assert y.grad_fn.name() == ("torch::autograd::CopyBackwards" if inplace else "MaskedScaleBackward")
        y.backward(torch.empty_like(y))
        assert ours.grad.is_meta
        assert ours.grad.shape == x.shape


def outcome(function, x):
    """The result, or the error's type and text."""
    try:
        return function(x)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOAT8], ids=str)
@pytest.mark.parametrize("row", HAS_REFERENCE, ids=str)
def test_other_dtypes_get_what_pytorch_does(row, dtype, device):
    signed = dtype.is_floating_point or dtype.is_signed
    x = torch.tensor([-7, -1, 0, 1, 3, 7] if signed else [0, 1, 3, 7], dtype=torch.float32).to(dtype).to(device)
    actual, expected = outcome(row, x), outcome(row.reference, x)
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    else:
        assert actual == expected


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("row", HAS_REFERENCE, ids=str)
def test_other_dtypes_in_place(row, dtype, device):
    x = torch.arange(6, device=device).to(dtype)
    expected = outcome(row.reference, x)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(row.inplace(x, *row.parameters), expected)
    else:
        assert outcome(lambda t: row.inplace(t, *row.parameters), x) == expected
