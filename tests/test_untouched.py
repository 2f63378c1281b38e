"""What a survey and a conversion leave as it was: hooks' owners, other threads and models, attributes of any kind."""

import copy
import functools
import gc
import importlib
import io
import itertools
import logging
import os
import pickle
import queue
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FullyShardedDataParallel

import activations_cuda
from activations_cuda import dry_run
from activations_cuda.copies import Copier
from activations_cuda.memory import saved_bytes
from calls import assert_same_step


def net(*layers):
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU6(), *layers)


ROWS = 64, 8


class Mean:
    def __init__(self):
        self.total = torch.zeros(())
        self.lock = threading.Lock()

    def hook(self, layer, args, out):
        with self.lock:
            self.total = self.total + out.detach().mean()


SEEN = []


def collect(module, args, out):
    SEEN.append(out)


def appender(seen):
    return lambda module, args, out: seen.append(out)


def with_default(seen):
    return lambda module, args, out, seen=seen: seen.append(out)


class Recorder:
    outs: ClassVar = []


def record(module, args, out):
    Recorder.outs.append(out)


COUNT = 0


def count(module, args, out):
    global COUNT
    COUNT += 1


def is_real(tensor):
    return not isinstance(tensor, FakeTensor)


def test_owners_of_hooks():
    model, mean, seen = net(), Mean(), []
    SEEN.clear()
    for hook in (mean.hook, appender(seen), functools.partial(appender(seen)), collect, with_default(seen), record, count):
        model[0].register_forward_hook(hook)
    model[2].register_full_backward_hook(lambda *_: seen.append(0))
    activations_cuda.convert(model, torch.randn(ROWS))
    assert is_real(mean.total)
    assert not seen
    assert not SEEN
    assert not Recorder.outs
    assert COUNT == 0
    model(torch.randn(ROWS)).sum().backward()
    assert (len(seen), len(SEEN)) == (4, 1)
    assert mean.total.item() != 0


def test_hooks_of_a_model_that_differentiates():
    class Penalized(nn.Sequential):
        def forward(self, x):
            return torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)[0]

    model = Penalized(*net())
    model[1].register_full_backward_hook(collect)
    model[1].register_full_backward_pre_hook(lambda module, grads: SEEN.append(grads))
    SEEN.clear()
    activations_cuda.convert(model, torch.randn(ROWS, requires_grad=True))
    assert not SEEN


def test_hooks_that_make_the_weights_are_called():
    """And those that have nowhere to leave a tensor."""
    model, x = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(8, 8)), nn.LayerNorm(8), nn.ReLU6()), torch.randn(ROWS)
    model.requires_grad_(False)
    model[1].register_forward_hook(lambda module, args, out: out.requires_grad_(True))
    report = activations_cuda.memory_report(model, x)
    assert (report.before, report.after) == (64 * 8 * 4, 64)


class Slow(nn.Module):
    def forward(self, x):
        return time.sleep(0.001) or x


def test_another_threads_model():
    other, model, x = Slow(), net(), torch.randn(ROWS)
    for _ in range(5):
        other = nn.Sequential(other)
    for module in other.modules():
        module.register_forward_hook(lambda *_: None)
    failures, reports = [], []

    def serve():
        try:
            for _ in range(300):
                other(x)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    for _ in range(20):
        reports.append(activations_cuda.memory_report(model, x))
    thread.join()
    assert not failures
    assert all(report == reports[0] for report in reports)


def test_what_another_thread_appends_stays():
    model, x = net(), torch.randn(ROWS)
    model.replay = []

    def act():
        for i in range(200):
            model.replay.append(i)
            time.sleep(0.001)

    thread = threading.Thread(target=act)
    thread.start()
    for _ in range(5):
        activations_cuda.convert(model, x)
    thread.join()
    assert model.replay == list(range(200))


class Refuses(tuple):
    def __iter__(self):
        raise TypeError("not iterable")


class Color(Enum):
    RED = 1


class Sentinel:
    __slots__ = ("__value", "unset")

    def __init__(self):
        self.__value = []


class Stream(list):
    def __iter__(self):
        yield 1
        raise RuntimeError("closed")


class Only:
    """There is one of it."""

    one = None

    def __new__(cls):
        cls.one = cls.one or super().__new__(cls)
        return cls.one


def test_an_object_of_which_there_is_one():
    class Net(Act):
        def __init__(self):
            super().__init__()
            self.only = Only()
            self.only.seen = seen

    seen = []
    model = activations_cuda.convert(Net(), torch.randn(ROWS))
    assert model.only.seen is seen


def test_large_arrays_are_shared():
    for large in np.zeros(2**25, dtype=np.uint8), bytearray(2**25):
        assert Copier(torch.clone)(large) is large


class Attributes(dict):
    __getattr__ = dict.__getitem__


class Sized(dict):
    def nbytes(self):
        return 2**25


def test_other_objects_are_copied():
    for small in np.zeros(8), bytearray(8), Attributes(a=[]), Sized(a=[]):
        assert Copier(torch.clone)(small) is not small


class Closes:
    def __init__(self, log):
        self.log = log

    def __del__(self):
        self.log.append("closed")


