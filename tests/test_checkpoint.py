"""What autograd offers around a backward pass: checkpointing, anomaly mode, hooks on what is saved and on gradients."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from family import A_FEW, FAMILY, assert_same_values, forms, sample
from test_dispatch import Log


def leaf_and_gradient(row, device, shape=(17, 59)):
    x = sample(row, shape[0] * shape[1], torch.float32, device).view(shape).requires_grad_()
    return x, torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_saved_tensors_hooks(row, inplace, device):
    """The mask is all that they meet, and what they give back is what backward reads."""
    x, gradient = leaf_and_gradient(row, device)
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor.cpu().numpy()

    function = forms(row)[inplace]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda array: torch.from_numpy(array).to(device)):
        y = function(x)
    (mask,) = packed
    assert mask.dtype == torch.uint8
    assert mask.shape == ((x.numel() + 7) // 8,)
    assert_same_values(torch.autograd.grad(y, x, gradient)[0], row.scaled(gradient, x))


def test_hooks_may_change_the_mask(device):
    x = torch.randn(16, device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(torch.zeros_like, lambda mask: mask):
        y = torch.ops.fastact.relu(x.abs())
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert not gradient.any()


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_save_on_cpu(row, pin_memory, device):
    x, gradient = leaf_and_gradient(row, device)
    with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory and device == "cuda"):
        y = row(x)
    assert_same_values(torch.autograd.grad(y, x, gradient)[0], row.scaled(gradient, x))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_checkpoint(row, inplace, use_reentrant, device):
    x, gradient = leaf_and_gradient(row, device)
    calls = []

    def function(t):
        calls.append(t)
        return forms(row)[inplace](t)

    y = checkpoint(function, x, use_reentrant=use_reentrant)
    y.backward(gradient)
    assert len(calls) == 2
    assert_same_values(y.detach(), row(x.detach()))
    assert_same_values(x.grad, row.scaled(gradient, x))


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_selective_checkpoint(row, inplace, saved, device):
    """By the op that forward dispatches: what is saved isn't computed again."""
    x, gradient = leaf_and_gradient(row, device)
    contexts = functools.partial(create_selective_checkpoint_contexts, [row.with_mask] if saved else [])
    y = checkpoint(lambda t: forms(row)[inplace](t * 2) * 3, x, use_reentrant=False, context_fn=contexts)
    with Log() as log:
        (actual,) = torch.autograd.grad(y, x, gradient)
    assert (str(row.with_mask) in log.names) == (not saved)
    assert "aten.mul.Tensor" in log.names
    assert_same_values(y.detach(), row(x.detach() * 2) * 3)
    assert_same_values(actual, row.scaled(gradient * 3, x.detach() * 2) * 2)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_anomaly_mode(row, device):
    x, gradient = leaf_and_gradient(row, device)
    x = x.detach().nan_to_num(0.1).requires_grad_()
    with torch.autograd.detect_anomaly():
        assert_same_values(torch.autograd.grad(row(x), x, gradient)[0], row.scaled(gradient, x))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_names_the_node(device, recwarn):
    x = torch.randn(9, device=device, requires_grad=True)
    with torch.autograd.detect_anomaly():
        y = torch.ops.fastact.hardtanh(x)
        with pytest.raises(RuntimeError, match="Function 'MaskedScaleBackward' returned nan values in its 0th output"):
            y.backward(torch.full_like(y, float("nan")))
    assert any("test_anomaly_mode_names_the_node" in str(warning.message) for warning in recwarn)  # the forward call


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("row", A_FEW, ids=str)
def test_hooks_on_the_output(row, inplace, device):
    x, gradient = leaf_and_gradient(row, device)
    y = forms(row)[inplace](x)
    seen = {}
    y.register_hook(lambda grad: grad * 2)
    y.grad_fn.register_prehook(lambda grads: seen.update(before=grads[0]))
    y.grad_fn.register_hook(lambda inputs, outputs: seen.update(inputs=inputs[0], outputs=outputs[0]))
    y.retain_grad()
    y.backward(gradient)
    expected = row.scaled(gradient * 2, x)
    assert_same_values(y.grad, gradient * 2)
    assert_same_values(seen["before"], gradient * 2)
    assert_same_values(seen["inputs"], expected)
    assert_same_values(seen["outputs"], gradient * 2)
    assert_same_values(x.grad, expected)


def test_a_hook_may_change_the_gradient(device):
    x = torch.randn(9, device=device, requires_grad=True)
    y = torch.ops.fastact.hardtanh(x * 2)
    y.grad_fn.register_hook(lambda inputs, outputs: (inputs[0] + 1,))
    y.sum().backward()
    inside = (x.detach() * 2).abs() < 1
    assert torch.equal(x.grad, (inside + 1.0) * 2)


LAYOUTS = {
    "transposed": lambda grad: grad.t().contiguous().t(),
    "strided": lambda grad: grad.repeat_interleave(2, dim=1)[:, ::2],
    "offset": lambda grad: torch.cat([grad.new_zeros(1), grad.flatten()])[1:].view(grad.shape),
    "expanded row": lambda grad: grad[:1].expand_as(grad),
    "expanded scalar": lambda grad: grad[0, 0].expand_as(grad),
    "negated": lambda grad: torch.complex(grad, grad).conj().imag,
}


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_gradients_in_every_layout(row, layout, inplace, device):
    x, gradient = leaf_and_gradient(row, device)
    gradient = LAYOUTS[layout](gradient)
    y = forms(row)[inplace](x)
    y.backward(gradient)
    assert_same_values(x.grad, row.scaled(gradient, x).resolve_neg())


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean], ids=["sum", "mean"])
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_a_loss_of_all_elements(row, reduce, device):
    x, _ = leaf_and_gradient(row, device)
    reduce(row(x)).backward()
    y = torch.zeros_like(x, requires_grad=True)
    reduce(y).backward()
    assert_same_values(x.grad, row.scaled(y.grad, x))


def test_an_undefined_gradient_stays_undefined(device):
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    for function in (torch.ops.fastact.hardtanh, lambda x: torch.ops.fastact.hardtanh_(x * 1)):
        x = torch.randn(9, device=device, requires_grad=True)
        Nothing.apply(function(x)).sum().backward()
        assert x.grad is None


@pytest.fixture
def fallbacks_warn():
    """Where vmap has no rule for an op, and calls it for one example after the other."""
    torch._C._debug_only_display_vmap_fallback_warnings(True)
    yield
    torch._C._debug_only_display_vmap_fallback_warnings(False)


@pytest.mark.filterwarnings("error:There is a performance drop")
@pytest.mark.usefixtures("fallbacks_warn")
@pytest.mark.parametrize("row", FAMILY, ids=str)
def test_batched_gradients(row, device):
    x, _ = leaf_and_gradient(row, device)
    gradients = torch.randn(3, *x.shape, device=device)
    (actual,) = torch.autograd.grad(row(x), x, gradients, is_grads_batched=True)
    for one, gradient in zip(actual, gradients, strict=True):
        assert_same_values(one, row.scaled(gradient, x))
