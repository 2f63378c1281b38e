"""The memory report: what it counts, and the command that prints it."""

import dataclasses
import json
import pickle
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensor

import activations_cuda
from activations_cuda import known_models, scope_survey
from activations_cuda.__main__ import main
from activations_cuda.memory import LayerMemory, memory_report, saved_bytes
from activations_cuda.recipes.verification import forget_choices
from activations_cuda.replacements import original_of, scope_options, set_class
from nets import NETS, images
from recomputing import Plain, Scope, bytes_of

MIB = 2**20


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.act = nn.ReLU6(inplace=True)

    def forward(self, x):
        return F.hardtanh(self.act(self.norm(self.linear(x))) * 2)


ELEMENTS = 4096 * 64


def measure(model, *args, **kwargs):
    """The bytes that a forward pass of real tensors leaves to autograd, parameters and buffers not counted."""
    state = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()  # and it stays, so that its address does
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(*args, **kwargs)
    del output
    return sum(storage.nbytes() for address, storage in storages.items() if address not in state)


def test_counts_by_layer():
    report = activations_cuda.memory_report(Net(), torch.empty(4096, 64, device="meta"))
    layers = {layer.name: layer for layer in report.layers}
    assert layers["linear"] == LayerMemory("linear", "Linear", 4 * ELEMENTS, 4 * ELEMENTS)
    assert layers["act"] == LayerMemory("act", "ReLU6", 4 * ELEMENTS, ELEMENTS // 8)
    assert layers[""] == LayerMemory("", "Net", 4 * ELEMENTS, ELEMENTS // 8)  # the function that it calls itself
    assert layers["norm"].before == layers["norm"].after == 4 * ELEMENTS + 2 * 64 * 4  # its input, mean and deviation
    assert report.before == sum(layer.before for layer in report.layers)
    assert report.after == sum(layer.after for layer in report.layers)


@pytest.mark.parametrize("classes", [(), (nn.ReLU6,)])
def test_agrees_with_what_is_kept_in_earnest(classes):
    """Parameters and buffers don't count; the model may be converted before."""
    model = activations_cuda.convert(Net(), classes=classes) if classes else Net()
    x = torch.randn(4096, 64)
    report = activations_cuda.memory_report(model, x)
    assert measure(activations_cuda.revert(model), x) == report.before
    assert measure(activations_cuda.convert(model, example_inputs=(x,)), x) == report.after


def test_shared_storages_count_once():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    report = activations_cuda.memory_report(model, torch.empty(4096, 64, device="meta"))
    assert report.before == report.after == 2 * 4 * ELEMENTS  # the input and the ReLU's output, which the second layer shares


def test_leaves_the_model_as_it_is():
    model = activations_cuda.convert(Net())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    activations_cuda.memory_report(model, torch.randn(8, 64))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert activations_cuda.converted(model) == {"ReLU6": 1}
    assert all(parameter.grad is None for parameter in model.parameters())


class Awkward(nn.Module):
    """Integers, bounds that are PyTorch's op's to answer for, and an input that is passed twice."""

    def forward(self, x, y):
        F.hardtanh(torch.arange(9))
        F.hardtanh(x * 1, -1.0, float("nan"))
        return F.hardtanh(x * y)


@pytest.mark.parametrize("around", [nullcontext, torch.no_grad, torch.inference_mode, activations_cuda.ConvertMode])
def test_does_not_depend_on_what_is_around_it(around):
    x = torch.randn(1000, requires_grad=True)
    with around():
        report = activations_cuda.memory_report(Awkward(), x, x)
    # x itself, and what the last hardtanh takes or its bits; of the one before nobody has the output.
    assert (report.before, report.after) == (2 * 4000, 4000 + 125)


def test_compiled_models_are_counted_as_they_are():
    x = torch.empty(4096, 64, device="meta")
    compiled = activations_cuda.memory_report(torch.compile(Net()), x)
    assert compiled == activations_cuda.memory_report(Net(), x)


def test_models_without_weights():
    with torch.device("meta"):
        model = Net()
    x = torch.empty(4096, 64, device="meta")
    assert activations_cuda.memory_report(model, x) == activations_cuda.memory_report(Net(), x)


def test_nothing_to_convert_and_nothing_at_all():
    report = activations_cuda.memory_report(nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4))
    assert report.before == report.after == 3 * 4 * 4
    assert activations_cuda.memory_report(nn.Identity(), torch.randn(3)).layers == ()
    with pytest.raises(TypeError, match=r"memory_report: expected a torch\.nn\.Module, got function"):
        activations_cuda.memory_report(F.relu, torch.randn(3))


def test_autocast_reaches_a_model_on_the_meta_device(device):
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 3))
    with torch.autocast(device, torch.bfloat16):
        report = activations_cuda.memory_report(model, torch.empty(2, 3, 34, 34, device="meta"))
    (silu,) = (layer for layer in report.layers if layer.kind == "SiLU")
    assert silu.before == 2 * 8 * 32 * 32 * 2
    assert silu.after == 2 * 8 * 32 * 32 * 5 // 8


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind, device):
    """cuDNN makes one tensor of their weights."""

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.recurrent = kind(8, 16, 2, bidirectional=True)
            self.linear, self.act, self.head = nn.Linear(32, 32), nn.ReLU6(), nn.Linear(32, 4)

        def forward(self, x):
            return self.head(self.act(self.linear(self.recurrent(x)[0])))

    model = Tagger().to(device)
    x = torch.randn(5, 4, 8, device=device)
    reports = [memory_report(model, inputs, recompute=True) for inputs in (x, x.to("meta"))]
    assert reports[0] == reports[1] and reports[0].recompute <= reports[0].before
    assert activations_cuda.converted(activations_cuda.convert(model, x.to("meta"), recompute=True))["ReLU6"] == 1
    model(x).sum().backward()


