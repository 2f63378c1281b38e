"""The gradients of softmax and its logarithm, which lie over the incoming ones in the scope: PyTorch's bits."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from activations_cuda import recompute
from activations_cuda.recipes.verification import is_identical
from answers import (
    HOW_TO_SEE,
    Reads,
    check_captured,
    check_same,
    check_second_derivatives,
    check_several_passes,
    check_several_threads,
    check_within_hooks_that_give_back_once,
    gradients,
    what_is_seen,
)

pytestmark = pytest.mark.usefixtures("no_hidden_errors")

# Rows that PyTorch's GPU kernels give a warp, and a block with and without its shared memory, with and without a remainder;
# and planes, of which each place has a row.
SHAPES = (40, 7), (40, 1000), (40, 1024), (5, 3, 1025), (8, 4096), (8, 50257), (3, 21, 8, 9), (2, 2000, 5), (130,), (1, 1)


class CrossEntropy(nn.Module):
    """The loss of what looks like a linear layer's output."""

    def __init__(self, shape=(40, 1000), dtype=torch.float32, device="cpu", **options):
        super().__init__()
        torch.manual_seed(0)
        self.x = nn.Parameter((torch.randn(shape, device=device) * 3).to(dtype))
        samples, classes, *places = shape if len(shape) > 1 else (None, *shape)
        self.target = torch.randint(classes, [samples, *places] if samples else [], device=device)
        self.options = options

    def logits(self):
        return self.x * 1  # no leaf

    def product(self):
        """Logits whose gradient ends in a product of matrices."""
        return self.x @ torch.eye(self.x.shape[-1], dtype=self.x.dtype, device=self.x.device)

    def forward(self):
        return F.cross_entropy(self.logits(), self.target, **self.options)

    def leaves(self):
        return [self.x]


def with_nodes(function):
    """What a function returns, and the nodes of softmax that call an op while they run."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = function()
    nodes = [event for event in profiler.events() if event.name in ("SoftmaxBackward0", "LogSoftmaxBackward0")]
    assert nodes
    return result, [node.name for node in nodes if any("softmax" in child.name for child in node.cpu_children)]


def check(net, is_ours=True):
    expected = gradients(net)
    for _ in range(3):
        with recompute():
            loss = net().sum()
        found, nodes = with_nodes(lambda loss=loss: torch.autograd.grad(loss, net.leaves()))
        assert all(map(is_identical, found, expected))
        assert all(one.stride() == other.stride() for one, other in zip(found, expected, strict=True))
        assert bool(nodes) != is_ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_are_the_ops(shape, dtype, device):
    check(CrossEntropy(shape, dtype, device))


OPTIONS = {
    "sum": {"reduction": "sum"},
    "smoothed": {"label_smoothing": 0.1},
    "ignored": {"ignore_index": 3},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options_of_the_loss(options, device):
    check(CrossEntropy(device=device, **OPTIONS[options]))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("op", [F.softmax, F.log_softmax])
def test_any_gradient(op, dim, weighted, device):
    """Also of numbers that aren't finite."""

    class Net(CrossEntropy):
        def forward(self):
            y = op(self.logits(), dim)
            return (y * self.x.detach().flip(0) if weighted else y).cos()  # whose gradient is no one's but the softmax's

    net = Net(device=device)
    check(net)
    with torch.no_grad():
        for place, special in enumerate((float("inf"), -float("inf"), float("nan"), -0.0, 1e-40)):
            net.x[place, place] = special
    check(net)


def test_attention_with_scores_in_float32(device):
    """What is between the softmax and the products are recipes, of which the softmax's output is an operand."""

    class Attention(CrossEntropy):
        def forward(self):
            scores = (self.x @ self.x.T).float()
            torch.manual_seed(1)
            return F.dropout(scores.softmax(-1).to(self.x.dtype), 0.3) @ self.x

    check(Attention((64, 64), torch.bfloat16, device))


