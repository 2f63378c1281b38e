"""What a process does when it first uses a smooth activation: its tables are made then, for as long as the process lives."""

import os
import sys
import textwrap

import pytest
import torch

import activations_cuda
import trees
from family import SMOOTH

# Two stand for all, whose code this is: gelu, which PyTorch computes by oneDNN, and silu, whose gradient has two factors.
ROWS = [row for row in SMOOTH if str(row) in ("gelu_none", "silu")]
pytestmark = pytest.mark.parametrize("row", ROWS, ids=str)


def run(program):
    result = trees.run(sys.executable, "-c", textwrap.dedent(program), cwd=os.path.dirname(__file__))
    assert result.returncode == 0, result.stderr
    return result


def test_first_use_in_inference_mode(row, device):
    """Of the tables that it makes, a backward pass through a recipe reads one later."""
    run(f"""
        import time, torch
        from activations_cuda import recompute
        from family import SMOOTH, assert_same_values
        row = SMOOTH[{SMOOTH.index(row)}]
        x = torch.randn(8, 64, 64, device="{device}", dtype=torch.bfloat16)
        with torch.inference_mode():
            row.with_code(x)
        def step(f):
            leaf = x.clone().requires_grad_()
            with recompute():
                y = f(torch.nn.functional.layer_norm(leaf, (64,)))
            return torch.autograd.grad(y.sum(), leaf)[0]
        for _ in range(2):
            assert_same_values(step(row), step(row.reference))
        time.sleep(0.2)  # autograd's thread may need the interpreter to free the graph
    """)


def test_first_use_by_many_threads_and_after_a_fork(row):
    """The tables are made once, by whichever comes first; a forked process makes its own, or has its parent's."""
    run(f"""
        import os, threading, torch
        from family import SMOOTH, assert_same_values
        row = SMOOTH[{SMOOTH.index(row)}]
        x = torch.randn(9999).bfloat16()
        def step(f):
            leaf = x.clone().requires_grad_()
            return torch.autograd.grad(f(leaf).sum(), leaf)[0]
        def compare():
            assert_same_values(step(row), step(row.reference))
        for _ in range(2):
            if os.fork() == 0:
                torch.set_num_threads(1)
                row(x.clone().requires_grad_())
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
            results = []
            threads = [threading.Thread(target=lambda: results.append(step(row))) for _ in range(8)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            assert len(results) == 8
            for result in results: assert_same_values(result, step(row.reference))
    """)


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer's own allocator may be locked in a fork")
def test_a_fork_while_another_thread_makes_the_tables(row):
    """The child has the lock's state and not the thread that holds it. The same is true of PyTorch's own locks, which the
    thread doesn't hold here: a generator's, oneDNN's, a tensor's, and those of what an op sets up when it first runs."""
    if row.name == "gelu":
        pytest.skip("PyTorch computes it by oneDNN, which locks its cache")
    run(f"""
        import os, threading, time, torch
        from family import HALF_TYPES, SMOOTH
        row = SMOOTH[{SMOOTH.index(row)}]
        torch.set_num_threads(1)
        def use(activation, dtype):
            activation(torch.ones(64, dtype=dtype, requires_grad=True))
        first, second = HALF_TYPES
        use(row, first)
        for other in SMOOTH:  # so that every op that makes tables has run, whichever a dtype needs
            if other.name not in ("gelu", row.name):
                use(other, first), use(other, second)
        thread = threading.Thread(target=use, args=(row, second))
        thread.start()
        children = []
        while thread.is_alive() and len(children) < 4:
            time.sleep(0.02)
            child = os.fork()
            if child == 0:
                use(row, second)
                os._exit(0)
            children.append(child)
        thread.join()
        assert children
        end, statuses = time.monotonic() + 60, []
        for child in children:
            while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < end:
                time.sleep(0.1)
            os.kill(child, 9)  # if it still runs
            statuses.append(os.waitpid(child, 0)[1])
        assert not any(statuses), statuses
    """)


@pytest.mark.cuda
def test_a_capture_before_the_first_use(row):
    """PyTorch's op is captured, and once the tables are there, ours, on any stream."""
    run(f"""
        import torch
        from family import SMOOTH, assert_same_values
        row = SMOOTH[{SMOOTH.index(row)}]
        x = torch.randn(9999, device="cuda").bfloat16().requires_grad_()
        grad = torch.randn(9999, device="cuda").bfloat16()
        def step(f):
            y = f(x)
            return y.grad_fn.name(), torch.autograd.grad(y, x, grad)[0]
        for expected in ("CodeBackward" if _ else row.reference(x).grad_fn.name() for _ in range(2)):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                step(row.reference)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                name, result = step(row)
            assert name == expected, name
            with torch.no_grad():
                x.normal_()
            graph.replay()
            assert_same_values(result, step(row.reference)[1])
            with torch.cuda.stream(torch.cuda.Stream()):
                step(row)
            for _ in range(4):
                with torch.cuda.stream(torch.cuda.Stream()):
                    assert_same_values(step(row)[1], step(row.reference)[1])
            torch.cuda.synchronize()
        import os; os._exit(0)  # PyTorch's own threads sometimes abort at exit, behind its own op as well
    """)


def test_onednn_is_disabled_and_enabled(row):
    """The tables wait until it is enabled, and serve afterwards whether it is or not."""
    run(f"""
        import torch
        from family import HALF_TYPES, SMOOTH, every_pattern
        from test_smooth import assert_same_step
        row = SMOOTH[{SMOOTH.index(row)}]
        for dtype in HALF_TYPES:
            x = every_pattern(dtype)
            grads = [torch.full_like(x, grad) for grad in (1.0, -0.3, float("inf"))]
            for is_enabled, is_packed in ((False, False), (True, True), (False, True)):
                with torch.backends.mkldnn.flags(enabled=is_enabled):
                    for grad in grads:
                        assert_same_step(row, row.reference, x, grad)
                    assert (row(x.requires_grad_()).grad_fn.name() == "CodeBackward") == is_packed
    """)


OTHERWISE = {"no product": "torch.sin(grad * 3) * (x > 0)", "too many derivatives": "torch.sin(grad * 3) * x"}


@pytest.mark.cuda
@pytest.mark.parametrize("formula", OTHERWISE.values(), ids=OTHERWISE)
def test_a_pytorch_that_computes_otherwise(row, formula):
    """It is used itself, with one warning that names both versions."""
    result = run(f"""
        import torch
        from family import SMOOTH, assert_same_values
        row = SMOOTH[{SMOOTH.index(row)}]
        library = torch.library.Library("aten", "IMPL")
        def backward(grad, x, **_):
            return {formula}
        library.impl("{row.name}_backward", backward, "CUDA")
        x = torch.randn(9999, device="cuda").bfloat16().requires_grad_()
        for _ in range(2):
            y = row(x)
            assert y.grad_fn.name() != "CodeBackward"
            assert_same_values(torch.autograd.grad(y, x, x.detach())[0], backward(x.detach(), x.detach()))
        from activations_cuda import inductor
        w = torch.randn(64, 64, device="cuda").bfloat16().requires_grad_()
        compiled = torch.compile(lambda w: row(w @ w) @ w, fullgraph=True, options=inductor.options())
        compiled(w).sum().backward()  # what is packed would raise
    """)
    expected = f"activations_cuda {activations_cuda.__version__}: the gradient of torch {torch.__version__.split('+')[0]}"
    assert result.stderr.count(expected) == 1, result.stderr
