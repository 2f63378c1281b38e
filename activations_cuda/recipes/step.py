"""What a rule sees of an op: its node in autograd's graph, and values for its operands."""

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from activations_cuda.recipes import values
from activations_cuda.recipes.values import Underivable, Value

LEAF = "torch::autograd::AccumulateGrad"


class Finder(Protocol):
    """What a step asks for values: the scope's hook."""

    def find(self, node: Node, number: int, depth: int) -> Value: ...
    def keep(self, tensor: Tensor, node: Node, number: int) -> Value: ...
    def constant(self, tensor: Tensor) -> Value | float: ...
    def norm(self, weight: Any) -> Any: ...


class Step:
    """Output `number` of `node`, and the tensor itself if it is at hand.

    Attributes:
        is_assumed: set by a rule that assumes an operand; its recipe is verified at each use.
    """

    __slots__ = ("_finder", "_meta", "depth", "is_assumed", "node", "number", "tensor")

    def __init__(self, finder: Finder, node: Node, number: int, tensor: Tensor | None, depth: int) -> None:
        self._finder, self.node, self.number, self.tensor, self.depth = finder, node, number, tensor, depth
        self.is_assumed = False
        self._meta: Any = None

    @property
    def meta(self) -> Any:
        """Shape, dtype and device of the output."""
        if self._meta is None:
            self._meta = self.node._input_metadata[self.number]  # type: ignore[attr-defined]
        return self._meta

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.meta.shape)

    def operand(self, i: int, name: str | None = None) -> Any:
        """The value of operand i, found by its edge or as what the node saved under a name: a value, a number or None."""
        node, number = self.node.next_functions[i]
        if node is not None:
            return self._finder.find(node, number, self.depth + 1)
        if name is None:
            raise Underivable
        return self.saved(name)

    def saved(self, name: str) -> Any:
        """The value, number or None behind what the node saved under a name."""
        value, tensor = peek(lambda: getattr(self.node, "_saved_" + name))
        if value is None and tensor is not None:
            # A number in an expression, as 2 in x * 2, is a tensor that hooks don't see.
            if tensor.dim() == 0 and tensor.dtype in (torch.float64, torch.int64, torch.bool) and tensor.device.type == "cpu":
                return tensor.item()
            raise Underivable  # saved by other hooks, or before the scope
        if value is not None and not (isinstance(value, Value) and value.is_current()):
            raise Underivable
        return value

    def arguments(self, *names: str) -> tuple[Any, ...]:
        return tuple(_signed(getattr(self.node, "_saved_" + name)) for name in names)

    def constant(self, read: Callable[..., Tensor], *operands: Value) -> Value | float:
        """A number that the node doesn't save, read from the tensor itself."""
        if self.tensor is None:
            raise Underivable
        with values.computing():
            return self._finder.constant(read(*(operand.tensor() for operand in operands), self.tensor))

    def keep(self, tensor: Tensor, node: Node, number: int) -> Value:
        """Keep this tensor for an output that nobody has saved."""
        return self._finder.keep(tensor, node, number)

    def norm(self, weight: Any) -> Any:
        """The module whose weight this value is, if the scope was given its model."""
        return self._finder.norm(weight)


def _signed(argument):
    """Nodes hand out negative dimensions as unsigned numbers."""
    if type(argument) is int and argument >= 1 << 63:
        return argument - (1 << 64)
    return tuple(map(_signed, argument)) if isinstance(argument, (tuple, list)) else argument


class _Peeking(threading.local):
    value = None
    is_on = False


_peeking = _Peeking()


def peek(read: Callable[[], Any]) -> tuple[Any, Any]:
    """What stands for a saved tensor that `read` unpacks, instead of the tensor; and what `read` returned."""
    _peeking.value, _peeking.is_on = None, True
    try:
        result = read()
    finally:
        _peeking.is_on = False
    value, _peeking.value = _peeking.value, None
    return value, result


def unpack(value: Any) -> Tensor:
    """Autograd's unpack hook: the tensor again, or within :func:`peek` anything."""
    if _peeking.is_on:
        _peeking.value = value
        return _anything
    return values.unpack(value)


_anything = torch.empty(0)
