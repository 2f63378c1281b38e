"""Distributed, on PyTorch's own engine: plain DTensors and models in parallel compute what a single process computes."""

from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import activations_cuda
from activations_cuda import _C
from activations_cuda.recipes.verification import forget_choices
from family import A_FEW, FAMILY, SMOOTH, sample

GROUPS = [("cpu", 2), ("cpu", 4), pytest.param(("cuda", 2), marks=pytest.mark.cuda(gpus=2))]


def one_thread_gloo(store, rank, ranks, timeout):
    """Gloo's usual two threads race: both assign the name of the collective that they end to one string of the group
    (ProcessGroupGloo::runLoop), at times to one that the other has just freed."""
    options = dist.ProcessGroupGloo._Options()
    options._threads = 1
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(store, rank, ranks, options)


dist.Backend.register_backend("one-thread-gloo", one_thread_gloo, devices=["cpu"])


def start(rank, cases, device, ranks, rendezvous):
    """What each process runs: all cases, so that starting it is paid for once, and in step with the others when one fails."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "one-thread-gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    failures = []
    for name, case in cases(device, ranks):
        try:
            case()
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {error}")
    dist.destroy_process_group()
    assert not failures, f"{len(failures)} cases failed:\n" + "\n".join(failures)


def group_name(group):
    return "{1} {0}".format(*group)


@pytest.fixture(params=GROUPS, ids=group_name)
def run(request, tmp_path):
    """Runs cases(device, ranks), which yields names and functions, on every rank."""
    device, ranks = request.param

    def run(cases):
        torch.multiprocessing.spawn(start, (cases, device, ranks, tmp_path / "rendezvous"), nprocs=ranks)

    return run


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)
assert_close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-14)  # float64, summed in another order


def distribute(x, mesh, placements):
    """`x` as a DTensor. Where that is partial, two ranks have 2x and -x: no op does without the sum, which never rounds."""
    local = distribute_tensor(x, mesh, [Replicate() if p.is_partial() else p for p in placements]).to_local()
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            local = local * (2, -1, 0, 0)[mesh.get_local_rank(dim)]
    return DTensor.from_local(local, mesh, placements, shape=x.shape, stride=x.stride())


def check_dtensor(row, mesh, placements, inplace=False):
    """The value from one placement of the input, and the gradient from every placement of the output's gradient."""
    shape = 5, 3  # on four ranks no shards are of one size, and some are empty
    x = sample(row, 15, torch.float64, mesh.device_type).clamp(-9, 9).nan_to_num(0.1).view(shape)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(mesh.device_type)
    leaf = distribute(x, mesh, placements).requires_grad_()
    y = row.inplace(leaf * 1, *row.parameters) if inplace else row(leaf)
    assert_equal(whole(y), row.reference(x))
    if not inplace:
        with suppress(NotImplementedError):  # what torch 2.11 can't shard
            assert y.placements == row.reference(leaf.detach()).placements
    for grad_placements in placements_on(mesh):
        (gradient,) = torch.autograd.grad(y, leaf, distribute(grad, mesh, grad_placements), retain_graph=True)
        expected = row.scaled(grad, x)
        assert_equal(whole(gradient), expected, msg=lambda text, p=grad_placements: f"gradient {p}: {text}")


def check_smooth_dtensor(row, mesh, placements, inplace=False):
    """As PyTorch's op does it: the value, the gradient and where they are placed."""
    x = (3 * torch.randn(5, 3, generator=torch.Generator().manual_seed(0))).bfloat16().to(mesh.device_type)
    leaf = distribute_tensor(x, mesh, placements).requires_grad_()
    grad = distribute_tensor(x.flip(0), mesh, placements)

    def step(function):
        y = function(leaf * 1)
        return y, torch.autograd.grad(y, leaf, grad)[0]

    ours, pytorchs = (row.inplace, row.reference_inplace) if inplace else (row, row.reference)
    try:
        results = step(pytorchs)
    except RuntimeError as error:  # what this torch can't shard
        with pytest.raises(type(error)):
            step(ours)
        return
    for actual, expected in zip(step(ours), results, strict=True):
        assert actual.placements == expected.placements
        assert_equal(whole(actual), whole(expected))