def test_an_error_in_the_model_leaves_no_hooks_behind():
    with pytest.raises(RuntimeError):
        activations_cuda.memory_report(Net(), torch.randn(3, 5))
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert not torch.nn.modules.module._global_forward_hooks


def test_table_and_chart(tmp_path):
    pytest.importorskip("matplotlib")
    report = activations_cuda.memory_report(Net(), torch.empty(4096, 64, device="meta"))
    table, _, rest = str(report).partition("\n\n")
    assert table.splitlines()[-1].split() == ["in", "all", f"{report.before / MIB:.1f}", f"{report.after / MIB:.1f}", "-48%"]
    assert rest.splitlines() == ["1 Net (hardtanh) converted", "1 ReLU6 converted"]
    report.plot(tmp_path / "chart.svg")
    assert "before: 4 MiB in all" in (tmp_path / "chart.svg").read_text()
    assert json.loads(json.dumps(dataclasses.asdict(report)))["before"] == report.before


def test_saved_bytes_of_a_function():
    x = torch.randn(1000, requires_grad=True)
    assert saved_bytes(lambda t: (t * t).exp(), x) == 8000


MODELS = {
    **{
        f"torchvision:{name}": (4, 3, 224, 224)
        for name in ("mobilenet_v2", "mobilenet_v3_large", "resnet50", "vgg16", "squeezenet1_1")
    },
    **{f"timm:{name}": (4, 3, 224, 224) for name in ("efficientnet_lite0", "darknet53", "ghostnet_100", "convnext_atto")},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec, shape", MODELS.items())
def test_known_models_are_never_worse_off(spec, shape, dtype):
    """Once all that would gain nothing is left alone."""
    pytest.importorskip(spec.split(":")[0], exc_type=Exception)
    model = known_models.load(spec)
    images = torch.empty(shape, device="meta")
    with torch.autocast("cpu", dtype=dtype, enabled=dtype == torch.bfloat16):
        report = activations_cuda.memory_report(model, images)
        assert report.after <= report.before
        activations_cuda.convert(model, example_inputs=images)
    assert sum(activations_cuda.converted(model).values()) == len({d.module for d in report.decisions if d.converted})
    assert any(d.converted for d in report.decisions) == (report.after < report.before)


def fails(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    return capsys.readouterr().err


def test_command_refuses_bad_input(capsys, monkeypatch):
    expected = "expected torchvision:NAME, timm:NAME or transformers:NAME, got"
    assert f"{expected} mobilenet_v2" in fails(["report", "mobilenet_v2"], capsys)
    assert f"{expected} keras:vgg" in fails(["report", "keras:vgg"], capsys)
    assert "expected a whole number from 1 to 2147483647, got 0" in fails(["report", "timm:vgg11", "--batch", "0"], capsys)
    assert "got \u0663" in fails(["report", "timm:vgg11", "--batch", "\u0663"], capsys)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    message = fails(["report", "torchvision:mobilenet_v2"], capsys)
    assert "the memory report needs torchvision" in message
    assert f"pip install 'activations-cuda[report]' torch=={torch.__version__.split('+')[0]}" in message


def test_command_creates_what_wants_values(monkeypatch):
    monkeypatch.setitem(known_models.LIBRARIES, "timm", lambda name: lambda: nn.Linear(int(torch.ones(8).sum()), 8))
    assert known_models.load("timm:net").weight.device.type == "cpu"


def test_command_under_autocast(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(known_models, "load", lambda spec: nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 3)))
    path = tmp_path / "report.json"
    for options, saves in ((), False), (["--autocast", "bfloat16"], True):
        main(["report", "timm:net", "--json", str(path), *options])
        result = json.loads(path.read_text())
        assert (result["after"] < result["before"]) is saves


def test_command_says_what_a_model_or_a_path_raises(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(known_models, "load", lambda spec: Net())
    assert "timm:net fails with inputs of --batch 1, --size 224, --tokens 512: " in fails(["report", "timm:net"], capsys)
    monkeypatch.setattr(known_models, "load", lambda spec: nn.Identity())
    assert "No such file" in fails(["report", "timm:net", "--json", str(tmp_path / "no" / "a.json")], capsys)


@pytest.mark.parametrize("model", ["torchvision:mobilenet_v2", "timm:mobilenetv2_100"])
def test_command(model, capsys, tmp_path):
    for library in (model.split(":")[0], "matplotlib"):
        pytest.importorskip(library, exc_type=Exception)
    paths = tmp_path / "report.json", tmp_path / "report.png"
    spec = model.upper() if model.startswith("torchvision") else model + ".ra_in1k"
    main(["report", spec, "--batch", "256", "--json", str(paths[0]), "--chart", str(paths[1])])
    result = json.loads(paths[0].read_text())
    assert result["after"] < 0.72 * result["before"]
    assert "\nin all" in capsys.readouterr().out
    assert paths[1].stat().st_size > 10000
    assert "did you mean" in fails(["report", model + "0"], capsys)


@pytest.fixture
def configuration(tmp_path):
    """Saves one of transformers, and returns its name for the command."""
    transformers = pytest.importorskip("transformers")

    def save(name, **options):
        getattr(transformers, name)(**options).save_pretrained(tmp_path)
        return f"transformers:{tmp_path}"

    return save


GPT2 = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100}


@pytest.mark.parametrize("head", ["GPT2LMHeadModel", None])
def test_command_for_a_model_of_transformers(head, configuration, capsys, tmp_path):
    """Whatever its dropout in attention, of which a GPU saves nothing."""
    path, results = tmp_path / "report.json", []
    for dropout in (0.1, 0.0):
        spec = configuration("GPT2Config", **GPT2, attn_pdrop=dropout, architectures=[head] if head else None)
        main(["report", spec, "--batch", "8", "--tokens", "64", "--recompute", "--json", str(path)])
        results.append(json.loads(path.read_text()))
    assert results[0] == results[1] and results[0]["recompute"] < 0.8 * results[0]["before"]
    assert ("lm_head" in capsys.readouterr().out) is bool(head)


SMALL = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}


