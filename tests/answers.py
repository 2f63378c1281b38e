"""What the tests of gradients that hooks compute have in common. The net is a module without inputs, but for `leaves()`."""

import contextlib
import itertools
import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from activations_cuda import recompute
from activations_cuda.recipes.verification import is_identical


def kernels(function):
    """What a function returns, and the names of the kernels that it runs."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        result = function()
        torch.cuda.synchronize()
    return result, {event.name for event in profiler.events()}


def gradients(net, scope=None):
    with scope or contextlib.nullcontext():
        loss = net().sum()
    return torch.autograd.grad(loss, net.leaves())


def check_several_passes(net):
    expected = gradients(net)
    for _ in range(2):
        with recompute():
            loss = net().sum()
        for retain in (True, True, False):
            found = torch.autograd.grad(loss, net.leaves(), retain_graph=retain)
            assert all(map(is_identical, found, expected))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(loss, net.leaves())


def check_second_derivatives(net):
    def second(scope):
        with scope:
            found = torch.autograd.grad(net().sum(), net.leaves(), create_graph=True)
            return torch.autograd.grad(sum(each.float().square().sum() for each in found), net.leaves())

    expected = second(contextlib.nullcontext())
    for _ in range(2):
        assert all(map(is_identical, second(recompute()), expected))


def check_within_hooks_that_give_back_once(net):
    expected = gradients(net)
    for _ in range(3):
        given, keys = {}, itertools.count()

        def pack(tensor, given=given, keys=keys):
            key = next(keys)
            given[key] = tensor
            return key

        with torch.autograd.graph.saved_tensors_hooks(pack, given.pop), recompute():
            loss = net().sum()
        assert given
        assert all(map(is_identical, torch.autograd.grad(loss, net.leaves()), expected))
        assert not given


def check_several_threads(nets):
    expected = [gradients(net) for net in nets]
    right = []

    def run(net, expected):
        for _ in range(20):
            right.append(all(map(is_identical, gradients(net, recompute()), expected)))

    threads = [threading.Thread(target=run, args=each) for each in zip(nets, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(right) == 20 * len(nets) and all(right)


def check_captured(net):
    """The names of the kernels that a captured graph runs, for one whose recipes are verified."""
    expected = gradients(net)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(net, recompute())
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(net, recompute())
    _, names = kernels(graph.replay)
    assert all(map(is_identical, found, expected))
    return names


def check_same(read):
    """What `read(scope)` returns is the same in the scope, and without."""
    expected = read(contextlib.nullcontext())
    for _ in range(2):
        found = read(recompute())
        assert len(found) == len(expected)
        assert all(one.dtype == other.dtype for one, other in zip(found, expected, strict=True))
        assert all(one.stride() == other.stride() for one, other in zip(found, expected, strict=True))
        assert all(map(is_identical, found, expected))


class Reads(TorchDispatchMode):
    """All that the ops are given, whatever is there: some is new memory, which they write to."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for each in args:
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                each.isnan().any()
        return func(*args, **(kwargs or {}))


HOW_TO_SEE = ["hook", "retain", "asked for", "prehook of the node", "hook of the node"]


def what_is_seen(how, tensors, which, loss, net):
    """What is seen of the gradient of one of these tensors, or by a node without one; and the leaves' gradients."""
    seen, tensor = [], tensors[which]
    tensors.clear()
    node = tensor.grad_fn if torch.is_tensor(tensor) else tensor
    match how:
        case "hook":
            tensor.register_hook(lambda grad: seen.append(grad) or grad * 2)
        case "retain":
            tensor.retain_grad()
        case "asked for":
            tensor = None
            edge = torch.autograd.graph.GradientEdge(node, 0, None)
            return torch.autograd.grad(loss, [edge, *net.leaves()])
        case "prehook of the node":
            node.register_prehook(lambda grads: seen.append(grads[0]) or (grads[0] * 2, *grads[1:]))
        case "hook of the node":
            node.register_hook(lambda results, grads: seen.extend([results[0], grads[0]]))
    node = None
    if how.endswith("node"):
        tensor = None  # or its being there would be noticed
    loss.backward()
    seen += [leaf.grad for leaf in net.leaves()] + ([tensor.grad] if how == "retain" else [])
    net.zero_grad()
    return seen