CLOSED = []


class ClosesItself(nn.Sequential):
    def __del__(self):
        CLOSED.append(1)


def test_a_module_with_a_finalizer():
    model = ClosesItself(*net())
    activations_cuda.convert(model, torch.randn(ROWS))
    gc.collect()
    assert not CLOSED
    assert activations_cuda.converted(model) == {"ReLU6": 1}


def odd_attributes(model):
    yield Refuses((1, 2))
    yield weakref.proxy(object.__new__(Mean))  # a dead one
    yield weakref.ref(model)
    yield threading.Lock()
    yield threading.local()
    yield (value for value in range(3))
    yield io.BytesIO(b"1")
    yield Color.RED
    yield Sentinel()
    yield types.SimpleNamespace(model=model)
    yield torch.nn.Parameter(torch.zeros(3)).sum()  # no leaf
    yield torch.Generator()
    yield list(range(1_000_000))
    yield {Color.RED: {model: model}}
    yield frozenset([1])
    yield memoryview(b"1")
    yield sys.stderr
    yield functools.cache(len)
    yield Stream()


def test_attributes_of_any_kind():
    x, log = torch.randn(ROWS), []
    for i in range(19):
        model = net()
        vars(model)["odd"] = value = list(odd_attributes(model))[i]
        model[1].closes = Closes(log)
        before = vars(model).copy()
        start = time.perf_counter()
        activations_cuda.convert(model, x)
        assert time.perf_counter() - start < 5
        assert activations_cuda.converted(model) == {"ReLU6": 1}
        assert vars(model).keys() == before.keys()
        assert model.odd is value
        assert not log
        del model, value, before
        gc.collect()
        log.clear()


class Gcn(nn.Sequential):
    def forward(self, x):
        return torch.sparse.mm(self.adj, super().forward(x))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors(layout):
    model, x = Gcn(*net()), torch.randn(20, 8)
    model.register_buffer("adj", torch.eye(20).to_sparse(layout=layout))
    report = activations_cuda.memory_report(model, x)
    assert report.after < report.before
    after = saved_bytes(activations_cuda.convert(model, x), x)
    assert after - saved_bytes(activations_cuda.revert(model), x) == report.after - report.before

    inputs = torch.eye(20).to_sparse(layout=layout)
    report = activations_cuda.memory_report(nn.Sequential(Multiplies()), inputs)
    assert report.before > 0


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_that_are_written_to(layout):
    class Writes(Gcn):
        def forward(self, x, scale):
            scale.mul_(2)
            self.adj.mul_(0.5)
            return super().forward(x)

    model, scale = Writes(*net()), torch.eye(20).to_sparse(layout=layout)
    model.register_buffer("adj", torch.eye(20).to_sparse(layout=layout))
    activations_cuda.convert(model, torch.randn(20, 8), scale)
    for tensor in scale, model.adj:
        assert torch.equal(tensor.to_dense(), torch.eye(20))


class Multiplies(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 8))

    def forward(self, x):
        return torch.sparse.mm(x, self.weight)


class Wrapper(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("net"), name)

    def forward(self, x):
        return self.net(x.permute(0, 3, 1, 2) / 255)


def test_a_wrapper_that_delegates_to_a_compiled_part():
    inner = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU6())
    wrapper, x = Wrapper(torch.compile(inner, backend="eager")), torch.zeros(2, 16, 16, 3)
    wrapper(x)
    activations_cuda.convert(wrapper, x)
    assert activations_cuda.converted(wrapper) == {"ReLU6": 1}
    wrapper(x)


def test_wrappers_that_hide_the_model(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
        with pytest.raises(TypeError, match="convert: expected a model that isn't wrapped yet, got FullyShardedDataParallel"):
            activations_cuda.convert(model, torch.randn(ROWS))
        assert all(parameter.device.type == "cpu" for parameter in model.parameters())
        model(torch.randn(ROWS)).sum().backward()
    finally:
        dist.destroy_process_group()
    with pytest.raises(TypeError, match=r"convert: expected a torch.nn.Module of Python code, got one of TorchScript"):
        activations_cuda.convert(torch.jit.script(net()))


def hooked(module):
    """As accelerate does it: a forward of the instance's own, which calls the one of its class, as it was."""
    module._old_forward = module.forward

    def new_forward(module, *args):
        return module._old_forward(*args)

    module.forward = functools.partial(new_forward, module)


class Calls(nn.Module):
    def forward(self, x):
        return F.relu6(x)


@pytest.mark.parametrize("make", [nn.ReLU6, Calls])
def test_a_forward_of_the_instances_own(make):
    x = torch.randn(ROWS, requires_grad=True)
    model = nn.Sequential(nn.LayerNorm(8), make())
    hooked(model[1])
    before = saved_bytes(model, x)
    activations_cuda.convert(model, x)
    assert saved_bytes(model, x) < before
    assert saved_bytes(activations_cuda.revert(model), x) == before

    model = activations_cuda.convert(nn.Sequential(nn.LayerNorm(8), make()), x)
    hooked(model[1])
    assert saved_bytes(activations_cuda.revert(model), x) == before

    module = make()
    forward = module.forward
    module.forward = lambda x: forward(x)
    model = nn.Sequential(nn.LayerNorm(8), module)
    with pytest.warns(UserWarning, match="nothing to convert.*called where it can't be replaced"):
        activations_cuda.convert(model, x)
    assert not activations_cuda.converted(model)


def test_a_revert_that_an_instances_forward_hides():
    x = torch.randn(ROWS, requires_grad=True)
    model = activations_cuda.convert(nn.Sequential(nn.LayerNorm(8), nn.ReLU6()), x)
    forward = model[1].forward
    model[1].forward = lambda x: forward(x)
    with pytest.warns(UserWarning, match="revert: 1: a forward that was set on the module"):
        activations_cuda.revert(model)


def test_an_activation_that_two_models_share():
    act, x = nn.ReLU6(), torch.randn(ROWS)
    one, other = (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), act) for _ in range(2))
    activations_cuda.convert(one, x)
    assert activations_cuda.converted(one) == {"ReLU6": 1}
    assert not activations_cuda.converted(other)
    one.eval()
    assert not one[2].training
    assert_same_step(copy.deepcopy(one), activations_cuda.revert(copy.deepcopy(one)), x)
    assert activations_cuda.revert(one)[2] is act


