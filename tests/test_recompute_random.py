"""Random programs of ops: gradients equal to the bit, and no more memory."""

import contextlib
import os

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from activations_cuda import _C
from recomputing import Keep, Plain, Scope, assert_same, copying_hooks

pytestmark = pytest.mark.usefixtures("no_hidden_errors")


UNARY = [
    F.relu,
    F.silu,
    F.gelu,
    torch.tanh,
    torch.sigmoid,
    torch.neg,
    F.hardswish,
    lambda x: x * 0.5,
    lambda x: x + 1,
    lambda x: x * x,
    lambda x: F.relu6(x.clone(), inplace=True),
    lambda x: x.mul_(1.5),
    lambda x: F.relu(x, inplace=True),
    lambda x: x.transpose(0, 1),
    lambda x: x.view(4, 2, 8).reshape(8, 8).contiguous(),
    lambda x: x.chunk(2, 1)[0].repeat(1, 2),
    lambda x: F.layer_norm(x, (8,)),
    lambda x: x.bfloat16(),
    lambda x: x.float(),
    lambda x: x[:, None].expand(-1, 2, -1)[:, 1],
    lambda x: x.t().clone(),
    lambda x: F.dropout(x, 0.2),
    lambda x: torch.native_dropout(x, 0.2, True)[0],
    lambda x: x.masked_fill(x > 1, 0),
    lambda x: F.threshold(x, 0.1, 7),
    lambda x: x.cumsum(0) * 0.1,
    lambda x: x.softmax(1),
    lambda x: x.detach() * x,
    lambda x: x.roll(1, 0),
    lambda x: x.flip(1),
]


BINARY = [
    torch.add,
    torch.mul,
    torch.sub,
    torch.maximum,
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: torch.cat([a, b], 0)[::2].contiguous(),
    lambda a, b: a.add_(b),
    lambda a, b: torch.lerp(a, b.to(a.dtype), 0.3),
]


NUMBER = st.integers(0, 99)


KINDS = "unary", "unary", "unary", "binary", "matmul", "convolution", "keep"


INSTRUCTION = st.tuples(st.sampled_from(KINDS), NUMBER, NUMBER, NUMBER)


def interpret(program, model, dtype):
    tensors = [Keep.apply(model.a @ model.b).to(dtype)]
    for kind, number, i, j in program:
        x, y = tensors[i % len(tensors)], tensors[j % len(tensors)]
        if kind == "unary":
            result = UNARY[number % len(UNARY)](x)
        elif kind == "binary":
            result = BINARY[number % len(BINARY)](x, y)
        elif kind == "matmul":
            result = (x.float() @ model.b).tanh()
        elif kind == "convolution":
            result = F.conv2d(x.float()[None, None], model.b[:3, :3][None, None], padding=1)[0, 0]
        else:
            result = Keep.apply(x)
        tensors.append(result)
    # All is differentiated: of a branch that isn't, a recipe may keep what the branch saved.
    return sum((each.float() * torch.linspace(0, 1, 8)).sum() for each in tensors)


@settings(max_examples=int(os.environ.get("EXAMPLES", "300")), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(INSTRUCTION, min_size=3, max_size=16),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.sampled_from([0, 200]),  # bytes: tensors of half types are smaller
    st.booleans(),
)
def test_programs(program, dtype, smallest, has_outer_hooks):
    torch.manual_seed(1)
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def run(scope):
        torch.manual_seed(0)
        model.zero_grad()
        with outer if isinstance(scope, Scope) else contextlib.nullcontext(), scope:
            loss = interpret(program, model, dtype)
        kept = scope.bytes(model) if isinstance(scope, Plain) else None
        loss.backward()
        return [loss.detach(), model.a.grad, model.b.grad], kept

    outer = contextlib.nullcontext()
    if has_outer_hooks:
        outer = copying_hooks()
    try:
        expected, _ = run(contextlib.nullcontext())
    except RuntimeError:
        return  # no program, or it writes to what is saved
    _, before = run(Plain())
    _C.recipes.set_smallest(smallest, smallest)
    try:
        found, after = run(Scope())
    finally:
        _C.recipes.set_smallest(0, 0)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    assert has_outer_hooks or after <= before