def placements_on(mesh):
    return product([Shard(0), Shard(1), Replicate(), Partial()], repeat=mesh.ndim)


def dtensors(device, ranks):
    meshes = [(init_device_mesh(device, (ranks,)), FAMILY)]
    if ranks == 4:
        meshes.append((init_device_mesh(device, (2, 2)), A_FEW))
    for mesh, rows in meshes:
        for row, placements in product(rows, placements_on(mesh)):
            yield f"{row}, {placements}", partial(check_dtensor, row, mesh, placements)
            if not any(p.is_partial() for p in placements):  # PyTorch's in-place ops refuse those
                yield f"{row} in place, {placements}", partial(check_dtensor, row, mesh, placements, inplace=True)
        for row, placements, inplace in product(SMOOTH, placements_on(mesh), (False, True)):
            if not any(p.is_partial() for p in placements):
                case = partial(check_smooth_dtensor, row, mesh, placements, inplace)
                yield f"{row}{' in place' * inplace}, {placements}", case


@pytest.mark.slow
def test_dtensor(run):
    run(dtensors)


class Clip(nn.Module):
    """A module of a user's, whose code calls a function."""

    def forward(self, x):
        return nn.functional.hardtanh(x, -0.1, 0.1)


def convert(model):
    model = activations_cuda.convert(model, example_inputs=batch(next(model.parameters()).device))
    assert activations_cuda.converted(model) == {"Hardsigmoid": 1, "Hardtanh": 1, "ReLU6": 1, "Clip": 1}
    return model