SOURCE = """
import torch.nn.functional as F
from torch import nn

class Net(nn.Sequential):
    def forward(self, x):
        return F.relu6(super().forward(x)) * FACTOR
"""


def test_a_module_that_is_reloaded(tmp_path, monkeypatch):
    """As IPython's %autoreload 2 does it: the old class's functions get the new code."""
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "reloaded.py"
    path.write_text(SOURCE.replace("FACTOR", "1"))
    reloaded = importlib.import_module("reloaded")
    before, x = vars(reloaded).keys() - {"__warningregistry__"}, torch.randn(ROWS)
    model = activations_cuda.convert(reloaded.Net(nn.Linear(8, 8), nn.LayerNorm(8)), x)
    assert vars(reloaded).keys() == before
    expected, old = model(x), reloaded.Net
    path.write_text(SOURCE.replace("FACTOR", "20"))
    importlib.reload(reloaded)
    old.forward.__code__ = reloaded.Net.forward.__code__
    assert torch.equal(model(x), expected * 20)
    assert activations_cuda.converted(model) == {"Net": 1}


def test_bound_methods_are_pickled():
    cloudpickle = pytest.importorskip("cloudpickle")

    class Local(nn.Sequential):
        def forward(self, x):
            return F.relu6(super().forward(x))

    x = torch.randn(ROWS)
    model = activations_cuda.convert(Local(nn.Linear(8, 8), nn.LayerNorm(8)), x)
    forward = cloudpickle.loads(cloudpickle.dumps(model.forward))
    assert torch.equal(forward(x), model(x))
    act = activations_cuda.convert(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), Calls()), x)[2]
    assert torch.equal(pickle.loads(pickle.dumps(act.forward))(x), F.relu6(x))