@pytest.mark.parametrize(
    ("name", "options", "takes"),
    [
        ("T5Config", {"d_model": 32, "num_layers": 1, "architectures": ["T5ForConditionalGeneration"]}, None),
        ("ViTConfig", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}, None),
        ("WhisperConfig", SMALL, "expected a model of images or tokens, got one of input_features"),
        ("CLIPConfig", {}, "fails with inputs of --batch 1"),
        ("GPT2Config", {**GPT2, "architectures": ["GPT7"]}, "transformers has no model GPT7"),
        ("GPT2Config", {**GPT2, "architectures": ["logging"]}, "transformers has no model logging"),
    ],
)
def test_what_models_of_transformers_take(name, options, takes, configuration, capsys):
    spec = configuration(name, **options)
    if takes:
        assert takes in fails(["report", spec], capsys)
    else:
        main(["report", spec, "--recompute"])
        assert "in all" in capsys.readouterr().out


def test_a_configuration_that_transformers_cannot_read(configuration, capsys, tmp_path):
    spec = configuration("BertConfig")
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"hidden_size": 768', '"hidden_size": "x"'))
    assert f"transformers can't read a configuration {tmp_path}" in fails(["report", spec], capsys)


def kept_in_scope(model, x):
    """The bytes, once the model is converted."""
    activations_cuda.convert(model, x, recompute=True)
    set_class(model, original_of(type(model)))  # whose scope is not counted
    for _ in range(2):  # the first finds out which formulas fit
        with Scope(model, check=False) as scope:
            output = model(x)
    kept = scope.bytes(model)
    del output
    return kept


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_report_of_the_scope(name, autocast):
    torch.manual_seed(0)
    model, x = NETS[name](), images()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        report = memory_report(model, x, recompute=True)
        assert report.recompute == sum(layer.recompute for layer in report.layers)
        kept = kept_in_scope(model, x)
    # Fake tensors give batch norm's statistics half the bytes under autocast, as in the columns before.
    assert report.recompute == kept if not autocast else abs(report.recompute / kept - 1) < 0.03
    assert sum(report.recomputed.values()) > 0 and "recompute, " in str(report) and "iB by" in str(report)
    assert memory_report(model, x).recompute is None


