"""What pooling and ReLU save for their input's shape and signs: the tensor itself is let go where nobody else has it."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import activations_cuda
from activations_cuda import recompute
from activations_cuda.recipes.verification import forget_choices
from answers import (
    Reads,
    check_captured,
    check_same,
    check_second_derivatives,
    check_several_passes,
    check_several_threads,
    check_within_hooks_that_give_back_once,
)
from recomputing import Keep, Scope, compare

pytestmark = pytest.mark.usefixtures("no_hidden_errors")

POOLS = {
    "max": lambda x: F.max_pool2d(x, 2),
    "overlapping max": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max of 3d": lambda x: F.max_pool3d(x, 2),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, (3, 4)),
    "adaptive max of 3d": lambda x: F.adaptive_max_pool3d(x, (2, 3, 4)),
    "average": lambda x: F.avg_pool2d(x, 2),
    "average of 3d": lambda x: F.avg_pool3d(x, 2),
    "adaptive average": lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
    "adaptive average of 3d": lambda x: F.adaptive_avg_pool3d(x, (2, 3, 4)),
}
ACTIVATIONS = {
    "relu": F.relu,
    "relu in place": functools.partial(F.relu, inplace=True),
    "nothing": lambda x: x,
    "ours": activations_cuda.relu,
}
LAYOUTS = {
    "contiguous": (torch.contiguous_format, torch.contiguous_format),
    "channels_last": (torch.channels_last, torch.channels_last_3d),
}


class Net(nn.Module):
    """A convolution, an activation, a pool, and something that saves what it is given."""

    def __init__(self, device="cpu", pool="max", activation="relu", dtype=torch.float32, layout="contiguous"):
        super().__init__()
        torch.manual_seed(0)
        is_3d = pool.endswith("3d")
        format = LAYOUTS[layout][is_3d]
        self.convolution = (nn.Conv3d if is_3d else nn.Conv2d)(3, 8, 3, device=device, dtype=dtype)
        self.images = torch.randn(4, 3, *(10,) * (3 if is_3d else 2), device=device, dtype=dtype).contiguous(
            memory_format=format
        )
        self.to(memory_format=format)
        self.pool, self.activation = POOLS[pool], ACTIVATIONS[activation]
        self.meanwhile = lambda y: None

    def forward(self):
        y = self.activation(self.convolution(self.images))
        self.meanwhile(y)
        pooled = self.pool(y)
        del y
        return Keep.apply(pooled)

    def leaves(self):
        return [*self.parameters()]


def sources(net):
    """Of what is saved in the scope, and the bytes that are kept."""
    with Scope() as scope:
        output = net()
    kept = scope.bytes(net)
    found = [value.source for value in scope.values()]
    del output
    return found, kept


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("pool", POOLS)
def test_what_pooling_is_given_is_let_go(pool, activation, dtype, layout, device):
    net = Net(device, pool, activation, dtype, layout)
    try:
        _, after, _ = compare(net, lambda net: net().float().square().sum())
    except NotImplementedError as error:
        pytest.skip(str(error))
    input = net.convolution(net.images)
    pooled = net.pool(input).numel()
    left = net.images.nbytes + pooled * (dtype.itemsize + 4) + pooled * 2 * ("max" in pool)  # what is squared, and indices
    bits = 0 if activation == "nothing" else input.numel() / 8
    assert after <= left + bits + 64
    assert ("signs" if "relu" in activation else "shape") in sources(net)[0]


@pytest.mark.parametrize("number", [0.0, -0.0, float("nan"), float("inf"), 1e-45], ids=str)
def test_signs_of_any_number(number, device):
    net = Net(device)
    net.images[:2, 0, ::3] = number
    with torch.no_grad():
        net.convolution.weight[:4] = 0
        net.convolution.weight[:4, 0, 1, 1] = 1
        net.convolution.bias.zero_()
    assert "signs" in sources(net)[0]
    check_same(lambda scope: run(net, scope))


def run(net, scope):
    with scope:
        loss = net().square().sum()
    return torch.autograd.grad(loss, net.leaves())


HOLDERS = {
    "a variable": lambda y: y,
    "a view": lambda y: y[0],
    "an alias": lambda y: y.detach(),
    "its data": lambda y: y.data,
    "a node": Keep.apply,
    "a recipe": lambda y: Keep.apply(y * 2),
    "another pool": lambda y: POOLS["average"](y),
}


@pytest.mark.parametrize("activation", ["relu", "nothing"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_somebody_else_has_stays(holder, activation, device):
    """It may be saved later, as by the other side of a U-Net."""
    if (holder, activation) == ("a recipe", "nothing"):
        pytest.skip("nobody has the tensor when this one is saved")

    class Held(Net):
        def forward(self):
            y = self.activation(self.convolution(self.images))
            held, pooled = HOLDERS[holder](y), self.pool(y)
            del y
            return Keep.apply(pooled).sum() + (held * held).sum()

    net = Held(device, activation=activation)
    check_same(lambda scope: run(net, scope))
    assert {"signs", "shape"}.isdisjoint(sources(net)[0])


def test_what_is_no_larger_than_the_output_stays(device):
    net = Net(device)
    net.pool = lambda x: F.max_pool2d(x, 3, 1, 1)
    check_same(lambda scope: run(net, scope))
    assert {"signs", "shape"}.isdisjoint(sources(net)[0])


def test_what_follows_from_a_kept_tensor_stays_a_recipe(device):
    net = Net(device)
    net.activation = nn.Sequential(nn.BatchNorm2d(8, device=device), nn.ReLU())
    compare(net, lambda net: net().square().sum())
    assert {"signs", "shape"}.isdisjoint(sources(net)[0])


def ops_in_backward(net, pool):
    with recompute():
        loss = net().sum()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.autograd.grad(loss, net.leaves())
    (node,) = (event for event in profiler.events() if event.name.startswith(pool))
    return {child.name for child in node.cpu_children if child.name.startswith("aten::")}


@pytest.mark.parametrize("activation", ["relu", "nothing", "norm"])
@pytest.mark.parametrize("pool", ["max", "average", "adaptive average"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pooling_computes_no_input(layout, pool, activation, device):
    net = Net(device, pool, "nothing", layout=layout)
    net.activation = nn.BatchNorm2d(8, device=device) if activation == "norm" else ACTIVATIONS[activation]
    node, op = {
        "max": ("MaxPool2D", "max_pool2d_with_indices_backward"),
        "average": ("AvgPool2D", "avg_pool2d_backward"),
        "adaptive average": ("AdaptiveAvgPool2D", "_adaptive_avg_pool2d_backward"),
    }[pool]
    for _ in range(2):
        ops = ops_in_backward(net, node)
    assert ops - {"aten::empty", "aten::to", "aten::_to_copy"} == {f"aten::{op}"}  # but for indices


def test_pooling_is_given_memory_in_a_layout_that_it_copies(device):
    class Last(Net):
        def forward(self):
            return self.pool(self.convolution(self.images).transpose(2, 3))

    net = Last(device)
    check_same(lambda scope: run(net, scope))
    assert "aten::as_strided" in ops_in_backward(net, "MaxPool2D")


@pytest.mark.parametrize("activation", ["relu", "nothing"])
@pytest.mark.parametrize("pool", POOLS)
def test_backward_of_any_kind(pool, activation, device):
    net = Net(device, pool, activation)
    check_several_passes(net)
    check_second_derivatives(net)
    check_within_hooks_that_give_back_once(net)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_relu_selects_by_its_signs(layout, device):
    net = Net(device, layout=layout)
    for _ in range(2):
        ops = ops_in_backward(net, "ReluBackward0")
    assert ops <= {"aten::empty"}


def test_a_gradient_in_another_layout(device):
    net = Net(device)
    net.meanwhile = lambda y: y.register_hook(lambda grad: grad.contiguous(memory_format=torch.channels_last))
    assert "signs" in sources(net)[0]
    check_same(lambda scope: run(net, scope))


@pytest.mark.parametrize("reader", ["mode", "prehook of the node", "hook of the node"])
@pytest.mark.parametrize("activation", ["relu", "nothing"])
@pytest.mark.parametrize("pool", ["max", "average"])
def test_who_reads_what_was_let_go(pool, activation, reader, device):
    """There is memory to read."""
    net = Net(device, pool, activation)

    def backward(scope):
        with scope:
            loss = net().sum()
        node, sizes = loss.grad_fn, []
        while "Pool" not in node.name():
            node = node.next_functions[0][0]

        def read(*_):
            sizes.append(torch.tensor(node._saved_self.clone().shape))

        match reader:
            case "prehook of the node":
                node.register_prehook(read)
            case "hook of the node":
                node.register_hook(read)
        with Reads() if reader == "mode" else contextlib.nullcontext():
            return [*torch.autograd.grad(loss, net.leaves()), *sizes]

    check_same(backward)


def test_nothing_follows_from_what_was_let_go(device):
    """Also where the ones that stand for it look like it."""
    net = Net(device)
    with torch.no_grad():
        net.convolution.weight.zero_()
        net.convolution.bias.copy_(torch.tensor([1.0, -1.0] * 4))

    def twice(scope):
        with scope:
            pooled = net.pool(net.activation(net.convolution(net.images)))
            Keep.apply(pooled)  # a branch that is dropped
            loss = Keep.apply(pooled).square().sum()
        return torch.autograd.grad(loss, net.leaves())

    forget_choices()
    check_same(twice)
    net.convolution.reset_parameters()
    check_same(twice)


def test_a_gradient_penalty(device):
    """Whose graph is made in the scope, from what the first pass was given."""
    net = Net(device)

    def penalty(scope):
        with scope:
            images = net.images.detach().requires_grad_()
            loss = Keep.apply(net.pool(net.activation(net.convolution(images)))).square().sum()
            (grad,) = torch.autograd.grad(loss, images, create_graph=True)
            (loss + Keep.apply(grad).square().sum()).backward()
        found = [each.grad for each in net.leaves()]
        net.zero_grad()
        return found

    check_same(penalty)


@pytest.mark.parametrize("activation", ["relu", "nothing"])
@pytest.mark.parametrize("pool", POOLS)
def test_a_gradients_graph_has_memory(pool, activation, device):
    net = Net(device, pool, activation)
    with recompute():
        loss = net().square().sum()
    nodes = [each.grad_fn for each in torch.autograd.grad(loss, net.leaves(), create_graph=True)]
    seen = {*nodes}
    while nodes:
        node = nodes.pop()
        for name in dir(node):
            if name.startswith("_saved_") and isinstance(saved := getattr(node, name), torch.Tensor):
                assert saved.clone().shape == saved.shape
        following = {each for each, _ in node.next_functions if each is not None} - seen
        nodes += following
        seen |= following


@pytest.mark.parametrize("activation", ["relu", "nothing", "norm"])
@pytest.mark.parametrize("pool", POOLS)
def test_vmap_over_a_backward_pass(pool, activation, device):
    net = Net(device, pool, "nothing")
    net.activation = net_norm(net) if activation == "norm" else ACTIVATIONS[activation]

    def gradient(scope):
        with scope:
            loss = net().square().flatten(1).mean(1)
        grad = functools.partial(torch.autograd.grad, loss, net.leaves(), retain_graph=True)
        return torch.vmap(grad)(torch.eye(len(loss), device=device))

    check_same(gradient)


def net_norm(net):
    kind = nn.BatchNorm3d if net.images.dim() == 5 else nn.BatchNorm2d
    return nn.Sequential(kind(8), nn.ReLU()).to(net.images.device)


@pytest.mark.parametrize("activation", ["relu", "nothing", "norm"])
@pytest.mark.parametrize("pool", POOLS)
def test_forward_over_reverse(pool, activation, device):
    net = Net(device, pool, "nothing", torch.float64)
    net.activation = net_norm(net).double() if activation == "norm" else ACTIVATIONS[activation]
    weight = net.convolution.weight.detach().requires_grad_()
    convolution = F.conv3d if pool.endswith("3d") else F.conv2d

    def gradient(scope):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(weight, torch.ones_like(weight))
            with scope:
                loss = net.pool(net.activation(convolution(net.images, dual))).pow(3).sum()
            (grad,) = torch.autograd.grad(loss, weight)
            return [torch.autograd.forward_ad.unpack_dual(grad).tangent.clone(), grad.detach().clone()]

    try:
        gradient(contextlib.nullcontext())
    except NotImplementedError as error:
        pytest.skip(str(error))
    check_same(gradient)


def test_relus_result_that_was_written_to_unnoticed(device):
    net = Net(device)
    net.meanwhile = lambda y: y.data.sub_(0.5)
    assert "signs" in sources(net)[0]
    check_same(lambda scope: run(net, scope))


def test_several_threads(device):
    check_several_threads([Net(device, pool, activation) for pool in ("max", "average") for activation in ("relu", "nothing")])


@pytest.mark.cuda
@pytest.mark.parametrize("activation", ["relu", "nothing"])
@pytest.mark.parametrize("pool", ["max", "average"])
def test_a_captured_graph(pool, activation):
    check_captured(Net("cuda", pool, activation))


def test_a_report_foresees_it(device):
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(True), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3), nn.AvgPool2d(2), nn.Conv2d(8, 4, 1)
    )
    net, images = net.to(device), torch.randn(4, 3, 20, 20, device=device)
    report = activations_cuda.memory_report(net, images, recompute=True)
    for _ in range(2):
        with Scope() as scope:
            output = net(images)
        kept = scope.bytes(net)
        del output
    assert report.recompute == kept