def test_what_pays_nowhere_is_a_warning():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(ROWS)
    with pytest.warns(UserWarning, match="GELU left alone: saves less in bfloat16 and float16 only: call convert under"):
        activations_cuda.convert(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        activations_cuda.convert(model, x)
    assert activations_cuda.converted(model) == {"GELU": 1}


def test_what_converts_nothing_is_a_warning():
    """But for what was named, of which there is none, and for a scope."""
    saved = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.GELU())
    for inputs, model, reason in [
        ((), saved, "1 ReLU, 1 GELU left alone: pass example inputs"),
        ((), nn.Linear(8, 8), "no activation module: pass example inputs to reach functions"),
        ((torch.randn(ROWS),), nn.Linear(8, 8), "no activation is called"),
    ]:
        with pytest.warns(UserWarning, match=f"convert: nothing to convert: {reason}"):
            activations_cuda.convert(model, *inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        activations_cuda.convert(saved, classes=[])
        activations_cuda.convert(saved, recompute=True)
        for activation in activations_cuda.ReLU6(), activations_cuda.ReLU():
            model = nn.Sequential(nn.LayerNorm(8), activation)
            activations_cuda.convert(model)
            activations_cuda.convert(model, torch.randn(ROWS))


@pytest.mark.parametrize("stderr", ["closed", None])
def test_what_it_did_where_nobody_reads(stderr, monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed if stderr else None)
    monkeypatch.setattr(logging.getLogger("activations_cuda"), "hasHandlers", lambda: False)
    assert activations_cuda.converted(activations_cuda.convert(nn.Sequential(nn.ReLU6()))) == {"ReLU6": 1}


def test_why_nothing_pays_under_autocast():
    class Widens(nn.Module):
        def forward(self, x):
            return F.gelu(x.float())

    model = nn.Sequential(nn.Linear(8, 8), Widens(), nn.Linear(8, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(UserWarning, match="only: it gets another dtype here"):
        activations_cuda.convert(model, torch.randn(ROWS))


def test_an_activation_that_the_model_holds_twice():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act = nn.LayerNorm(8), nn.ReLU6()
            self.table = {"act": self.act}

        def forward(self, x):
            return self.table["act"](self.norm(x))

    model, x = Table(), torch.randn(ROWS, requires_grad=True)
    before = saved_bytes(model, x)
    activations_cuda.convert(model, x)
    assert saved_bytes(model, x) < before
    assert model.table["act"] is model.act


def test_a_model_with_modules_of_its_own():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = net()
            self.modules = [*self.layers]

        def forward(self, x):
            for module in self.modules:
                x = module(x)
            return x

    model = activations_cuda.convert(Own(), torch.randn(ROWS), recompute=True)
    assert activations_cuda.converted(model) == {"Own": 1, "ReLU6": 1}
    assert not activations_cuda.converted(activations_cuda.revert(model))


def test_a_hook_that_changes_shapes_is_called():
    width = 8
    model = net()
    model.register_forward_pre_hook(lambda module, args: (args[0][:, :width],))
    assert activations_cuda.converted(activations_cuda.convert(model, torch.randn(64, 20))) == {"ReLU6": 1}


def test_generators_and_weak_references():
    class Model(nn.Sequential):
        def forward(self, x):
            self.inner().seen = x
            return super().forward(x + torch.rand(8, generator=self.generator))

    model = Model(*net())
    model.generator, model.inner = torch.Generator(), weakref.ref(model[0])
    state = model.generator.get_state()
    activations_cuda.convert(model, torch.randn(ROWS))
    assert torch.equal(model.generator.get_state(), state)
    assert not hasattr(model[0], "seen")


def test_inference_keeps_pytorchs_fast_paths():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

        def forward(self, x):
            return F.relu6(self.norm(self.layer(x)))

    model, x = Model().eval(), torch.randn(2, 16, 8)
    activations_cuda.convert(model, x)
    assert "Model" in activations_cuda.converted(model)
    with torch.no_grad(), torch.profiler.profile() as profile:
        model(x)
    assert "aten::_transformer_encoder_layer_fwd" in {event.key for event in profile.key_averages()}


class Encoder(nn.Module):
    """Whose attention is a frozen part."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.encoder.eval().requires_grad_(False)
        self.head, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x, mask):
        return F.relu6(self.norm(self.head(self.encoder(x, src_key_padding_mask=mask)))).sum(1)


def test_frozen_parts_keep_pytorchs_fast_paths():
    """Which gives zeros where the input is padded."""
    model, x, mask = Encoder(), torch.randn(4, 6, 8), torch.zeros(4, 6, dtype=torch.bool)
    mask[:, 4:] = mask[0] = True
    mask[0, 0] = False
    expected = model(x, mask)
    assert torch.equal(activations_cuda.convert(model, x, mask)(x, mask), expected)

    encoder = Encoder().encoder.train().requires_grad_()
    later = copy.deepcopy(encoder).eval().requires_grad_(False)
    activations_cuda.convert(encoder, x)
    assert activations_cuda.converted(encoder) == {"TransformerEncoderLayer": 2}
    encoder.eval().requires_grad_(False)
    assert torch.equal(encoder(x, src_key_padding_mask=mask), later(x, src_key_padding_mask=mask))


def test_inputs_that_the_model_does_not_take():
    with pytest.raises(TypeError, match=r"convert: expected the arguments of the model's forward \(too many positional"):
        activations_cuda.convert(net(), [torch.randn(ROWS), torch.randn(ROWS)])
    converted = activations_cuda.convert(Calls(), torch.randn(ROWS), recompute=True)
    with pytest.raises(TypeError, match=r"convert: expected the arguments of the model's forward \(too many positional"):
        activations_cuda.convert(converted, torch.randn(ROWS), torch.randn(ROWS))
    with pytest.raises(ValueError, match="convert: expected a model whose parameters are initialized, got a lazy one"):
        activations_cuda.convert(nn.Sequential(nn.LazyLinear(8), nn.ReLU6()), torch.randn(ROWS))


class Makes(nn.Sequential):
    def __reduce__(self):
        return self._make, (type(self), list(self))

    @classmethod
    def _make(cls, kind, layers):
        return kind(*layers)

    def forward(self, x):
        return F.relu6(super().forward(x))


def test_a_module_that_is_made_again_by_its_class():
    x = torch.randn(ROWS)
    model = activations_cuda.convert(Makes(nn.Linear(8, 8), nn.LayerNorm(8)), x)
    loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded) is type(model)
    assert torch.equal(loaded(x), model(x))


def test_says_what_it_did_where_nobody_logs():
    program = """
        import torch, activations_cuda
        from torch import nn
        activations_cuda.convert(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU6()), torch.randn(64, 8))
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert run.stderr.strip() == "activations_cuda.convert: 1 ReLU6 converted"


def test_symbolic_traces_hold_pytorchs_ops():
    model = activations_cuda.convert(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), Calls()), torch.randn(ROWS))
    traced = torch.fx.symbolic_trace(model[2])
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [F.relu6]


