"""recompute() by one line where frameworks own the loop: the same losses and weights, to the bit."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import activations_cuda
from activations_cuda import _C
from activations_cuda.recipes.verification import forget_choices
from recomputing import assert_same

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def compare(create, train, convert=lambda model: activations_cuda.convert(model, recompute=True)):
    """train(model) returns losses: the same, and the same weights and buffers, unmodified and converted."""
    torch.manual_seed(0)
    plain = create()
    model = convert(copy.deepcopy(plain))
    forget_choices()
    torch.manual_seed(0)
    expected = train(plain)
    assert not _C.recipes.chosen()
    torch.manual_seed(0)
    losses = train(model)
    assert any(formula is not None for formula in _C.recipes.chosen().values())
    assert losses == expected and len(losses) > 1
    assert list(model.state_dict()) == list(plain.state_dict())
    for one, other in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert_same(one, other)
    return model


def transformer(name, **sizes):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "use_cache": False}
    if name != "GPT2":
        small["intermediate_size"] = 64
    return getattr(transformers, name + "LMHeadModel" if name == "GPT2" else name + "ForCausalLM")(
        getattr(transformers, name + "Config")(**small | sizes)
    )


class Tokens(torch.utils.data.Dataset):
    tokens = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def trainer(folder, device, **options):
    """A loop of transformers' Trainer."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def train(model):
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            max_steps=3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=device == "cpu",
            **options,
        )
        loop = transformers.Trainer(model=model, args=arguments, train_dataset=Tokens())
        loop.train()
        return [entry["loss"] for entry in loop.state.log_history if "loss" in entry]

    return train


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Gemma"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bf16": True, "gradient_accumulation_steps": 2},
        {"bf16": True, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"label_smoothing_factor": 0.1},  # for which it looks up the name of the class
    ],
    ids=["float32", "bf16", "checkpointed", "checkpointed, reentrant", "label smoothing"],
)
def test_trainer(name, options, tmp_path, device, deterministic):
    create = lambda: transformer(name, **({"head_dim": 8, "num_key_value_heads": 4} if name == "Gemma" else {}))  # noqa: E731
    compare(create, trainer(tmp_path, device, **options))


def test_trainer_that_checkpoints_some_layers(tmp_path, device, deterministic):
    def create():
        model = transformer("Llama", num_hidden_layers=4)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in model.model.layers[1::2]:
            layer.gradient_checkpointing = False
        return model

    compare(create, trainer(tmp_path, device, bf16=True))


def test_trainer_that_compiles(tmp_path, device):
    """Compiled, PyTorch decides what is saved, and the scope does nothing."""
    torch.manual_seed(0)
    plain = transformer("Llama")
    model = activations_cuda.convert(copy.deepcopy(plain), recompute=True)
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    assert trainer(tmp_path, device, **options)(model) == trainer(tmp_path, device, **options)(plain)


def test_peft(tmp_path, device, deterministic):
    """LoRA: the base's weights are frozen."""
    peft = pytest.importorskip("peft")
    pytest.importorskip("transformers")

    def create():
        model = transformer("Llama", num_hidden_layers=4, hidden_size=64, intermediate_size=176)
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=4))

    model = compare(create, trainer(tmp_path, device, bf16=True)).to(device)
    with torch.autocast(device, torch.bfloat16):
        tokens = torch.zeros(4, 64, dtype=torch.long, device=device)
        report = activations_cuda.memory_report(model, input_ids=tokens, recompute=True)
    assert report.recompute < 0.8 * report.before


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(inplace=True)),
            *(nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.ReLU6(inplace=True)),
            *(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8), nn.GELU(), nn.Dropout(0.2)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
        )

    def forward(self, x):
        return self.layers(x)