@pytest.mark.usefixtures("deterministic")
def test_a_scope_with_options():
    """In place of True."""

    def saved():
        values = []

        def pack(tensor):
            values.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = net(x).square().mean()
        return bytes_of(values), torch.autograd.grad(loss, net.parameters())

    torch.manual_seed(0)
    options, x = activations_cuda.recompute(check=True, convolutions=True), torch.randn(4, 3, 32, 32)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 8, 1)
    )
    within, with_convolutions = (memory_report(net, x, recompute=given).recompute for given in (True, options))
    activations_cuda.convert(net, x, recompute=True)
    saved()
    before, expected = saved()
    activations_cuda.convert(net, x, recompute=options)
    activations_cuda.convert(net, x)  # whose scope stays
    saved()
    after, found = saved()
    assert before - after == within - with_convolutions == 4 * 16 * 28 * 28 * 4 and all(map(torch.equal, found, expected))
    made = pickle.loads(pickle.dumps(net))
    assert type(made) is type(net) and scope_options(made) == options.options


def requested_bytes():
    """As the allocator counts, whose blocks may be larger."""
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["mobilenet", "resnet", "unet", "efficientnet", "diffusion", "vit"])
def test_report_of_the_scope_is_what_the_allocator_counts(name):
    torch.manual_seed(0)
    model = (NETS[name](64) if name != "resnet" else NETS[name]()).cuda()
    x = torch.randn(64, 3, 16, 16, device="cuda")
    report = memory_report(model, x, recompute=True)
    activations_cuda.convert(model, x, recompute=True)
    for _ in range(2):
        model(x).sum().backward()
    before = requested_bytes()
    output = model(x)
    kept = requested_bytes() - before + x.nbytes
    del output
    assert abs(report.recompute / kept - 1) < 0.01


class Pooled(nn.Module):
    """A pool whose output nobody saves, beside what no rule gives."""

    def __init__(self):
        super().__init__()
        self.stem, self.other = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, 1)
        self.head = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = self.stem(x)
        return self.head(nn.functional.max_pool2d(x, 2) + self.other(x))


class Joined(nn.Module):
    """A constant and what a rule gives."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        y = self.stem(x).exp()
        z = torch.stack([torch.ones_like(y), y], 1).flatten(1, 2)
        return self.head(torch.cat([torch.ones_like(y), y], 1)) + self.head(z)


@pytest.mark.parametrize("kind", [Pooled, Joined])
def test_report_of_what_has_no_rule(kind):
    model, x = kind(), torch.randn(2, 3, 16, 16)
    report = memory_report(model, x, recompute=True)
    with Scope(check=False) as scope:
        output = model(x)
    assert report.recompute == scope.bytes(model) and sum(layer.recompute for layer in report.layers) == report.recompute
    assert not {"CatBackward0", "StackBackward0"} & set(report.recomputed)
    del output


def test_nothing_is_real_in_a_report(monkeypatch):
    """Neither masks nor what is read of them."""
    held = []
    monkeypatch.setattr(scope_survey, "_kept_storages", lambda value: held.extend(root.held for root in value.roots) or [])

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            y = x @ self.weight
            return (y.sin().masked_fill(y > 0, 0.5) * y) @ self.weight

    activations_cuda.memory_report(Net(), torch.empty(2**10, 64, device="meta"), recompute=True)
    assert held and all(isinstance(tensor, FakeTensor) for tensor in held)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_report_of_a_graph_network(layout):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(256, 256)

        def forward(self, adjacency, x):
            return F.relu6(torch.sparse.mm(adjacency, self.linear(x)))

    adjacency = torch.eye(64).to_sparse(layout=layout)
    report = memory_report(Net(), adjacency, torch.randn(64, 256), recompute=True)
    assert 0 < report.recompute <= report.after


class Probed(nn.Module):
    """Looks at its activation, and drops what it has seen."""

    def __init__(self, function):
        super().__init__()
        self.function, self.linear, self.probe = function, nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x):
        y = self.function(self.linear(x))
        self.seen = self.probe(y).detach()
        return torch.cat([y, x], 1)


class Bounded(nn.Module):
    """The same activation of a weight and of what the layer computes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return F.relu6(F.linear(x, F.relu6(self.weight)) + x).cos()


