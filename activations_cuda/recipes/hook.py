"""The hook that sees every tensor that autograd is about to save, and gives autograd a value in its place.

It is greedy: a tensor whose op has a rule, and whose operands have values, is let go; any other is kept, and is an operand of
what follows. From a node to its output's value leads a weak reference in the node's ``metadata``, a dict of Python's that lives
as long as the node itself: there is no registry by addresses, which are used again.
"""

import sys
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.weak import WeakIdKeyDictionary

from activations_cuda.recipes import verification
from activations_cuda.recipes.rules import OF_ALL_OUTPUTS, RULES
from activations_cuda.recipes.step import LEAF, Step
from activations_cuda.recipes.values import (
    MAX_DEPTH,
    PLAIN,
    Hooks,
    Kept,
    Opaque,
    Recipe,
    Underivable,
    Value,
    bits_of,
    computing,
    view_of,
)
from activations_cuda.recipes.verification import Candidates, Formula, is_identical, log, verify

_key = object()  # of this package's entries in a node's metadata, together with the output's number

# Bool tensors that no node has made: the version that was packed, and a weak reference to its bits.
_bools = WeakIdKeyDictionary()


class Hook:
    """What one scope has in autograd's stack of hooks.

    Args:
        model: whose norms' frozen weights and biases may be operands.
        check: whether every recipe is compared with its tensor.
        outer: the hooks around the scope, which get what is kept.
    """

    def __init__(self, model: nn.Module | None, check: bool, outer: Hooks | None) -> None:
        self.model, self.check, self.outer = model, check, outer
        self._norms: dict[int, nn.Module] | None = None
        self.mismatch: str | None = None
        # While a recipe is made: those that haven't been verified, and those of its operands that nobody has saved.
        self._untried: list[tuple[Recipe, Formula | Candidates]] = []
        self._between: dict[tuple[Node, int], Value] = {}

    def pack(self, tensor: Tensor) -> Value | Opaque:
        """Autograd's pack hook. Whatever goes wrong, the tensor is kept: an error here would leave a hole in the graph."""
        try:
            value = self._value(tensor) if self._is_plain(tensor) else self._opaque(tensor)
        except Exception:
            log.debug("recompute: kept a tensor of shape %s", list(tensor.shape), exc_info=True)
            value = self._opaque(tensor)
        value.readers += 1
        return value

    def _is_plain(self, tensor):
        return is_plain(tensor)

    def _opaque(self, tensor):
        return Opaque(tensor) if self.outer is None else Kept(tensor, hooks=self.outer)

    def _value(self, tensor):
        node = tensor.grad_fn
        if node is None:
            return self._mask(tensor) if tensor.dtype is torch.bool else Kept(tensor, hooks=self.outer)
        number, base = tensor.output_nr, tensor._base
        value = _found(node, number)
        if value is not None and value.stands_for(tensor):
            return value
        if base is not None and base.requires_grad and base.dtype is tensor.dtype:
            value = self._view(tensor, base)
        else:
            value = self._recipe(node, number, tensor)
        return self.keep(tensor, node, number) if value is None else _noted(value, node, number)

    def keep(self, tensor: Tensor, node: Node, number: int) -> Value:
        return _noted(Kept(tensor, node.name(), self.outer), node, number)

    def constant(self, tensor: Tensor) -> Value | float:
        """What stands for a number, without waiting for a device."""
        is_at_hand = tensor.device.type == "cpu" and type(tensor) is Tensor
        return tensor.item() if is_at_hand else Kept(tensor, hooks=self.outer)

    def _view(self, tensor, base):
        """A view, as its base's value and a geometry. None where the hooks outside would be given more than the view."""
        node, number = base.grad_fn, base.output_nr
        if node is None:
            value = Kept(base)
        else:
            value = _found(node, number)
            if value is None or not value.stands_for(base):
                value = self._recipe(node, number, base)
                if value is None:
                    if self.outer is not None:
                        return None
                    value = Kept(base, node.name())
                _noted(value, node, number)
        return view_of(value, tensor, base) if value.depth < MAX_DEPTH else None

    def _mask(self, tensor):
        """A bool tensor that no node has made. It may be saved many times."""
        base = tensor if tensor._base is None else tensor._base
        if base.dtype is not torch.bool or not 64 <= base.numel() == base.untyped_storage().nbytes():
            return Kept(tensor, hooks=self.outer)
        version, reference = _bools.get(base, (None, None))
        value = reference() if reference is not None and version == base._version else None
        if value is None:
            with computing():
                value = bits_of(base, self.outer)
            _bools[base] = base._version, weakref.ref(value)
        return value if base is tensor else view_of(value, tensor, base)

    def find(self, node: Node, number: int, depth: int) -> Value:
        """The value of an operand: somebody keeps it, it is a parameter, or it follows from such."""
        value = _found(node, number) or self._between.get((node, number))
        if value is None:
            if node.name() == LEAF:
                return _noted(Kept(node.variable), node, number)  # type: ignore[attr-defined]
            value = self._between[node, number] = self._derive(node, number, None, depth)
        elif not value.is_current():
            raise Underivable
        return value

    def norm(self, weight: Any) -> nn.Module | None:
        """The model's module that has this weight."""
        if self.model is None or not isinstance(weight, Kept) or weight.hooks is not None:
            return None
        if self._norms is None:
            modules = [each for each in self.model.modules() if isinstance(getattr(each, "weight", None), Tensor)]
            self._norms = {storage_of(each.weight): each for each in modules if hasattr(each, "eps")}  # type: ignore[arg-type]
        return self._norms.get(storage_of(weight.held))

    def _recipe(self, node, number, tensor):
        """A recipe that replaces a tensor, or None."""
        if tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes():
            return None  # others have the rest of its memory, which would stay
        try:
            recipe = self._derive(node, number, tensor, 0)
            if not self._is_right(recipe, node, tensor):
                return None
            for (operand, i), value in self._between.items():
                _noted(value, operand, i)
            return recipe
        except Underivable:
            return None
        finally:
            self._untried, self._between = [], {}

    def _is_right(self, recipe, node, tensor):
        recipe.replace(tensor)
        if self._untried and not verify(recipe, self._untried, tensor):
            return False
        if self.check:
            with computing():
                if not is_identical(recipe.compute(), tensor):
                    self.mismatch = self.mismatch or _describe(node, tensor)
                    return False
        return True

    def _derive(self, node, number, tensor, depth):
        """The recipe of a node's output by its rule."""
        name = node.name()
        rule = RULES.get(name)
        if rule is None or depth > MAX_DEPTH or (number and name not in OF_ALL_OUTPUTS):
            raise Underivable
        step = Step(self, node, number, tensor, depth)
        formula, operands, arguments = rule(step)
        stride, version = (None, 0) if tensor is None else (tensor.stride(), tensor._version)
        # Of numbers the type will do: other values take the same path, and sizes are all here.
        configuration = (
            name,
            number,
            formula,
            tuple([each.signature() if isinstance(each, Value) else type(each) for each in operands]),
            tuple([float if type(each) is float else each for each in arguments]),
            step.shape,
            stride,
            version,  # in place or not
            step.meta.dtype,
            step.meta.device,
        )
        known = verification.chosen.get(configuration, formula)
        if known is None:
            raise Underivable
        recipe = Recipe(name, known, operands, arguments, configuration, step.shape, stride)
        if configuration not in verification.chosen or step.is_assumed:
            self._untried.append((recipe, formula))
        return recipe


def _describe(node, tensor):
    """What didn't fit, and the module that saved it."""
    frame, module = sys._getframe(1), None
    while frame is not None and not isinstance(module, nn.Module):
        module, frame = frame.f_locals.get("self"), frame.f_back
    saver = f", saved by {type(module).__name__}" if isinstance(module, nn.Module) else ""
    return f"{node.name()}, shape {list(tensor.shape)}, {tensor.dtype}{saver}: expected a recipe of the same bits, got others"


def _found(node, number):
    reference = node.metadata.get((_key, number))
    return None if reference is None else reference()


def _noted(value, node, number):
    node.metadata[_key, number] = weakref.ref(value)
    return value


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


_plain_keys: dict[str, int] = {}


def is_plain(tensor: Tensor) -> bool:
    """Whether it is as factories make it: no subclass, not sparse, quantised, nested, conjugate or batched."""
    if type(tensor) not in PLAIN or torch._C._len_torch_dispatch_stack():
        return False
    device = tensor.device.type
    if device not in _plain_keys:
        _plain_keys[device] = torch._C._dispatch_keys(torch.empty(0, device=tensor.device)).raw_repr()
    return torch._C._dispatch_keys(tensor).raw_repr() == _plain_keys[device]