class Act(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return F.relu6(self.norm(x))


class Writes(Act):
    """Whose forward writes to something that it has, made and read by two functions."""

    makes: ClassVar = {
        "list's method": (lambda m: setattr(m, "has", [].append), lambda m, x: m.has(x), lambda m: m.has.__self__),
        "array": (lambda m: setattr(m, "has", bytearray(1)), lambda m, x: m.has.append(1), lambda m: m.has),
        "iterator": (lambda m: setattr(m, "has", itertools.count()), lambda m, x: next(m.has), lambda m: repr(m.has)),
        "random": (lambda m: setattr(m, "has", Dice(0)), lambda m, x: m.has.random(), lambda m: m.has.getstate()),
        "cache": (
            lambda m: setattr(m, "has", functools.lru_cache(m.double)),
            lambda m, x: m.has(2),
            lambda m: m.has.cache_info().misses,
        ),
        "weak method": (
            lambda m: setattr(m, "has", weakref.WeakMethod(m.note)),
            lambda m, x: m.has()(x),
            lambda m: vars(m).get("noted"),
        ),
        "weak keys": (
            lambda m: setattr(m, "has", weakref.WeakKeyDictionary({m.norm: []})),
            lambda m, x: m.has[m.norm].append(x),
            lambda m: m.has[m.norm],
        ),
        "keys": (
            lambda m: setattr(m, "has", {(m.norm, "a"): []}),
            lambda m, x: m.has[m.norm, "a"].append(x),
            lambda m: m.has[m.norm, "a"],
        ),
        "default": (
            lambda m: setattr(m, "has", lambda x, seen=[]: seen.append(x)),
            lambda m, x: m.has(x),
            lambda m: m.has.__defaults__[0],
        ),
        "text": (
            lambda m: setattr(m, "has", io.StringIO()),
            lambda m, x: m.has.write("called"),
            lambda m: m.has.getvalue(),
        ),
        "bytes": (
            lambda m: setattr(m, "has", io.BytesIO()),
            lambda m, x: m.has.write(b"called"),
            lambda m: m.has.getvalue(),
        ),
        "tensor of the class": (lambda m: None, lambda m, x: m.of_class.add_(1), lambda m: m.of_class.item()),
        "slot": (lambda m: setattr(m, "slot", []), lambda m, x: m.slot.append(x), lambda m: m.slot),
    }
    of_class = torch.zeros(1)
    __slots__ = ("slot",)

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.makes[kind][0](self)

    def double(self, x):
        return 2 * x

    def note(self, x):
        self.noted = x

    def forward(self, x):
        self.makes[self.kind][1](self, x)
        return super().forward(x)


class Dice(random.Random):
    """Somebody's own generator."""


@pytest.mark.parametrize("kind", Writes.makes)
def test_what_a_forward_writes_to(kind):
    if kind == "iterator" and sys.version_info >= (3, 14):
        pytest.skip("Python can't copy those of itertools any more")
    module = Writes(kind)
    read = Writes.makes[kind][2]
    before = copy.copy(read(module))
    activations_cuda.convert(module, torch.randn(ROWS))
    assert activations_cuda.converted(module) == {"Writes": 1}
    assert read(module) == before


def test_inputs_that_are_written_to():
    """They were computed, so the model may."""
    back, head = nn.Linear(8, 8), nn.Sequential(nn.ReLU6(inplace=True), nn.Linear(8, 8))
    activations_cuda.convert(head, back(torch.randn(ROWS)))
    most = torch.randn(ROWS).max(0)
    before = most.values.clone()

    class Adds(Act):
        def forward(self, most):
            most.values.add_(1)
            return super().forward(most.values)

    activations_cuda.convert(Adds(), (most,))
    assert torch.equal(most.values, before)


def test_a_scripted_part_and_hooks_of_its_own():
    class Hooked(Act):
        def register_forward_pre_hook(self, hook):
            raise NotImplementedError

    frozen = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(8, 8)).eval()))
    model = nn.Sequential(torch.jit.script(nn.Linear(8, 8)), frozen, nn.LayerNorm(8), nn.ReLU6(), Hooked())
    activations_cuda.convert(model, torch.randn(ROWS))
    assert activations_cuda.converted(model) == {"ReLU6": 1, "Hooked": 1}


def test_a_module_that_cannot_be_copied():
    class Both(nn.Module, dict):
        __hash__ = nn.Module.__hash__

    for model in Both(), nn.Sequential(Both()):
        with pytest.raises(TypeError, match="expected a model that can be copied, got Both in it"):
            activations_cuda.convert(model, torch.randn(ROWS))


def prints(module, args, output):
    print("called")


def imports(module, args, output):
    import logging

    logging.getLogger().seen = output


def assigns(module, args, output):
    globals()["seen"] = output


def saves(module, args, output):
    torch.save(output, "seen.pt")


def collects(module, args, output):
    module.outputs.put(output)