@pytest.mark.parametrize(
    ("model", "rows", "is_converted"),
    [(Probed(F.relu), 32, True), (Probed(F.silu).bfloat16(), 32, False), (Bounded(), 32, True), (Bounded(), 1, False)],
)
def test_what_is_still_held_after_the_forward_pass_counts(model, rows, is_converted):
    x = torch.randn(rows, 64, dtype=next(model.parameters()).dtype)

    def held():
        with Plain() as plain:
            output = model(x)
        size = plain.bytes(model)
        del output
        return size

    before = held()
    report = memory_report(model, x)
    with nullcontext() if is_converted else pytest.warns(UserWarning, match="nothing to convert"):
        activations_cuda.convert(model, x)
    assert (report.before, report.after) == (before, held())
    assert (report.after < before) == is_converted


class Calls(nn.Module):
    """Calls an activation in its own way, between two layers."""

    def __init__(self, call):
        super().__init__()
        self.before, self.after, self.call = nn.Linear(64, 64), nn.Linear(64, 64), call

    def forward(self, x):
        return self.after(self.call(self.before(x)))


def within_inference_mode(x):
    with torch.inference_mode():
        F.silu(x.detach())
    return F.relu6(x) * 2


def of_columns(function):
    def call(x):
        function(x[:, :32], inplace=True)
        return x

    return call


@pytest.mark.parametrize(
    ("call", "converts"),
    [
        (within_inference_mode, True),
        (of_columns(F.silu), False),
        (of_columns(F.mish), False),
        (lambda x: torch.ops.fastact.relu6(x) * 2, None),
        (lambda x: torch.ops.fastact.hardsigmoid(x, 0.2, 0.5) * 2, None),
        (lambda x: torch.ops.fastact.relu6_(x) * 2, None),
    ],
)
def test_however_it_is_called(call, converts):
    model, x = Calls(call).bfloat16(), torch.randn(512, 64, dtype=torch.bfloat16)
    report = memory_report(model, x)
    is_ours = converts is None
    assert measure(model, x) == (report.after if is_ours else report.before)
    with nullcontext() if converts or is_ours else pytest.warns(UserWarning, match="nothing to convert"):
        activations_cuda.convert(model, x)
    assert bool(activations_cuda.converted(model)) == bool(converts)
    assert measure(model, x) == report.after <= report.before


class Permuted(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("act", [nn.SiLU, nn.Hardswish, nn.ReLU6, nn.ReLU])
def test_report_of_the_scope_in_place_on_a_view(act):
    """What is written to a view has no recipe."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), Permuted(16), act(inplace=True), nn.Conv2d(16, 16, 3))
    x = torch.randn(4, 3, 16, 16)
    report = memory_report(model, x, recompute=True)
    assert report.recompute == kept_in_scope(model, x)


def test_a_nested_tensor_is_surveyed():
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], requires_grad=True)
    assert memory_report(nn.Sequential(nn.SiLU()), nested).before == 20 * 4


def test_report_of_the_scope_where_the_model_differentiates():
    class Penalized(nn.Sequential):
        def forward(self, x):
            y = super().forward(x)
            (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y.sum() + grad.square().sum()

    forget_choices()
    for norm in nn.LayerNorm(64), nn.BatchNorm1d(64), nn.GroupNorm(4, 64):
        model, x = Penalized(nn.Linear(64, 64), norm, nn.SiLU(), nn.Linear(64, 64)), torch.randn(64, 64, requires_grad=True)
        report = memory_report(model, x, recompute=True)
        assert report.recompute == kept_in_scope(model, x) > 0