def test_a_gradient_that_is_broadcast(device):
    class Net(CrossEntropy):
        def forward(self):
            return F.log_softmax(self.logits(), -1)  # whose sum has an expanded gradient

    check(Net(device=device), is_ours=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", ["log_softmax", "view", "float32", "loss"])
@pytest.mark.parametrize("how", HOW_TO_SEE)
def test_who_sees_the_gradient(how, which, dtype, device):
    net = CrossEntropy(dtype=dtype, device=device)

    def read(scope):
        with scope:
            y = F.log_softmax(net.product(), -1)
            view = y.view(1, -1, 1000)
            wide = view.float()
            z = F.nll_loss(wide[0], net.target)
            loss = z * 2
        tensors = {"log_softmax": y, "view": view, "float32": wide, "loss": z}
        del y, view, wide, z
        return what_is_seen(how, tensors, which, loss, net)

    check_same(read)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_view", [False, True])
def test_a_gradient_that_somebody_has(is_view, dtype, device):
    """It stays as it is."""
    net = CrossEntropy(dtype=dtype, device=device)
    kept = []
    for scope in (torch.enable_grad(), recompute()):
        with scope:
            y = F.log_softmax(net.product(), -1).float()
            y = y.view(40, 1, 1000)[:, 0] if is_view else y
            loss = F.nll_loss(y, net.target)
        loss.grad_fn.register_hook(lambda results, _: kept.append(results[0]))
        torch.autograd.grad(loss, net.leaves())
    assert is_identical(*kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_in_another_layout(dtype, device):
    class Net(CrossEntropy):
        def forward(self):
            return (F.log_softmax(self.product(), -1).float().T.contiguous() * 2).cos()

    check(Net(dtype=dtype, device=device), is_ours=False)


def test_the_softmax_of_a_leaf(device):
    class Net(CrossEntropy):
        def logits(self):
            return self.x

    check(Net(device=device))


def test_a_gradient_of_another_dtype(device):
    """The logarithms may be in float32 where the input isn't; on a GPU, and with the dtype named, that is one op."""

    class Net(CrossEntropy):
        def forward(self):
            return F.nll_loss(F.log_softmax(self.logits(), -1, dtype=torch.float32), self.target)

    check(Net(dtype=torch.float16, device=device), is_ours=device == "cpu")


def ops_in_backward(net):
    """The names of the ops that the loss's node calls."""
    for _ in range(3):
        with recompute():
            loss = net()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            found = torch.autograd.grad(loss, net.leaves())
    assert all(map(is_identical, found, gradients(net)))
    (node,) = (
        event for event in profiler.events() if event.name in ("NllLossBackward0", "NllLoss2DBackward0", "GatherBackward0")
    )
    return {child.name for child in node.cpu_children}


class OfRecipe(CrossEntropy):
    """As under autocast, where the loss is of logarithms in a half type: a cast of these is a recipe."""

    def __init__(self, device, pick):
        super().__init__(dtype=torch.bfloat16, device=device)
        self.pick = pick

    def forward(self):
        return self.pick(F.log_softmax(self.logits(), -1).float(), self.target)


@pytest.mark.cuda
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_under_autocast(shape, half):
    with torch.autocast("cuda", dtype=half):
        check(CrossEntropy(shape, half, "cuda"))


BEFORE = {
    "a leaf": lambda net: net.x,
    "a view of a leaf": lambda net: net.x.view(-1, 1000),
    "a sum": lambda net: net.x + 1,
    "a product of matrices": CrossEntropy.product,
}


@pytest.mark.parametrize("before", BEFORE)
def test_no_gradient_of_twice_its_memory_stays(before, device):
    """Where the cast has the gradient in the memory of that in float32."""

    class Net(OfRecipe):
        def logits(self):
            return BEFORE[before](self)

    net = Net(device, F.nll_loss)
    check(net)
    with recompute():
        loss = net()
    loss.backward()
    assert net.x.grad.untyped_storage().nbytes() == net.x.nbytes


@pytest.mark.parametrize("how", ["hook", "prehook of the node"])
@pytest.mark.parametrize("where", ["logits", "view", "logarithms"])
def test_nobody_sees_a_gradient_of_twice_its_memory(where, how, device):
    net = OfRecipe(device, F.nll_loss)
    seen = []
    with recompute():
        logits = net.product()
        view = logits.view(-1, 1000)
        y = F.log_softmax(view, -1)
        loss = F.nll_loss(y.float(), net.target)
    tensor = {"logits": logits, "view": view, "logarithms": y}[where]
    if how == "hook":
        tensor.register_hook(lambda grad: seen.append(grad))
    else:
        tensor.grad_fn.register_prehook(lambda grads: seen.append(grads[0]))
    loss.backward()
    assert seen[0].untyped_storage().nbytes() == net.x.nbytes


def test_a_gradient_that_is_a_part_of_another(device):
    """Which would keep all of that alive."""
    net = CrossEntropy(device=device)
    others = torch.randn(40, 1000, device=device)
    with recompute():
        loss = (torch.cat([others, F.log_softmax(net.x, -1)]) * 2).cos().sum()
    loss.backward()
    assert net.x.grad.untyped_storage().nbytes() == net.x.nbytes


def test_logarithms_that_a_checkpoint_has(device):
    """They may be read once."""

    class Net(CrossEntropy):
        def forward(self):
            def logarithms(x):
                return F.log_softmax(x * 1, -1)

            return F.nll_loss(checkpoint(logarithms, self.x, use_reentrant=False), self.target)

    check(Net(device=device), is_ours=False)


PICKS = {
    "loss": F.nll_loss,
    "loss of images": lambda y, target: F.nll_loss(y.view(4, -1, 5, 2), target.view(4, 5, 2) % (y.numel() // 40)),
    "gather": lambda y, target: y.gather(-1, target[:, None]).mean(),
}


@pytest.mark.parametrize("pick", PICKS)
def test_what_only_serves_for_its_shape_is_not_computed(pick, device):
    net = OfRecipe(device, PICKS[pick])
    check(net)
    ops = {"loss": "nll_loss_backward", "loss of images": "nll_loss2d_backward", "gather": "gather_backward"}
    assert ops_in_backward(net) == {"aten::empty", f"aten::{ops[pick]}"}
    check_several_passes(net)
    check_second_derivatives(net)
    check_within_hooks_that_give_back_once(net)


@pytest.mark.parametrize("pick", PICKS)
def test_hooks_outside_that_wait_for_what_only_serves_for_its_shape(pick, device):
    class Net(OfRecipe):
        def forward(self):
            return self.pick(self.product().float(), self.target)  # saved in the half type

    check_within_hooks_that_give_back_once(Net(device, PICKS[pick]))


@pytest.mark.parametrize("reader", ["mode", "hook", "prehook of the node", "hook of the node"])
@pytest.mark.parametrize("pick", PICKS)
def test_who_reads_what_only_serves_for_its_shape(pick, reader, device):
    net = OfRecipe(device, PICKS[pick])

    def backward(scope):
        with scope:
            loss = net()
        node, seen = loss.grad_fn, []
        while "Mean" in node.name():
            node = node.next_functions[0][0]

        def read(*_):
            seen.append(node._saved_self.clone())

        match reader:
            case "hook":
                loss.register_hook(read)
            case "prehook of the node":
                node.register_prehook(read)
            case "hook of the node":
                node.register_hook(read)
        with Reads() if reader == "mode" else contextlib.nullcontext():
            found = torch.autograd.grad(loss, net.leaves())
        return [*found, *seen]

    check_same(backward)


def test_a_shape_in_a_layout_that_the_loss_does_not_take(device):
    net = OfRecipe(device, lambda y, target: F.nll_loss(y.view(4, 5, 2, -1).movedim(-1, 1), target.view(4, 5, 2)))
    for scope in (torch.enable_grad(), recompute()):
        with scope:
            loss = net()
        with pytest.raises(RuntimeError, match="grad_input must be contiguous"):
            loss.backward()


@pytest.mark.parametrize("pick", PICKS)
def test_what_only_serves_for_its_shape_was_written_to(pick, device):
    net = OfRecipe(device, PICKS[pick])
    with recompute():
        wide = F.log_softmax(net.logits(), -1).float()
        loss = net.pick(wide, net.target)
        wide.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_several_passes(device):
    check_several_passes(CrossEntropy(device=device))


def test_second_derivatives(device):
    check_second_derivatives(CrossEntropy(device=device))


def test_within_hooks_that_give_back_once(device):
    check_within_hooks_that_give_back_once(CrossEntropy(device=device))


def test_several_threads(device):
    check_several_threads([CrossEntropy((40 + i, 1000), device=device) for i in range(4)])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_graph(dtype):
    net = CrossEntropy(dtype=dtype, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype != torch.float32, cache_enabled=False):
        check_captured(net)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "autocast"])
def test_the_memory_of_a_language_models_loss(kind):
    """The backward pass adds one gradient to what is saved."""
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    weight = torch.randn(64, 32000, dtype=dtype, device="cuda")

    class Net(CrossEntropy):
        def logits(self):
            return self.x @ weight

    net = Net((2048, 64), dtype, "cuda")
    small, large = 2048 * 32000 * dtype.itemsize, 2048 * 32000 * (2 if kind == "bfloat16" else 4)

    def peak(scope):
        with scope, torch.autocast("cuda", dtype=dtype, enabled=kind == "autocast"):
            loss = net()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(loss, net.leaves())
        return torch.cuda.max_memory_allocated() - before

    for _ in range(2):
        found = peak(recompute())
    assert found <= large + small / 8