def batches(device="cpu"):
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(16, 3, 12, 12, generator=generator), torch.randint(4, (16,), generator=generator)
    return [*zip(images.to(device).split(4), labels.to(device).split(4), strict=True)]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision, device, deterministic):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)

    def train(model):
        accelerator = accelerate.Accelerator(cpu=device == "cpu", mixed_precision=precision, gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        loader = torch.utils.data.DataLoader([*zip(*map(torch.cat, zip(*batches(), strict=True)), strict=True)], 4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        accelerator.unwrap_model(model).cpu()
        return losses

    compare(Net, train)
    prepared = accelerate.Accelerator(cpu=device == "cpu", mixed_precision=precision)
    model = prepared.prepare(activations_cuda.convert(Net(), recompute=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        activations_cuda.revert(model)
    if precision == "bf16":
        prepared = accelerate.Accelerator(cpu=device == "cpu", mixed_precision=precision).prepare(Net())
        with pytest.raises(ValueError, match="convert it before"):  # or it would do nothing
            activations_cuda.convert(prepared, recompute=True)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_lightning(precision, device, tmp_path, deterministic):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, net):
            super().__init__()
            self.net, self.losses = net, []

        def training_step(self, batch, _):
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    class Callable(Module):
        def forward(self, x):
            return self.net(x)

    with pytest.raises(ValueError, match="got Module: convert the net that it calls"):
        activations_cuda.convert(Module(nn.Linear(1, 1)), recompute=True)
    with pytest.warns(UserWarning, match="only Callable's forward runs within the scope, which Lightning doesn't call"):
        activations_cuda.convert(Callable(nn.Linear(1, 1)), recompute=True)

    def train(net):
        module = Module(net)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        loop = lightning.Trainer(
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=1,
            max_epochs=1,
            precision=precision,
            default_root_dir=tmp_path,
            accumulate_grad_batches=2,
            **quiet,
        )
        loop.fit(module, torch.utils.data.DataLoader([*zip(*map(torch.cat, zip(*batches(), strict=True)), strict=True)], 4))
        net.cpu()
        return module.losses

    compare(Net, train)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric(precision, device, deterministic):
    lightning = pytest.importorskip("lightning")

    def train(net):
        fabric = lightning.Fabric(accelerator="gpu" if device == "cuda" else "cpu", devices=1, precision=precision)
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
        losses = []
        for images, labels in batches(device):
            loss = F.cross_entropy(model(images), labels)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        net.cpu()
        return losses

    compare(Net, train)


def diffusion(model, *arguments):
    """Training steps of a denoising model."""

    def train(net):
        net = net.to(model)
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            with torch.autocast(model, torch.bfloat16):
                noise = torch.randn(2, 4, 16, 16, device=model)
                loss = F.mse_loss(net(noise, torch.tensor([10, 20], device=model), *arguments).sample.float(), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    return train


@pytest.mark.parametrize("checkpointed", [False, True])
def test_unet_of_diffusers(checkpointed, device, deterministic):
    diffusers = pytest.importorskip("diffusers")

    def create():
        net = diffusers.UNet2DModel(
            sample_size=16,
            in_channels=4,
            out_channels=4,
            block_out_channels=(32, 64),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )
        if checkpointed:
            net.enable_gradient_checkpointing()
        return net.train()

    compare(create, diffusion(device))


def test_transformer_of_diffusers(device, deterministic):
    diffusers = pytest.importorskip("diffusers")

    def create():
        return diffusers.DiTTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            sample_size=16,
            num_embeds_ada_norm=1000,
        ).train()

    compare(create, diffusion(device, torch.tensor([1, 2], device=device)))


@pytest.mark.parametrize("compiled", [False, True])
def test_timm(compiled, device, deterministic):
    """Its training step: channels-last, autocast, an exponential moving average of the weights, clipped gradients."""
    timm = pytest.importorskip("timm")
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3, dispatch_clip_grad

    def train(model):
        model = model.to(device, memory_format=torch.channels_last)
        average = ModelEmaV3(model, decay=0.9)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        optimizer = create_optimizer_v2(model, "adamw", lr=1e-3)
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            images = torch.randn(4, 3, 64, 64, device=device).to(memory_format=torch.channels_last)
            with torch.autocast(device, torch.bfloat16):
                loss = F.cross_entropy(run(images), torch.arange(4, device=device))
            optimizer.zero_grad()
            loss.backward()
            dispatch_clip_grad(model.parameters(), 1.0)
            optimizer.step()
            average.update(model)
            losses.append(loss.item())
        model.load_state_dict(average.module.state_dict())
        return losses

    create = lambda: timm.create_model("efficientnet_b0", num_classes=4, drop_path_rate=0.2)  # noqa: E731
    if compiled:
        torch.manual_seed(0)
        plain = create()
        assert train(activations_cuda.convert(copy.deepcopy(plain), recompute=True)) == train(plain)
    else:
        compare(create, train)


def test_torchvision(device, deterministic):
    """Its reference for detection: the model returns losses."""
    torchvision = pytest.importorskip("torchvision")

    def train(model):
        model = model.to(device).train()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        losses = []
        for step in range(2):
            torch.manual_seed(step)
            images = [torch.rand(3, 64, 64, device=device) for _ in range(2)]
            boxes = torch.tensor([[4.0, 4, 40, 40], [10, 20, 50, 60]], device=device)
            targets = [{"boxes": boxes, "labels": torch.tensor([1, 2], device=device)} for _ in range(2)]
            loss = sum(model(images, targets).values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def create():
        detection = torchvision.models.detection
        return detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)

    compare(create, train)


class Convolution(nn.Module):
    def __init__(self, inputs, outputs, size=3):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False)
        self.bn, self.act = nn.BatchNorm2d(outputs), nn.SiLU(inplace=True)

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))

    def forward_fused(self, x):
        return self.act(self.conv(x))


class CrossStage(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first, self.last = Convolution(channels, channels, 1), Convolution(channels // 2 * 3, channels, 1)
        self.inner = nn.Sequential(Convolution(channels // 2, channels // 2), Convolution(channels // 2, channels // 2))

    def forward(self, x):
        parts = list(self.first(x).chunk(2, 1))
        parts.append(parts[-1] + self.inner(parts[-1]))
        return self.last(torch.cat(parts, 1))


def test_a_loop_as_for_yolo(device, deterministic, tmp_path):
    """Frozen first layers, scaled and accumulated gradients, an average that is saved whole in float16 and then fused."""

    def create():
        return nn.Sequential(Convolution(3, 16), CrossStage(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))

    def train(model):
        model = model.to(device, memory_format=torch.channels_last).train()
        average = copy.deepcopy(model).eval().requires_grad_(False)
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), 1e-2, momentum=0.9, nesterov=True)
        scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
        losses = []
        for step in range(4):
            torch.manual_seed(step)
            images = torch.randn(4, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
            with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
                loss = F.cross_entropy(model(images), torch.arange(4, device=device))
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                for one, other in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                    if one.dtype.is_floating_point:
                        one.mul_(0.9).add_(other.detach(), alpha=0.1)
            losses.append(loss.item())
        torch.save({"ema": copy.deepcopy(average).half()}, tmp_path / "last.pt")
        loaded = torch.load(tmp_path / "last.pt", weights_only=False)["ema"].float()
        for module in loaded.modules():
            if isinstance(module, Convolution):
                module.conv = torch.nn.utils.fuse_conv_bn_eval(module.conv, module.bn)
                del module.bn
                module.forward = module.forward_fused
        losses.append(loaded(images).sum().item())
        return losses

    compare(create, train)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
