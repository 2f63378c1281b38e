"""What the tests of norms' gradients have in common. A norm is a module without inputs that has `leaves()`, which it reads."""

import contextlib
import itertools
import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from activations_cuda import recompute
from activations_cuda.recipes.verification import is_identical


def kernels(function):
    """What a function returns, and the names of the kernels that it runs."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        result = function()
        torch.cuda.synchronize()
    return result, {event.name for event in profiler.events()}


def gradients(norm, scope=None):
    with scope or contextlib.nullcontext():
        loss = norm().sum()
    return torch.autograd.grad(loss, norm.leaves())


def check_several_passes(norm):
    expected = gradients(norm)
    for _ in range(2):
        with recompute():
            loss = norm().sum()
        for retain in (True, True, False):
            found = torch.autograd.grad(loss, norm.leaves(), retain_graph=retain)
            assert all(map(is_identical, found, expected))
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(loss, norm.leaves())


def check_second_derivatives(norm):
    def second(scope):
        with scope:
            found = torch.autograd.grad(norm().sum(), norm.leaves(), create_graph=True)
            return torch.autograd.grad(sum(each.float().square().sum() for each in found), norm.leaves())

    expected = second(contextlib.nullcontext())
    for _ in range(2):
        assert all(map(is_identical, second(recompute()), expected))


def check_within_hooks_that_give_back_once(norm):
    expected = gradients(norm)
    for _ in range(3):
        given, keys = {}, itertools.count()

        def pack(tensor, given=given, keys=keys):
            key = next(keys)
            given[key] = tensor
            return key

        with torch.autograd.graph.saved_tensors_hooks(pack, given.pop), recompute():
            loss = norm().sum()
        assert given
        assert all(map(is_identical, torch.autograd.grad(loss, norm.leaves()), expected))
        assert not given


def check_several_threads(norms):
    expected = [gradients(norm) for norm in norms]
    right = []

    def run(norm, expected):
        for _ in range(20):
            right.append(all(map(is_identical, gradients(norm, recompute()), expected)))

    threads = [threading.Thread(target=run, args=each) for each in zip(norms, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(right) == 20 * len(norms) and all(right)


def check_captured(norm):
    """The names of the kernels that a captured graph runs, for a norm whose recipes are verified."""
    expected = gradients(norm)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        gradients(norm, recompute())
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(norm, recompute())
    _, names = kernels(graph.replay)
    assert all(map(is_identical, found, expected))
    return names
