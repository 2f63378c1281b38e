"""What autograd calls within the scope: the hook's state, and what its quick half in C++ leaves to Python."""

import sys
import weakref
from inspect import unwrap
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from activations_cuda import _C
from activations_cuda.recipes import formulas, programs
from activations_cuda.recipes.rules import RULES, RULES_WITH_CONVOLUTIONS, SPLIT
from activations_cuda.recipes.step import DTYPE, NUMBER, OUTPUT_NR, SHAPE, NothingYet, OpRule, Step, Underivable
from activations_cuda.recipes.verification import Candidates, is_identical, is_of_handler, log, verify

unpack = _C.recipes.unpack


def sharding() -> tuple[bool, bool]:
    """Whether FSDP2 has sharded some module, and whether FSDP1 may have."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not torch.distributed.is_initialized():
        return False, False
    sharded = getattr(fsdp, "FSDPModule", ())  # another thread may be importing it
    modules = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", None)
    # Without that list, as in a later release, any module may be.
    return modules is None or any(isinstance(module(), sharded) for module in modules.keyrefs()), True


class Hook:
    """One scope's hook in autograd's stack. ``pack`` is its pack hook, :data:`unpack` the other.

    Args:
        model: whose modules' names an error gives.
        check: whether every recipe is compared with its tensor.
        outer: the hooks around the scope, which get what is kept.
        convolutions: whether depthwise convolutions are inexpensive enough.
        is_dry_run: whether it only counts, and takes every recipe for right, as on fake tensors.
        begins: the sequence number of autograd's next node when the scope began, by default now.
    """

    def __init__(
        self,
        model: nn.Module | None,
        check: bool,
        outer: Any,
        convolutions: bool = False,
        is_dry_run: bool = False,
        begins: int | None = None,
    ) -> None:
        # Weakly: whoever keeps an output keeps its graph, which has this.
        self._model = None if model is None else weakref.ref(model)
        self.check, self.outer, self.convolutions, self.is_dry_run = check, outer, convolutions, is_dry_run
        # Leaves that earlier ops read may have been written to since, unnoticed.
        self.begins = _C.recipes.begin_scope() if begins is None else begins
        self.rules = RULES_WITH_CONVOLUTIONS if convolutions else RULES
        self.mismatch: str | None = None

    @property
    def model(self) -> nn.Module | None:
        return None if self._model is None else self._model()

    @property
    def pack(self) -> Any:
        return _C.recipes.pack_hook(self)


def _step(hook, node, output_nr, tensor, depth, rule):
    """What a rule that is a function gives."""
    step = Step(hook, node, output_nr, tensor, depth)
    try:
        return rule(step)
    except Underivable:
        return None


def _is_right(hook, recipe, untried, node, tensor):
    """Whether a recipe gives its tensor."""
    if untried and not verify(recipe, untried, tensor):
        return False
    if hook.check:
        with _C.recipes.Computing():
            if not is_identical(recipe.compute(), tensor):
                hook.mismatch = hook.mismatch or _describe(node, tensor, hook.model)
                return False
    return True


def _describe(node, tensor, model):
    """What didn't fit, and the module that saved it."""
    frame, module = sys._getframe(1), None
    while frame is not None and not isinstance(module, nn.Module):
        module, frame = frame.f_locals.get("self"), frame.f_back
    saver = ""
    if isinstance(module, nn.Module):
        names = (name for name, each in nn.Module.named_modules(model) if each is module) if model is not None else ()
        name, kind = next(iter(names), ""), type(module).__name__
        saver = f", saved by {name} ({kind})" if name else f", saved by {kind}"
    return f"{node.name()}, shape {list(tensor.shape)}, {tensor.dtype}{saver}: the recomputed tensor differs from the saved one"


KEPT = "recompute: kept a tensor of shape %s: %r"


def _failed(tensor, error):
    """Whether to raise an error once the op is done: not if it is the hook's own."""
    if isinstance(error, Exception) and is_of_handler(error):
        return True
    log.debug(KEPT, list(tensor.shape), error)
    return False


def _code_of(name):
    """Of PyTorch's own function. In one that somebody has put in its place, variables of the same names may be others."""
    function = unwrap(getattr(F, name))
    return function.__code__ if getattr(function, "__globals__", None) is vars(F) else None


# In bytes: computing less again takes time for next to no memory. The second is for a parameter's copy in another dtype, of
# which a forward pass makes only one.
SMALLEST = 2**14
SMALLEST_COPY_OF_PARAMETER = 2**20

_C.recipes.set_smallest(SMALLEST, SMALLEST_COPY_OF_PARAMETER)
_C.recipes.set_facts(formulas.FORMULAS)
_C.recipes.set_up(
    table=programs.table,
    reshape=torch.reshape,
    expand=torch.Tensor.expand,
    transpose=torch.transpose,
    permute=torch.permute,
    cast=torch.Tensor.to,
    same=formulas.same,
    multiply=torch.mul,
    power=torch.pow,
    dropout=formulas.dropout,
    negative=torch.neg,
    cat=formulas.cat,
    slice=torch.ops.aten.slice,
    split=SPLIT.formula,
    op_rule=OpRule,
    candidates=Candidates,
    underivable=Underivable,
    nothing_yet=NothingYet,
    norm_functions={name: _code_of(name) for name in ("batch_norm", "instance_norm", "layer_norm", "group_norm")},
    plain_types=(Tensor, nn.Parameter),
    step=_step,
    is_right=_is_right,
    functions=_C,
    failed=_failed,
    shape=SHAPE,
    dtype=DTYPE,
    output_nr=OUTPUT_NR,
    number=NUMBER,
)
