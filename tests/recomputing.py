"""What the tests of recompute have in common: a step with and without it, and the bytes that each keeps."""

import contextlib
import copy
import weakref
from functools import partial

import torch
from torch import nn

from activations_cuda import recompute
from activations_cuda.recipes.verification import is_identical


class Keep(torch.autograd.Function):
    """Saves its input, as a convolution does."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * x


def bytes_of(tensors):
    """The bytes of their memory, which several may share."""
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


class _Held:
    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor):
        self.tensor = tensor if tensor.is_leaf else tensor.detach()


class Plain(contextlib.AbstractContextManager):
    """Counts what PyTorch itself keeps."""

    def __init__(self):
        self.held = []

    def pack(self, tensor):
        held = _Held(tensor)
        self.held.append(weakref.ref(held))
        return held

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda held: held.tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    def tensors(self):
        return [held.tensor for reference in self.held if (held := reference()) is not None]

    def bytes(self, model=None):
        """In all tensors that are kept now, but for the model's own."""
        own = set() if model is None else {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
        kept = (tensor for tensor in self.tensors() if tensor.layout is torch.strided)
        return bytes_of(tensor for tensor in kept if tensor.untyped_storage()._cdata not in own)


class Scope(Plain):
    """The scope, counted. Its values live no longer for it."""

    def __init__(self, model=None, check=True):
        super().__init__()
        self.scope, self.count = recompute(model, check=check), {True: 0, False: 0}

    def __enter__(self):
        self.scope.__enter__()
        autograd = torch._C._autograd
        pack, unpack = autograd._top_saved_tensors_default_hooks(True)

        def recorded(tensor):
            value = pack(tensor)
            self.held.append(weakref.ref(value))
            self.count[value.is_recipe] += 1
            return value

        autograd._pop_saved_tensors_default_hooks()
        autograd._push_saved_tensors_default_hooks(recorded, unpack)
        return self

    def __exit__(self, *error):
        self.scope.__exit__(*error)

    def values(self):
        return [value for reference in self.held if (value := reference()) is not None]

    def tensors(self):
        values = self.values()
        return [root.held for value in values for root in value.roots if isinstance(root.held, torch.Tensor)]


def assert_same(a, b):
    """To the bit, strides included; NaN is NaN."""
    assert (a is None) == (b is None)
    assert a is None or (a.stride() == b.stride() and is_identical(a, b))


def step(model, loss_of, scope, seed=0):
    torch.manual_seed(seed)
    with scope:
        loss = loss_of(model)
    kept = scope.bytes(model)
    loss.backward()
    return loss.detach(), kept


def compare(model, loss_of, steps=2):
    """Train two copies, without and with the scope; returns the bytes that each kept, and the counts of the latter's values."""
    if any(parameter.is_cuda for parameter in model.parameters()):
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return _compare(model, loss_of, steps)
    finally:
        torch.use_deterministic_algorithms(False)


def _compare(model, loss_of, steps):
    plain, scoped = copy.deepcopy(model), copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), 1e-2) for each in (plain, scoped)]
    for seed in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected, before = step(plain, loss_of, Plain(), seed)
        scope = Scope(scoped, check=seed > 0)
        loss, after = step(scoped, loss_of, scope, seed)
        assert_same(loss, expected)
        for one, other in zip(plain.parameters(), scoped.parameters(), strict=True):
            assert_same(one.grad, other.grad)
        for one, other in zip(plain.buffers(), scoped.buffers(), strict=True):
            assert_same(one, other)
        assert after <= before, (before, after)
        for optimizer in optimizers:
            optimizer.step()
    return before, after, scope.count


def same_with_scope(run):
    """run(scope) returns tensors: the same ones without a scope and with one."""
    for one, other in zip(run(contextlib.nullcontext), run(recompute), strict=True):
        assert_same(one, other)


def small_net():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(True)
    return nn.Sequential(*layers, nn.Conv2d(8, 4, 1)), torch.randn(2, 3, 8, 8)


def gradients(net, loss):
    net.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in net.parameters()]


def top_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def copying_hooks(memory_format=torch.preserve_format):
    """As those that offload."""
    return torch.autograd.graph.saved_tensors_hooks(partial(torch.clone, memory_format=memory_format), lambda tensor: tensor)


def forgetful_hooks():
    """As of an offloader that forgets what it has given back."""
    store = {}

    def pack(tensor):
        key = object()
        store[key] = tensor.detach().clone()
        return key

    return torch.autograd.graph.saved_tensors_hooks(pack, store.pop)


class Modifies(torch.autograd.Function):
    """Its backward modifies what it alone has saved, which somebody holds from then on."""

    @staticmethod
    def forward(ctx, x, modify, held):
        ctx.save_for_backward(x)
        ctx.modify, ctx.held = modify, held
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        (saved,) = ctx.saved_tensors
        ctx.held.append(saved)
        gradient = grad * saved
        ctx.modify(saved)
        return gradient, None, None


class WritesToSaved(torch.autograd.Function):
    """As a kernel that needs no other memory for its gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x.numpy(force=True)[:] *= 2  # unnoticed by autograd
        return x * grad