def create():
    """Activations behind a layer that is split by its outputs, behind a norm and behind a layer whose outputs are sums."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.Hardsigmoid(),
        nn.Linear(16, 8),
        nn.LayerNorm(8),
        nn.Hardtanh(),
        nn.Linear(8, 16),
        nn.ReLU6(),
        nn.Linear(16, 8),
        Clip(),
        nn.Linear(8, 4),
    ).double()


def create_smooth():
    torch.manual_seed(0)
    sizes = (8, 16), (16, 8), (8, 16), (16, 8)
    activations = nn.GELU(), nn.SiLU(), nn.Hardswish(), nn.Mish()
    layers = [layer for size, act in zip(sizes, activations, strict=True) for layer in (nn.Linear(*size), act)]
    return nn.Sequential(*layers, nn.Linear(8, 4)).bfloat16()


def tensor_parallel_smooth(model, mesh):
    plan = {str(i): (RowwiseParallel if i % 4 else ColwiseParallel)() for i in range(0, 8, 2)}
    return parallelize_module(model, mesh, plan)


def data_parallel(model, mesh):
    return DistributedDataParallel(model)


def fully_sharded(model, mesh):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model, mesh, local=True):
    """The activations see plain tensors where `local`, else DTensors: sharded by features, by the sequence, and replicated."""
    plan = {
        "0": ColwiseParallel(use_local_output=local),
        "2": RowwiseParallel(output_layouts=Shard(1), use_local_output=local),
        "3": SequenceParallel(use_local_output=local),
        "5": ColwiseParallel(input_layouts=Shard(1), use_local_output=local),
        "7": RowwiseParallel(use_local_output=local),
        "9": ColwiseParallel(output_layouts=Replicate(), use_local_output=local),
    }
    return parallelize_module(model, mesh, plan)


def in_both_ways(model, mesh, local=True):
    """Tensor parallel along one dimension of the mesh, fully sharded along the other."""
    return fully_sharded(tensor_parallel(model, mesh["model"], local), mesh["data"])


def batch(device):
    return 4 * torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)


def gradients(model, batch):
    whole(model(batch)).square().mean().backward()
    return [whole(weight.grad) for weight in model.parameters()]


def check_model(pytorchs, ours, mesh, parts=1, part=0):
    """Converted, a parallel model has the gradients that PyTorch's activations give, and up to rounding a single process's."""
    device = mesh.device_type
    mine = batch(device).chunk(parts)[part]
    actual = gradients(ours(convert(create().to(device)), mesh), mine)
    assert_equal(actual, gradients(pytorchs(create().to(device), mesh), mine))
    assert_close(actual, gradients(create().to(device), batch(device)))


def check_smooth_model(parallel, mesh, parts=1, part=0):
    device = mesh.device_type
    mine = batch(device).chunk(parts)[part].bfloat16()
    model = activations_cuda.convert(create_smooth().to(device), example_inputs=mine)
    assert activations_cuda.converted(model) == {"GELU": 1, "SiLU": 1, "Hardswish": 1, "Mish": 1}
    assert_equal(gradients(parallel(model, mesh), mine), gradients(parallel(create_smooth().to(device), mesh), mine))


def models(device, ranks):
    line = init_device_mesh(device, (ranks,))
    split = {"mesh": line, "parts": ranks, "part": line.get_local_rank()}
    yield "DDP", partial(check_model, data_parallel, data_parallel, **split)
    yield "FSDP2", partial(check_model, fully_sharded, fully_sharded, **split)
    yield "smooth, DDP", partial(check_smooth_model, data_parallel, **split)
    yield "smooth, FSDP2", partial(check_smooth_model, fully_sharded, **split)
    yield "smooth, tensor parallel", partial(check_smooth_model, tensor_parallel_smooth, line)
    yield "tensor parallel", partial(check_model, tensor_parallel, tensor_parallel, line)
    # PyTorch's hardtanh and hardsigmoid have no derivative on DTensors.
    yield "tensor parallel, DTensors", partial(check_model, tensor_parallel, partial(tensor_parallel, local=False), line)
    if ranks == 4:
        square = init_device_mesh(device, (2, 2), mesh_dim_names=("data", "model"))
        split = {"mesh": square, "parts": 2, "part": square.get_local_rank("data")}
        yield "in both ways", partial(check_model, in_both_ways, in_both_ways, **split)
        yield "in both ways, DTensors", partial(check_model, in_both_ways, partial(in_both_ways, local=False), **split)


def test_model(run):
    run(models)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Residual(nn.Module):
    """Blocks of a transformer's kind; one of them is called where its parameters aren't used, if asked for."""

    def __init__(self, unused=False):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.blocks = nn.Linear(8, 16), nn.ModuleList(Block(16) for _ in range(3))
        self.norm, self.head, self.unused = nn.LayerNorm(16), nn.Linear(16, 4), nn.Linear(4, 4) if unused else None

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(parallel, mesh, recomputes, dtype=None, unused=False, rank=0):
    """The losses and gradients of three steps, and what autograd saved in bytes in the last."""
    device = mesh.device_type
    model = Residual(unused).to(device)
    if recomputes == "convert":
        activations_cuda.convert(model, recompute=True)
    model = parallel(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)  # of DTensors and plain ones alike
    results = []
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(10 * step + rank)).to(device)
        scope = activations_cuda.recompute(check=True) if recomputes == "scope" else nullcontext()
        with scope, torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(x).float().square().mean()
        loss.backward()
        results += [loss.detach(), *(whole(p.grad) for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return results


def check_recompute(parallel, mesh, has_recipes=True, **options):
    expected = train(parallel, mesh, None, rank=mesh.get_local_rank(), **options)
    for recomputes in "scope", "convert":
        forget_choices()
        found = train(parallel, mesh, recomputes, rank=mesh.get_local_rank(), **options)
        assert_equal(found, expected)
        assert any(formula is not None for formula in _C.recipes.chosen().values()) or not has_recipes


def ddp(hook=None, **options):
    def parallel(model, mesh):
        model = DistributedDataParallel(model, **options)
        if hook is not None:
            model.register_comm_hook(None, hook)
        return model

    return parallel


def fsdp(units, checkpointed=False, **options):
    """`units`: the classes of the modules that are sharded by themselves."""

    def parallel(model, mesh):
        if checkpointed:
            for block in model.blocks[::2]:
                apply_activation_checkpointing(model, check_fn=lambda module, block=block: module is block)
        for module in list(model.modules()):
            if isinstance(module, units):
                fully_shard(module, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    return parallel


def fsdp1(**options):
    def parallel(model, mesh):
        units = ModuleWrapPolicy({Block})
        return FullyShardedDataParallel(model, auto_wrap_policy=units, device_id=mesh.device_type, **options)

    return parallel


def check_fsdp1(mesh, **options):
    """In the scope: what reads a parameter is saved as ever. (convert raises an error.)"""
    rank = mesh.get_local_rank()
    expected, found = (train(fsdp1(**options), mesh, how, rank=rank) for how in (None, "scope"))
    assert_equal(found, expected)


class Stage(nn.Module):
    """One of two, each on a rank of its own."""

    def __init__(self, index):
        super().__init__()
        model = Residual()
        first = nn.Sequential(model.stem, model.blocks[0])
        self.layers = (first, nn.Sequential(*model.blocks[1:], model.norm, model.head))[index]

    def forward(self, x):
        return self.layers(x)


def check_pipeline(mesh):
    rank, device = mesh.get_local_rank(), torch.device(mesh.device_type, mesh.get_local_rank())
    x = torch.randn(8, 4, 8, generator=torch.Generator().manual_seed(0)).to(device)

    def gradients(recomputes):
        stage = Stage(rank).to(device)
        if recomputes:
            activations_cuda.convert(stage, recompute=True)
        schedule = ScheduleGPipe(PipelineStage(stage, rank, 2, device), n_microbatches=2, loss_fn=nn.functional.mse_loss)
        torch.manual_seed(0)
        losses = []
        schedule.step(x) if rank == 0 else schedule.step(target=torch.zeros(8, 4, 4, device=device), losses=losses)
        return [*losses, *(parameter.grad for parameter in stage.parameters())]

    assert_equal(gradients(True), gradients(False))


class Norm(nn.Module):
    """Whose output is read within it and by the next module."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        y = self.norm(x)
        return y, self.up(y)