@pytest.mark.parametrize("hook", [prints, imports, assigns, saves, collects])
def test_hooks_that_do_more_than_compute_are_not_called(hook, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    model = Act()
    model.outputs = queue.Queue()
    model.register_forward_hook(hook)
    activations_cuda.convert(model, torch.randn(ROWS))
    assert model.outputs.empty()
    assert not capsys.readouterr().out and not hasattr(logging.getLogger(), "seen")
    assert "seen" not in globals() and not any(tmp_path.iterdir())


def test_a_hook_whose_closure_is_still_empty():
    def hook(module, args, output):
        return late(output)

    model = Act()
    model.register_forward_hook(hook)
    activations_cuda.convert(model, torch.randn(ROWS))
    late = torch.neg
    assert model(torch.ones(ROWS)).shape == ROWS


def test_hidden_states_that_transformers_collects_by_hooks():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_attention_heads=2, intermediate_size=16, num_hidden_layers=2, vocab_size=8
    )

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = transformers.BertModel(config)

        def forward(self, ids):
            return torch.stack(self.bert(ids, output_hidden_states=True).hidden_states).sum(0)

    model, ids = Sum(), torch.arange(4)[None]
    model(ids)  # which leaves the hooks
    activations_cuda.convert(model, ids)
    assert model(ids).shape == (1, 4, 16)


def test_a_model_that_is_written_to_by_proxy():
    class Child(nn.Module):
        def __init__(self, parent):
            super().__init__()
            object.__setattr__(self, "parent", weakref.proxy(parent))

        def forward(self, x):
            self.parent.seen = x
            return F.hardtanh(x)

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = Child(self)

        def forward(self, x):
            return self.child(x)

    model = Parent()
    activations_cuda.convert(model, torch.randn(ROWS))
    assert not hasattr(model, "seen")


def test_a_model_whose_objects_the_collector_ignores():
    act = nn.ReLU6()
    mine, theirs = nn.Sequential(act), nn.Sequential(act)
    gc.freeze()
    try:
        activations_cuda.convert(mine)
    finally:
        gc.unfreeze()
    assert activations_cuda.converted(mine) and not activations_cuda.converted(theirs)
    assert activations_cuda.revert(mine)[0] is act


def test_what_was_frozen_before_the_import():
    """As Python 3.12 freezes what it starts with."""
    program = """
        import gc
        gc.freeze()
        import activations_cuda
        from torch import nn
        model = nn.Sequential(nn.ReLU6())
        act = model[0]
        assert activations_cuda.convert(model)[0] is act
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_a_module_call_that_was_wrapped_before_the_import():
    program = """
        import functools, torch
        from torch import nn
        call = nn.Module._call_impl
        nn.Module._call_impl = functools.wraps(call)(lambda *args, **kwargs: call(*args, **kwargs))
        import activations_cuda
        model = nn.Sequential(nn.LayerNorm(8), nn.ReLU6())
        activations_cuda.convert(model, torch.randn(64, 8))
        assert activations_cuda.converted(model) == {"ReLU6": 1}
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_two_models_with_one_activation_in_any_order():
    act = nn.ReLU6()
    one, other = nn.Sequential(nn.LayerNorm(8), act), nn.Sequential(nn.LayerNorm(8), act)
    x = torch.randn(ROWS)
    activations_cuda.convert(one, x)
    activations_cuda.convert(other, x)
    activations_cuda.revert(one)
    assert not activations_cuda.converted(one) and activations_cuda.converted(other) and one[1] is act
    activations_cuda.revert(other)
    assert other[1] is act and type(act) is nn.ReLU6


def test_a_class_that_was_derived_from_a_converted_one():
    model = nn.Sequential(nn.Linear(8, 8), Act())
    activations_cuda.convert(model, torch.randn(ROWS))
    model[1].__class__ = type("Sharded", (type(model[1]),), {})
    with pytest.warns(UserWarning, match="revert: 1: of a class that was derived since from the converted one"):
        activations_cuda.revert(model)
    with pytest.raises(TypeError, match="derived from a converted one, got Sharded"):
        activations_cuda.convert(model[1], recompute=True)


def test_an_error_leaves_an_earlier_conversion():
    model = Act()
    model.norm = nn.Sequential(nn.LayerNorm(8), nn.ReLU6())
    activations_cuda.convert(model, torch.randn(ROWS))
    model.__class__ = type("Sharded", (type(model),), {})
    before = activations_cuda.converted(model)
    with pytest.raises(TypeError, match="derived from a converted one, got Sharded"):
        activations_cuda.convert(model, recompute=True)
    assert activations_cuda.converted(model) == before


def test_a_model_that_is_garbage_shares_nothing():
    gc.disable()
    try:
        model = nn.Sequential(nn.LayerNorm(8), nn.ReLU6())
        act, dead = model[1], nn.Sequential(*model)
        dead.itself = [dead]
        del dead
        activations_cuda.convert(model, torch.randn(ROWS))
    finally:
        gc.enable()
    assert model[1] is act


def test_a_lazy_model_has_no_scope_yet():
    with pytest.raises(ValueError, match="whose parameters are initialized, got a lazy one: call it once"):
        activations_cuda.convert(nn.LazyLinear(4), recompute=True)


def scaled(x, scale=1.0):
    return F.relu6(x) * scale


def test_functions_are_themselves():
    class Chooses(Act):
        table: ClassVar = {scaled: 2.0}

        def __init__(self):
            super().__init__()
            self.function = scaled

        def forward(self, x):
            return self.function(self.norm(x), self.table[self.function])

    model = Chooses()
    activations_cuda.convert(model, torch.randn(ROWS))
    assert activations_cuda.converted(model) == {"Chooses": 1}


