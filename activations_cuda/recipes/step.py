"""What a rule sees of an op: its node in autograd's graph, and values for its operands.

A value (``_C.recipes.Value``) stands for a saved tensor: the tensor itself, kept, or a recipe, which computes it from others.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from activations_cuda import _C

if TYPE_CHECKING:
    from torch.autograd.graph import Node

SHAPE, DTYPE, OUTPUT_NR = "shape of the output", "dtype of the output", "index of the output"
NUMBER = "tensor or number"


class Underivable(Exception):
    """No way is known from kept values to this one."""


class NothingYet(Exception):
    """The hooks around the scope can't give a tensor back before the backward pass."""


Result = tuple[Any, tuple[Any, ...], tuple[Any, ...]]  # what a rule gives: formula, operands, arguments


class OpRule:
    """A rule that is data: a formula, and what of the node are its operands and arguments.

    Args:
        formula: what computes the output.
        operands: of the op, by the names under which the node saves them (None: it doesn't, and the graph must tell; NUMBER:
            nor a number in its place, which was noted when a sum was called); or None for all of an op that joins any number of
            them along a dimension, its first argument.
        arguments: names of what else it is given, under which the node saves it; also SHAPE, DTYPE and OUTPUT_NR. Without the
            last it is the rule of the first output alone: others are mostly statistics or indices.
        saved: names of other tensors that the node saved, which are operands of the formula too.
        convert: what makes the formula's arguments of the node's, or None if there is no recipe.
        when: the name of what must be true.
        contiguous: names of saved tensors that must be contiguous on the CPU, where the op rounds otherwise if they aren't.
        otherwise: a rule for where ``when`` is false, an operand isn't known, or no formula fits.
        behind: names of the nodes that must be behind this one, each the first behind the one before, for ``otherwise``.
    """

    __slots__ = ("arguments", "behind", "contiguous", "convert", "formula", "operands", "otherwise", "saved", "when")

    def __init__(
        self,
        formula: Any,
        operands: tuple[str | None, ...] | None,
        arguments: tuple[str, ...] = (),
        saved: tuple[str, ...] = (),
        convert: Callable[..., tuple[Any, ...] | None] | None = None,
        when: str | None = None,
        contiguous: tuple[str, ...] = (),
        otherwise: Callable[["Step"], Result] | None = None,
        behind: tuple[str, ...] = (),
    ) -> None:
        self.formula, self.convert, self.otherwise, self.behind = formula, convert, otherwise, behind
        self.operands = None if operands is None else tuple(map(_as_packed, operands))
        self.saved = tuple(map(_as_packed, saved))
        self.contiguous = tuple(map(_as_packed, contiguous))
        self.arguments = tuple(name if name in (SHAPE, DTYPE, OUTPUT_NR) else "_saved_" + name for name in arguments)
        self.when = when and "_saved_" + when


def _as_packed(name):
    """The attribute that is a saved tensor as hooks have packed it."""
    return name if name in (None, NUMBER) else "_raw_saved_" + name


class Step:
    """Output `output_nr` of `node`, and the tensor itself if it is at hand."""

    __slots__ = ("_hook", "depth", "node", "output_nr", "tensor")

    def __init__(self, hook: Any, node: "Node", output_nr: int, tensor: Tensor | None, depth: int) -> None:
        self._hook, self.node, self.output_nr, self.tensor, self.depth = hook, node, output_nr, tensor, depth

    def operand(self, i: int, name: str | None = None) -> Any:
        """The value of operand i, found by its edge or as what the node saved under a name: a value, a number or None.

        Raises:
            Underivable: neither leads to it, as where it needs no gradient and has no name.
        """
        return _C.recipes.operand(self._hook, self.node, i, _as_packed(name), self.depth)

    def saved(self, name: str) -> Any:
        """The value, number or None behind what the node saved under a name, or a tuple of them."""
        return _C.recipes.saved(self.node, _as_packed(name))

    def eps(self) -> Any:
        """The eps that a function of torch.nn.functional gave a norm, where its node doesn't save it.

        Raises:
            Underivable: another function called the norm's op.
        """
        return _C.recipes.eps_of_call(self.node)

    def statistics(self, name: str) -> Any:
        """The running statistics that the node saved under a name, as they were."""
        return _C.recipes.statistics_of_call(self.node, _as_packed(name))

    def bias(self, i: int) -> Any:
        """A norm's bias, its operand i, which the node doesn't save: a value or None."""
        has_edge = self.node.next_functions[i][0] is not None
        return self.operand(i) if has_edge else _C.recipes.bias_of_call(self.node)

    def computed(self, function: Callable[..., Tensor], value: Any, *arguments: Any) -> Any:
        """A small tensor that follows from a value, computed now and kept."""
        with _C.recipes.Computing():
            return _C.recipes.keep(function(value.tensor(), *arguments), None)

    def arguments(self, *names: str) -> tuple[Any, ...]:
        return tuple(_C.recipes.argument(self.node, "_saved_" + name) for name in names)

    def constant(self, read: Callable[..., Tensor], *operands: Any) -> Any:
        """A number that the node doesn't save, read from the tensor itself without waiting for the device."""
        if self.tensor is None:
            raise Underivable
        with _C.recipes.Computing():
            number = read(*(operand.tensor() for operand in operands), self.tensor)
        is_at_hand = number.device.type == "cpu" and type(number) is Tensor
        return number.item() if is_at_hand else _C.recipes.keep(number, self._hook.outer)

    def part(self, read: Callable[[Tensor], Tensor]) -> Any:
        """A smaller tensor, read from the tensor itself, which is kept in its place."""
        if self.tensor is None:
            raise Underivable
        with _C.recipes.Computing():
            return _C.recipes.keep(read(self.tensor), self._hook.outer)

    def downcast(self, value: Any, dtype: torch.dtype) -> None:
        """Keep integers that nobody but the node has in fewer bytes, which hold them all.

        What the hooks around the scope have been given stays theirs.
        """
        _C.recipes.downcast(self._hook, self.node, value, dtype)