class Down(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down = nn.Linear(width, width)

    def forward(self, pair):
        return self.down(pair[0]) + pair[1]


class Scale(nn.Module):
    """By a parameter, frozen or not, that is read through a view."""

    def __init__(self, frozen):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(8), requires_grad=not frozen)

    def forward(self, x):
        return torch.relu(x) * self.gamma.view(1, -1, 1, 1)


def pairs():
    return nn.Sequential(nn.Linear(8, 16), Norm(16), Down(16), Norm(16), Down(16), nn.Linear(16, 4))


def scales(frozen):
    return nn.Sequential(nn.Conv2d(3, 8, 3), Scale(frozen), nn.Conv2d(8, 8, 3), Scale(frozen), nn.PReLU(8), nn.Conv2d(8, 4, 3))


def with_group_norm():
    layers = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 3)
    return nn.Sequential(nn.Sequential(*layers), nn.Conv2d(4, 4, 1))


def units(model, mesh):
    """Each layer a unit."""
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def flat_units(use_orig_params):
    def parallel(model, mesh):
        policy, options = ModuleWrapPolicy({Norm, Down}), {"backward_prefetch": None, "use_orig_params": use_orig_params}
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=mesh.device_type, **options)

    return parallel


def check_freed_parameters(create, parallel, shape, mesh, twice=False):
    """Recipes read no parameter that is freed, nor a copy of another step: `twice`, an older graph is alive meanwhile."""

    def losses(scope):
        torch.manual_seed(0)
        model = parallel(create().to(mesh.device_type), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
        result = []
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + mesh.get_local_rank())
            x = torch.randn(shape, generator=generator).to(mesh.device_type)
            with scope():
                loss = model(x).square().mean()
                other = model(x).square().mean() if twice else None
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            result.append(loss.item())
        del other
        return result

    assert losses(activations_cuda.recompute) == losses(nullcontext)


def split_blocks(model, mesh):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def split_sequence(model, mesh):
    """Norms and sums on parts of the sequence, linear layers on parts of the features."""
    parts = Shard(0)
    norm, wide = SequenceParallel(sequence_dim=0, use_local_output=True), ColwiseParallel(input_layouts=parts)
    for block in model.blocks:
        parallelize_module(block, mesh, {"norm": norm, "up": wide, "down": RowwiseParallel(output_layouts=parts)})
    head = ColwiseParallel(input_layouts=parts, output_layouts=Replicate())
    return parallelize_module(model, mesh, {"stem": ColwiseParallel(output_layouts=parts), "norm": norm, "head": head})