def adds_a_mask(forward):
    @functools.wraps(forward)
    def wrapper(self, x):
        return forward(self, x, torch.ones_like(x))

    return wrapper


class Decorated(nn.Module):
    @adds_a_mask
    def forward(self, x, mask):
        return F.relu6(x) * mask


class WithItsOwnCall(nn.Module):
    def __call__(self, x, scale=1.0):
        return super().__call__(x) * scale

    def forward(self, x):
        return F.relu6(x) * 2


def with_a_hook_that_adds():
    class Hooked(nn.Module):
        def forward(self, x, mask):
            return F.relu6(x) * mask

    model = Hooked()
    model.register_forward_pre_hook(lambda module, args: (*args, torch.ones(1)))
    return model


@pytest.mark.parametrize(("make", "options"), [(Decorated, {}), (WithItsOwnCall, {"scale": 2.0}), (with_a_hook_that_adds, {})])
def test_calls_that_a_signature_does_not_show(make, options):
    model, x = make(), torch.randn(ROWS, requires_grad=True)
    expected = model(x, **options)
    activations_cuda.convert(model, recompute=True)
    for _ in range(2):
        activations_cuda.convert(model, x, **options)
    assert activations_cuda.converted(model) and torch.equal(model(x, **options), expected)


def test_a_later_conversion_keeps_the_scope():
    model = activations_cuda.convert(net(), recompute=True)
    outer = nn.Sequential(model, nn.Linear(8, 8))
    activations_cuda.convert(outer, torch.randn(ROWS))
    assert "recompute" in repr(outer[0])
    activations_cuda.revert(outer)
    assert "recompute" not in repr(outer[0]) and type(outer[0]) is nn.Sequential


def test_a_failing_pass_logs_no_traceback():
    logger, handler, records = logging.getLogger("torch._subclasses.fake_tensor"), logging.Handler(), []
    handler.emit = records.append
    logger.addHandler(handler)
    try:
        with pytest.raises(RuntimeError, match="shape"):
            activations_cuda.convert(net(), torch.randn(2, 7))
        assert not records and not logger.filters
    finally:
        logger.removeHandler(handler)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since Python 3.11")
def test_an_error_of_the_copy_alone_says_so():
    class Scaled(Act):
        def forward(self, x):
            return super().forward(x) * scales[self]

    model = Scaled()
    scales = {model: 2.0}
    with pytest.raises(KeyError) as raised:
        activations_cuda.convert(model, torch.randn(ROWS))
    assert "a copy of the model" in raised.value.__notes__[0]


class Counts(nn.Module):
    """Depends on values, so its pass is one on copies."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return F.relu6(self.linear(x)) if x.sum().item() else x


@pytest.mark.parametrize("make", [net, Counts])
def test_no_memory_for_copies(make, monkeypatch):
    """The error is that of the pass on fake tensors, and the model's own tensors take no part."""

    def clone(tensor):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(dry_run, "_clone", clone)
    model = make()
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError) as raised:
        activations_cuda.convert(model, torch.randn(2, 7 if make is net else 8))
    assert isinstance(raised.value.__context__, torch.OutOfMemoryError)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_a_model_that_fails_is_freed():
    class Fails(nn.Linear):
        def forward(self, x):
            raise KeyError

    gc.disable()
    try:
        for device in "cpu", "meta":
            model = Fails(8, 8, device=device)
            gone = weakref.ref(model)
            with pytest.raises(KeyError):
                activations_cuda.convert(model, torch.randn(8, 8, device=device))
            del model
            assert gone() is None
    finally:
        gc.enable()


def test_a_transform_in_forward():
    class Differentiates(nn.Module):
        def forward(self, x):
            return torch.func.grad(lambda x: F.silu(x).sum())(x) + F.relu6(x)

    for function in activations_cuda.convert, activations_cuda.memory_report:
        with pytest.raises(RuntimeError, match=r"torch\.func.*convert\(model\) needs no inputs"):
            function(Differentiates(), torch.randn(ROWS))


def test_an_input_named_classes():
    class Conditional(nn.Module):
        def forward(self, x, classes):
            return F.relu6(x) + classes

    x, classes = torch.randn(ROWS, requires_grad=True), torch.ones(1)
    for wrong in classes, [[nn.ReLU]]:
        with pytest.raises(ValueError, match=r"among .*inputs of that name go in a dict"):
            activations_cuda.convert(Conditional(), x, classes=wrong)
    activations_cuda.convert(Conditional(), {"x": x, "classes": classes})


def test_iterators_that_a_model_holds():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.iterators = [iter([1.0, 2.0, 3.0]), iter(range(1, 4)), map(float, [1, 2, 3]), reversed([3, 2, 1])]

        def forward(self, x):
            return sum(F.relu6(x) * next(iterator) for iterator in self.iterators)

    model = Net()
    activations_cuda.convert(model, torch.randn(ROWS, requires_grad=True))
    assert [next(iterator) for iterator in model.iterators] == [1] * 4


