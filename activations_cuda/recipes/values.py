"""What stands for a saved tensor: the tensor itself, kept, or a recipe, which computes it from other values.

A value is owned by whoever saved it, that is by the result of autograd's hook, and by the recipes that need it. So nothing
lives longer than PyTorch would keep it, but for what a recipe reads. A value doesn't refer to a node of the graph: a cycle
would pass through C++, where the garbage collector doesn't look.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable

MAX_DEPTH = 32  # of a recipe of recipes, which are computed by recursion

_lock = threading.RLock()  # for what is remembered: unpack hooks run in the engine's threads


class Underivable(Exception):
    """No way is known from kept values to this one."""


class Value:
    """Stands for a tensor.

    Attributes:
        version: the tensor's when it was saved.
        readers: how many need it: hooks' results and recipes.
        remembered: the computed tensor, and the backward pass and stream that may use it again.
    """

    __slots__ = ("__weakref__", "_signature", "readers", "remembered", "version")

    shape: torch.Size
    stride: tuple[int, ...]
    configuration: tuple[Any, ...]  # all that formulas depend on but elements
    depth: int
    roots: tuple["Kept", ...]  # what it follows from in the end

    def __init__(self, version: int) -> None:
        self.version = version
        self.readers = 0
        self.remembered: tuple[Any, Tensor] | None = None
        self._signature: int | None = None

    def compute(self) -> Tensor:
        raise NotImplementedError

    def signature(self) -> int:
        """A number in the place of this value's configuration, for those of its readers."""
        if self._signature is None:
            self._signature = _signatures.setdefault(self.configuration, len(_signatures))
        return self._signature

    def stands_for(self, tensor: Tensor) -> bool:
        return (
            self.version == tensor._version
            and self.stride == tensor.stride()
            and self.shape == tensor.shape
            and self.is_current()
        )

    def is_current(self) -> bool:
        """Whether nothing that this value follows from has been written to."""
        return all(root.is_unwritten() for root in self.roots)

    def tensor(self) -> Tensor:
        """The tensor, computed once in a backward pass if it has several readers."""
        if self.readers < 2:
            return self.compute()
        where = _pass_and_stream(self.roots[0])
        if self.remembered is not None and self.remembered[0] == where:
            return self.remembered[1]
        result = self.compute()
        if where is not None:
            _remember(self, where, result)
        return result


PLAIN = {Tensor, nn.Parameter, getattr(nn, "Buffer", nn.Parameter)}  # what may stand for a tensor of a plain kind

_signatures: dict[tuple[Any, ...], int] = {}

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Kept(Value):
    """A tensor, or what the hooks around the scope made of it.

    A leaf that requires a gradient is held itself, as autograd does, since sharded training exchanges its data; any other
    tensor without its history, which would make a cycle.
    """

    __slots__ = ("_geometry", "held", "hooks", "source", "stream")
    depth = 0

    def __init__(self, tensor: Tensor, source: str = "", hooks: Hooks | None = None) -> None:
        super().__init__(tensor._version)
        self.source, self.hooks = source, hooks
        self.stream = _stream(tensor)
        if hooks is None:
            self.held = tensor if tensor.is_leaf and tensor.requires_grad else tensor.detach()
        else:
            self._geometry = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
            self.held = hooks[0](tensor)

    @property
    def configuration(self):
        if self.hooks:
            return self._geometry
        held = self.held
        # Where it begins decides whether kernels read it in vectors.
        return held.shape, held.stride(), held.dtype, held.device, held.storage_offset() % 16

    @property
    def shape(self):
        return self._geometry[0] if self.hooks else self.held.shape

    @property
    def stride(self):
        return self._geometry[1] if self.hooks else self.held.stride()

    @property
    def roots(self):
        return (self,)  # made when it is asked for: as an attribute it would be a cycle

    def is_unwritten(self):
        return self.hooks is not None or self.held._version == self.version

    def tensor(self):
        return super().tensor() if self.hooks else self.compute()

    def compute(self):
        if self.hooks is not None:
            return with_strides(self.hooks[1](self.held), self.stride)
        if not self.is_unwritten():
            raise written(self.held.type(), self.shape, self.source, self.held._version, self.version)
        if self.stream is not None and _stream(self.held) != self.stream:
            self.held.record_stream(torch.cuda.current_stream(self.held.device))
        return self.held


def written(kind: str, shape: torch.Size, source: str, found: int, expected: int) -> RuntimeError:
    """Autograd's error, which it doesn't raise where there are hooks."""
    what = f"which is output 0 of {source}" if source else "which is a leaf"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(shape)}], {what}, is at version {found}; expected version {expected} instead. "
        "(activations_cuda.recompute)"
    )


class Opaque:
    """A tensor of a kind that isn't looked into, kept as autograd does."""

    __slots__ = ("__weakref__", "held", "readers")

    def __init__(self, tensor: Tensor) -> None:
        self.held = tensor if tensor.is_leaf else tensor.detach()
        self.readers = 0

    def tensor(self) -> Tensor:
        return self.held