def recomputed(device, ranks):
    _C.recipes.set_smallest(0, 0)  # as in conftest.py
    mesh = init_device_mesh(device, (ranks,))
    for dtype in None, torch.bfloat16:
        yield f"DDP, {dtype}", partial(check_recompute, ddp(), mesh, dtype=dtype)
        yield f"FSDP2, {dtype}", partial(check_recompute, fsdp(Block), mesh, dtype=dtype)
        # A norm and what reads its output in different units, whose parameters are freed between the passes.
        yield f"FSDP2 of layers, {dtype}", partial(check_recompute, fsdp((nn.Linear, nn.LayerNorm)), mesh, dtype=dtype)
    yield "DDP, static graph", partial(check_recompute, ddp(static_graph=True), mesh)
    yield "DDP, unused parameters", partial(check_recompute, ddp(find_unused_parameters=True), mesh, unused=True)
    yield "DDP, views of buckets", partial(check_recompute, ddp(gradient_as_bucket_view=True), mesh)
    yield "DDP, hook", partial(check_recompute, ddp(hook=default_hooks.fp16_compress_hook), mesh)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    yield "FSDP2, mixed precision", partial(check_recompute, fsdp(Block, mp_policy=policy), mesh)
    yield "FSDP2 of layers, mixed precision", partial(check_recompute, fsdp((nn.Linear, nn.LayerNorm), mp_policy=policy), mesh)
    yield "FSDP2, not resharded", partial(check_recompute, fsdp(Block, reshard_after_forward=False), mesh)
    yield "FSDP2, checkpoint_wrapper", partial(check_recompute, fsdp(Block, checkpointed=True), mesh)
    yield "tensor parallel", partial(check_recompute, split_blocks, mesh)
    # All that its layers save are DTensors.
    yield "sequence parallel", partial(check_recompute, split_sequence, mesh, has_recipes=False)
    for use_orig_params in False, True:
        yield f"FSDP1, {use_orig_params=}", partial(check_fsdp1, mesh, use_orig_params=use_orig_params)
        yield (
            f"FSDP1, a norm in another unit, {use_orig_params=}",
            partial(check_freed_parameters, pairs, flat_units(use_orig_params), (8, 8), mesh),
        )
    for frozen in False, True:
        create = partial(scales, frozen)
        yield f"FSDP2, views, {frozen=}", partial(check_freed_parameters, create, units, (4, 3, 10, 10), mesh)
    yield "FSDP2, an older graph", partial(check_freed_parameters, with_group_norm, units, (4, 3, 10, 10), mesh, twice=True)
    if ranks == 2:
        yield "pipeline", partial(check_pipeline, mesh)
    if device == "cuda":
        yield "FSDP2, offload", partial(check_recompute, fsdp(Block, offload_policy=CPUOffloadPolicy()), mesh)


@pytest.mark.parametrize("run", [GROUPS[0], GROUPS[-1]], indirect=True, ids=group_name)
def test_recompute(run):
    run(recomputed)


def check_compiled(mesh):
    device = mesh.device_type
    model = create().to(device)
    model[8] = nn.Hardtanh(-0.1, 0.1)  # compiled, Clip calls PyTorch's function, which has no derivative on DTensors
    model = tensor_parallel(activations_cuda.convert(model), mesh, local=False)
    actual = gradients(torch.compile(model, fullgraph=True), batch(device))
    # Compiled, hardsigmoid divides by 6; eager on CUDA it multiplies by a sixth rounded to float.
    torch.testing.assert_close(actual, gradients(create().to(device), batch(device)), rtol=1e-5, atol=1e-8)


def compiled(device, ranks):
    yield "tensor parallel, DTensors", partial(check_compiled, init_device_mesh(device, (ranks,)))


@pytest.mark.parametrize("run", [GROUPS[0], GROUPS[-1]], indirect=True, ids=group_name)
def test_compiled_model(run):
    run(compiled)