def test_an_iterator_over_modules():
    """Its modules are the copy's."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.ReLU6()])
            self.left, self.pairs = iter([*self.blocks]), enumerate(self.blocks)

        def forward(self, x):
            for block in self.left:
                x = block(x)
            return x + next(self.pairs)[1](x)

    model = activations_cuda.convert(Net(), torch.randn(2, 8))
    assert activations_cuda.converted(model) == {"ReLU6": 1}
    assert [*model.left] == [*model.blocks] and next(model.pairs) == (0, model.blocks[0])


class Registry(type):
    def __len__(cls):
        return 0


def test_a_class_that_is_false():
    class Net(Act, metaclass=Registry):
        pass

    model = activations_cuda.convert(Net(), torch.randn(ROWS))
    assert activations_cuda.converted(model) == {"Net": 1}
    assert type(activations_cuda.revert(model)) is Net


def test_a_forward_without_a_signature():
    class Forward:
        def __get__(self, module, kind=None):
            return self if module is None else functools.partial(self, module)

        def __call__(self, module, x):
            return module.act(module.norm(x))

    class Net(Act):
        forward = Forward()

        def __init__(self):
            super().__init__()
            self.act = nn.ReLU6()

    model = activations_cuda.convert(Net(), torch.randn(ROWS))
    assert activations_cuda.converted(model) == {"ReLU6": 1}


def test_modules_that_another_thread_is_importing(monkeypatch):
    for name in "torch._dynamo", "torch.distributed.fsdp":
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    model = activations_cuda.convert(nn.Sequential(nn.ReLU6()), torch.randn(ROWS, requires_grad=True))
    assert activations_cuda.converted(model) == {"ReLU6": 1}


def test_surveys_in_two_threads():
    """torch.compile's stance and random states are the whole process's."""

    class Waits(nn.Module):
        def __init__(self, inside, others):
            super().__init__()
            self.relu6, self.wait = nn.ReLU6(), lambda: (inside.set(), others.wait(0.5))

        def forward(self, x):
            self.wait()
            return self.relu6(x + torch.rand(())) * x

    importlib.import_module("torch._dynamo")
    x, state = torch.randn(8, 8), torch.get_rng_state()
    events = threading.Event(), threading.Event()
    models = Waits(*events), Waits(*reversed(events))
    with ThreadPoolExecutor() as threads:
        reports = list(threads.map(lambda model: activations_cuda.memory_report(model, x), models))
    assert reports[0].before == reports[1].before
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert torch.equal(torch.get_rng_state(), state)


def test_a_child_of_a_process_that_surveys():
    """It has none of the threads, but their locks as they were."""

    class Forks(nn.Module):
        def forward(self, x):
            inside.set()
            done.wait(60)
            return F.relu6(x) * x

    inside, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=activations_cuda.memory_report, args=(Forks(), torch.randn(8, 8)))
    thread.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        try:
            done.set()
            activations_cuda.memory_report(Forks(), torch.randn(8, 8))
            os._exit(0)
        finally:  # or pytest would go on in it
            os._exit(1)
    deadline = time.monotonic() + 60
    while (status := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if status == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    done.set()
    thread.join()
    assert status == (child, 0)


def test_autocast_keeps_its_casts_of_the_model():
    """Cast anew, the weight's gradient would be summed in float32."""

    def run(look):
        torch.manual_seed(0)
        model, x = net(), torch.randn(ROWS)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).sum()
            look(model, x)
            loss = loss + model(x + 1).sum()
        return torch.autograd.grad(loss, list(model.parameters()))

    for one, other in zip(run(activations_cuda.memory_report), run(lambda *_: None), strict=True):
        assert torch.equal(one, other)


def test_autocast_keeps_nothing_of_a_copy():
    class Depends(nn.Linear):
        def forward(self, x):
            return super().forward(x if x.sum() > 0 else -x)

    model, x = Depends(61, 67), torch.randn(4, 61)
    with torch.autocast("cpu", torch.bfloat16):
        activations_cuda.memory_report(model, x)
        gc.collect()
        weights = [each for each in gc.get_objects() if type(each) is nn.Parameter and each.shape == model.weight.shape]
    assert len(weights) == 1


class Groups(nn.Sequential):
    """Has methods of its own by the names of nn.Module's."""

    def parameters(self, recurse=True):
        return [{"params": super().parameters(recurse)}]


class Transparent(nn.Sequential):
    @property
    def __class__(self):
        return nn.Linear


class Comparing(nn.Sequential):
    def __eq__(self, other):
        return self[0].weight == other[0].weight

    __hash__ = nn.Module.__hash__


@pytest.mark.parametrize("kind", [Groups, Transparent, Comparing])
def test_classes_with_methods_of_their_own(kind):
    class Own(kind):
        def forward(self, x):
            return F.relu6(super().forward(x)) * x

    x = torch.randn(32, 64)
    part = Own(nn.Linear(64, 64))
    model = nn.Sequential(part, Own(nn.Linear(64, 64)))
    expected = model(x)
    activations_cuda.convert(part, x, recompute=True)
    activations_cuda.convert(model, x, recompute=True)
    assert torch.equal(model(x), expected) and activations_cuda.converted(model)["Own"] == 2
    activations_cuda.revert(model)
    assert {type(each) for each in model} == {Own}