class Recipe(Value):
    """formula(*operands, *arguments), with the strides of the tensor that it stands for (None: any).

    `operands` are values, numbers or None. `source` names the op's node.
    """

    __slots__ = (
        *("arguments", "configuration", "counter", "depth", "formula", "operands", "roots", "shape", "source", "stride"),
        "max_writes",  # of the tensor's version, those that its ops may have made themselves, in place
    )

    def __init__(self, source, formula, operands, arguments, configuration, shape, stride, version=0) -> None:
        super().__init__(version)
        self.source, self.formula, self.operands, self.arguments = source, formula, operands, arguments
        self.configuration, self.shape, self.stride = configuration, shape, stride
        self.counter: Tensor | None = None
        self.max_writes: int
        values = [operand for operand in operands if isinstance(operand, Value)]
        self.roots = values[0].roots if len(values) == 1 else tuple({root: None for each in values for root in each.roots})
        self.depth = 1 + max(value.depth for value in values)
        if self.depth > MAX_DEPTH or len(self.roots) > 4 * MAX_DEPTH:
            raise Underivable
        # What somebody saved and nobody has written to since wasn't written to by this op.
        self.max_writes = max(
            each.max_writes + 1 if isinstance(each, Recipe) and each.counter is None else 0 for each in values
        )
        for value in values:
            value.readers += 1

    def replace(self, tensor: Tensor) -> None:
        """Stand for this tensor, to which nobody may write before it has been used, nor has since its op."""
        if tensor._version > self.max_writes:
            raise Underivable
        self.version = tensor._version
        self.counter = tensor.detach()
        self.counter.data = _nothing(tensor.device)  # shares the tensor's version, not its memory

    def check_unwritten(self) -> None:
        if self.counter is not None and self.counter._version != self.version:
            raise written(self.counter.type(), self.shape, self.source, self.counter._version, self.version)

    def compute(self):
        operands = [operand.tensor() if isinstance(operand, Value) else operand for operand in self.operands]
        result = self.formula(*operands, *self.arguments)
        return result if self.stride is None else with_strides(result, self.stride)


def _nothing(device, tensors={}):  # noqa: B006, one for each device
    if device not in tensors:
        tensors[device] = torch.empty(0, device=device)
    return tensors[device]


def bits_of(tensor: Tensor, hooks: Hooks | None) -> Recipe:
    """A bool tensor at 8 elements to the byte, in the order of its memory."""
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    bytes = F.pad(flat, (0, -len(flat) % 8)).view(-1, 8)
    packed = bytes.bitwise_left_shift(_places(tensor.device)).sum(1, dtype=torch.uint8)
    geometry = tensor.shape, tensor.stride()
    return Recipe(
        "bits",
        _unpack_bits,
        (Kept(packed, hooks=hooks),),
        geometry,
        ("bits", *geometry, tensor.device),
        *geometry,
        tensor._version,
    )


def _unpack_bits(packed, shape, stride):
    bits = packed.unsqueeze(1).bitwise_right_shift(_places(packed.device)).bitwise_and(1)
    return bits.view(torch.bool).view(-1).as_strided(shape, stride)


def _places(device):
    return torch.arange(8, dtype=torch.uint8, device=device)


def view_of(value: Value, view: Tensor, base: Tensor) -> Recipe:
    geometry = view.shape, view.stride(), view.storage_offset() - base.storage_offset()
    configuration = "view", value.signature(), *geometry
    return Recipe("view", _as_strided, (value,), geometry, configuration, *geometry[:2], view._version)


def _as_strided(base, shape, stride, offset):
    return base.as_strided(shape, stride, base.storage_offset() + offset)


def with_strides(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@contextmanager
def computing() -> Iterator[None]:
    """As an op's own forward runs: below autograd and autocast."""
    with torch.no_grad(), torch._C._DisableAutocast():
        yield


def _stream(tensor):
    # Fake tensors may be on a device that isn't there.
    return torch._C._cuda_getCurrentRawStream(tensor.device.index) if tensor.is_cuda and type(tensor) in PLAIN else None


def _pass_and_stream(root):
    """Where a computed tensor may be used again: in this backward pass, on this stream."""
    task = torch._C._current_graph_task_id()
    return (task, _stream(root.held) if isinstance(root.held, Tensor) else None) if task >= 0 else None


class _Pass(list):
    """Weak references to the values that remember their tensor until the end of a backward pass.

    Only the pass itself owns this, by a callback; so they forget at its end, even if it fails.
    """

    def end(self):
        with _lock:
            for value in filter(None, (reference() for reference in self)):
                value.remembered = None
            self.clear()

    __del__ = end


_passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()


def _remember(value, where, tensor):
    running = _passes.get(where[0])
    if running is None:
        running = _passes[where[0]] = _Pass()
        Variable._execution_engine.queue_callback(running.end)
    value.remembered = where, tensor
    running.append(weakref.ref(value))


def unpack(value: Value | Opaque) -> Tensor:
    """Autograd's unpack hook: the tensor again."""
    if isinstance(value, Recipe):
        value.check_unwritten()
    elif isinstance(value, Opaque) or (isinstance(value, Kept) and value.hooks is None):
        return value.tensor()
    with _lock, computing():
        return value.tensor()
