"""The scope on a GPU: captured graphs, streams, several devices, convolutions."""

import copy
import gc

import pytest
import torch
from torch import nn

from activations_cuda import recompute
from activations_cuda.recipes.verification import forget_choices
from recomputing import Keep, same_with_scope

pytestmark = pytest.mark.usefixtures("no_hidden_errors")


def big_net():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.SiLU(), nn.Conv2d(64, 64, 1), nn.BatchNorm2d(64), nn.ReLU(True)
    return nn.Sequential(*layers, nn.Conv2d(64, 4, 1)).cuda(), torch.randn(16, 3, 32, 32, device="cuda")


@pytest.mark.cuda
def test_cuda_graph_of_a_whole_step(deterministic):
    def run(scope):
        net, x = big_net()
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)

        def step():
            optimizer.zero_grad(set_to_none=False)
            with scope():
                loss = net(x).square().mean()
            loss.backward()
            optimizer.step()

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(3):
            graph.replay()
        return [*net.parameters(), *net.buffers()]

    same_with_scope(run)


@pytest.mark.cuda
def test_make_graphed_callables(deterministic):
    def run(scope):
        net, x = big_net()
        x.requires_grad_()

        class Scoped(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = net

            def forward(self, x):
                with scope():
                    return self.net(x)

        graphed = torch.cuda.make_graphed_callables(Scoped().eval(), (x,))
        for _ in range(2):
            graphed(x).square().mean().backward()
        return [parameter.grad for parameter in net.parameters()]

    same_with_scope(run)


@pytest.mark.cuda
def test_side_streams(deterministic):
    def run(scope):
        net, x = big_net()
        side = torch.cuda.Stream()
        for _ in range(5):
            with scope():
                y = net[:2](x)
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    z = net[2:5](y)
                torch.cuda.current_stream().wait_stream(side)
                loss = net[5:](z).square().mean()
            loss.backward()
            del y, z, loss
            torch.randn(16, 64, 32, 32, device="cuda")  # over what was freed
        torch.cuda.synchronize()
        return [parameter.grad for parameter in net.parameters()]

    same_with_scope(run)


@pytest.mark.cuda
def test_grad_scaler(deterministic):
    def run(scope):
        net, x = big_net()
        optimizer, scaler = torch.optim.SGD(net.parameters(), 1e-2), torch.amp.GradScaler("cuda")
        for _ in range(4):
            with torch.autocast("cuda", torch.float16), scope():
                loss = net(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [*net.parameters(), *net.buffers()]

    same_with_scope(run)


@pytest.mark.cuda
def test_memory_is_constant_on_a_gpu():
    gc.collect()  # what other tests have left
    net, x = big_net()
    used = []
    for i in range(300):
        with recompute():
            loss = net(x).square().mean()
        if i % 2:
            loss.backward()
        net.zero_grad()
        del loss
        used.append(torch.cuda.memory_allocated())
    assert used[-1] == used[20]


@pytest.mark.cuda(gpus=2)
def test_two_gpus_in_a_process(deterministic):
    def run(scope):
        net, x = big_net()
        first, second = net[:3], net[3:].to("cuda:1")
        with scope():
            loss = second(first(x).to("cuda:1")).square().mean()
        loss.backward()
        return [parameter.grad for part in (first, second) for parameter in part.parameters()]

    same_with_scope(run)


def nodes_of(tensor):
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            yield node
            nodes += [each for each, _ in node.next_functions if each is not None]


def unpacked(node):
    """What a batch norm has saved of its input."""
    raw = getattr(node, "_raw_saved_input", None)
    return None if raw is None or not hasattr(raw.data, "is_recipe") else raw.data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_depthwise_convolutions(dtype, device):
    """Recomputed only if they are asked for, and no others."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.ReLU6(), nn.Conv2d(16, 16, 3, padding=1, groups=16)
    net = nn.Sequential(*layers, nn.BatchNorm2d(16), nn.ReLU6(), nn.Conv2d(16, 8, 1)).to(device, dtype)
    images = torch.randn(4, 3, 16, 16, device=device, dtype=dtype)

    def step(**options):
        model = copy.deepcopy(net)
        with recompute(check=True, **options):
            hook = torch._C._autograd._top_saved_tensors_default_hooks(True)[0].__self__
            loss = model(images).float().square().mean()
        sources = {value.source for value in map(unpacked, nodes_of(loss)) if value is not None and value.is_recipe}
        loss.backward()
        assert hook.mismatch is None
        return [parameter.grad for parameter in model.parameters()], sources

    plain, sources = step()
    assert "ConvolutionBackward0" not in sources
    found, sources = step(convolutions=True)
    assert "ConvolutionBackward0" in sources
    assert all(map(torch.equal, plain, found))


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("bias", [None, 0.0, 1.0])
def test_depthwise_convolutions_with_a_frozen_bias(bias, device):
    """Which autograd's graph doesn't have; 0 at first it would look like none."""
    forget_choices()

    def run(scope):
        torch.manual_seed(0)
        result = []
        for number in (0.0, bias):
            norm, conv = nn.BatchNorm2d(8).to(device), nn.Conv2d(8, 8, 3, groups=8, bias=number is not None).to(device)
            if number is not None:
                nn.init.constant_(conv.bias, number).requires_grad_(False)
            with recompute(convolutions=True) if scope is recompute else scope():
                y = conv(norm(Keep.apply(torch.randn(2, 8, 9, 9, device=device, requires_grad=True))))
                loss = Keep.apply(y.sin()).sum()
            result += torch.autograd.grad(loss, [y, norm.weight])
        return result

    same_with_scope(run)
