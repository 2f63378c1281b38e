"""Times the kernel that computes a chain of recipes, alone, on the GPU at hand: each of its forms, 2^28 elements in bfloat16,
against a copy of as many bytes, in turn.

Writes benchmarks/results/<device>-programs.json. Exits with 1 if a form is slower than its target.
"""

import math
import sys

import torch
import torch.nn.functional as F
from tabulate import tabulate
from tqdm import tqdm

from activations_cuda import _C
from activations_cuda.recipes import formulas, norms
from benchmarks import record
from benchmarks.timing import StepClock, alternate, spread

ELEMENTS = 2**28
AT_LEAST = 0.95  # of a copy's rate


def numbers(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=dtype)


def recipe(like, formula, *operands, arguments=()):
    return _C.recipes.recipe(like, formula, operands, arguments)


def images(channels, size=56, memory_format=torch.channels_last):
    count = ELEMENTS // (channels * size * size)
    return numbers(count, channels, size, size).contiguous(memory_format=memory_format)


def batch_norm(x, formula=norms.batch_norm_elementwise):
    return recipe(x, formula, x, *(numbers(x.shape[1], dtype=torch.float32) for _ in range(4)), arguments=(1e-5,))


def group_norm(x, groups=32):
    parameters = [numbers(x.shape[1], dtype=torch.float32) for _ in range(2)]
    statistics = [numbers(len(x), groups, dtype=torch.float32) for _ in range(2)]
    return recipe(
        x, norms.group_norm_folded, x, *parameters, *statistics, arguments=(*x.shape[:2], math.prod(x.shape[2:]), groups)
    )


def layer_norm(x, dtype=torch.float32):
    parameters = [numbers(x.shape[-1], dtype=dtype) for _ in range(2)]
    statistics = [numbers(len(x), 1, dtype=torch.float32) for _ in range(2)]
    return recipe(x, norms.layer_norm_centered, x, *parameters, *statistics, arguments=((x.shape[-1],),))


def rotary_embedding(x):
    """Of heads that are normalized, as in Qwen3."""
    wide, heads, half = torch.empty_like(x, dtype=torch.float32), x.transpose(1, 2), x.shape[-1] // 2
    of_heads = recipe(wide, torch.mul, x, numbers(*x.shape[:-1], 1, dtype=torch.float32))
    normed = recipe(x, torch.mul, recipe(x, torch.Tensor.to, of_heads, arguments=(x.dtype,)), numbers(x.shape[-1]))
    value = recipe(heads, torch.transpose, normed, arguments=(1, 2))
    first, second = (
        recipe(part, torch.ops.aten.slice, value, arguments=(-1, start, start + half, 1))
        for part, start in zip(heads.split(half, -1), (0, half), strict=True)
    )
    rotated = recipe(heads, formulas.cat, recipe(heads[..., half:], torch.neg, second), first, arguments=(-1,))
    cos, sin = numbers(*heads.shape[2:]), numbers(*heads.shape[2:])
    return recipe(
        heads, formulas.add, recipe(heads, torch.mul, value, cos), recipe(heads, torch.mul, rotated, sin), arguments=(1,)
    )


def relu6(x, value):
    return recipe(x, F.hardtanh, value, arguments=(0.0, 6.0))


def silu(x, value):
    return recipe(x, _C.silu, value)


def residual(x, value):
    return recipe(x, torch.relu, recipe(x, formulas.add, value, torch.randn_like(x), arguments=(1,)))


def gated(x, value):
    return recipe(x, torch.mul, value, numbers(*x.shape[:2], 1, 1))


def swiglu(x):
    return recipe(x, torch.mul, silu(x, x), numbers(*x.shape))


def swiglu_of_halves(x):
    gate, up = x.chunk(2, -1)
    like = up.contiguous()
    return recipe(like, torch.mul, recipe(like, _C.silu, gate), up)


def quick_gelu(x):
    return recipe(x, torch.mul, recipe(x, torch.sigmoid, recipe(x, torch.mul, x, 1.702)), x)


def dropout(x):
    bits = torch.randint(256, ((x.numel() + 7) // 8,), dtype=torch.uint8, device="cuda")
    mask = recipe(torch.empty(x.shape, device="cuda", dtype=torch.bool), _C.recipes.unpack_mask(), bits)
    return recipe(x, formulas.dropout, x, mask, arguments=(1.1, 1.1))


def residual_stream(x):
    return recipe(x, formulas.add, x, numbers(*x.shape), arguments=(1,))


def residual_stream_behind_a_norm(x):
    return recipe(x, formulas.add, layer_norm(x), numbers(*x.shape), arguments=(1,))


def gradient_of_gate(x):
    return recipe(x, torch.mul, silu(x, batch_norm(x)), torch.randn_like(x))


def gradient_of_cube(x):
    wide = torch.empty_like(x, dtype=torch.float32)
    square = recipe(wide, torch.pow, recipe(wide, torch.Tensor.to, x, arguments=(torch.float32,)), arguments=(2.0,))
    return recipe(wide, torch.mul, recipe(wide, torch.mul, square, 3.0), torch.randn_like(wide))


def factor_of_gelu(x):
    """As transformers composes it under autocast, which computes powers in float32."""
    wide = torch.empty_like(x, dtype=torch.float32)
    cube = recipe(wide, torch.pow, recipe(wide, torch.Tensor.to, x, arguments=(torch.float32,)), arguments=(3.0,))
    inner = recipe(wide, formulas.add, x, recipe(wide, torch.mul, cube, 0.044715), arguments=(1,))
    tanh = recipe(wide, torch.tanh, recipe(wide, torch.mul, inner, 0.7978845608028654))
    return recipe(wide, formulas.add, tanh, 1.0, arguments=(1,))


def product(x, one, other):
    """Computed in float32."""
    wide = torch.empty_like(x, dtype=torch.float32)
    return recipe(x, torch.Tensor.to, recipe(wide, torch.mul, one, other), arguments=(torch.bfloat16,))


# What each makes of a tensor, and the bytes of an element that it reads and writes.
FORMS = {
    "batch norm, 96 channels": (lambda: images(96), batch_norm, 4),
    "batch norm, ReLU6, 96": (lambda: images(96), lambda x: relu6(x, batch_norm(x)), 4),
    "batch norm, ReLU6, 1024": (lambda: images(1024, 16), lambda x: relu6(x, batch_norm(x)), 4),
    "batch norm, SiLU": (lambda: images(96), lambda x: silu(x, batch_norm(x)), 4),
    "batch norm, SiLU, 27 channels": (lambda: images(27), lambda x: silu(x, batch_norm(x)), 4),
    "batch norm, SiLU, gate": (lambda: images(96), lambda x: gated(x, silu(x, batch_norm(x))), 4),
    "batch norm, residual, ReLU": (lambda: images(96), lambda x: residual(x, batch_norm(x)), 6),
    "batch norm, gate, residual, ReLU": (lambda: images(96), lambda x: residual(x, gated(x, batch_norm(x))), 6),
    "batch norm of cuDNN, ReLU6": (lambda: images(96), lambda x: relu6(x, batch_norm(x, norms.batch_norm_scaled)), 4),
    "batch norm, contiguous": (lambda: images(96, memory_format=torch.contiguous_format), batch_norm, 4),
    "batch norm, residual, ReLU, contiguous": (
        lambda: images(96, memory_format=torch.contiguous_format),
        lambda x: residual(x, batch_norm(x)),
        6,
    ),
    "batch norm, ReLU6, contiguous, 7 x 7": (
        lambda: images(96, 7, torch.contiguous_format),
        lambda x: relu6(x, batch_norm(x)),
        4,
    ),
    "batch norm, SiLU, contiguous, 14 x 14": (
        lambda: images(96, 14, torch.contiguous_format),
        lambda x: silu(x, batch_norm(x)),
        4,
    ),
    "group norm, SiLU": (lambda: images(320, 32, torch.contiguous_format), lambda x: silu(x, group_norm(x)), 4),
    "group norm, contiguous, 7 x 7": (lambda: images(320, 7, torch.contiguous_format), group_norm, 4),
    "layer norm": (lambda: numbers(ELEMENTS // 768, 768), layer_norm, 4),
    "layer norm, parameters in bfloat16": (
        lambda: numbers(ELEMENTS // 768, 768),
        lambda x: layer_norm(x, torch.bfloat16),
        4,
    ),
    "RMS norm of heads, rotary embedding": (lambda: numbers(ELEMENTS // 2**21, 1024, 16, 128), rotary_embedding, 4),
    "SwiGLU": (lambda: numbers(ELEMENTS // 5632, 5632), swiglu, 6),
    "SwiGLU of a tensor's halves": (lambda: numbers(ELEMENTS // 11264, 11264), swiglu_of_halves, 3),
    "quick GELU": (lambda: numbers(ELEMENTS // 1024, 1024), quick_gelu, 4),
    "gate alone": (lambda: images(96), lambda x: gated(x, x), 4),
    "dropout": (lambda: numbers(ELEMENTS // 1024, 1024), dropout, 4.125),
    "residual stream in float32": (lambda: numbers(ELEMENTS // 768, 768, dtype=torch.float32), residual_stream, 10),
    "the same, layer norm": (lambda: numbers(ELEMENTS // 768, 768, dtype=torch.float32), residual_stream_behind_a_norm, 10),
    "addend of a residual stream": (
        lambda: numbers(ELEMENTS // 768, 768, dtype=torch.float32),
        lambda x: _C.recipes.keep(x, None),
        10,
    ),
    "of a gate: batch norm, SiLU, gradient": (lambda: images(96), gradient_of_gate, 6),
    "of a cube in float32: cast, square, gradient": (lambda: numbers(ELEMENTS // 1024, 1024), gradient_of_cube, 10),
    "GELU of several ops": (
        lambda: numbers(ELEMENTS // 1024, 1024),
        lambda x: product(x, recipe(x, torch.mul, x, 0.5), factor_of_gelu(x)),
        4,
    ),
    "of its first factor: 1 + tanh, gradient": (
        lambda: numbers(ELEMENTS // 1024, 1024),
        lambda x: product(x, factor_of_gelu(x), torch.randn_like(x)),
        6,
    ),
    "gradient of SiLU after batch norm": (lambda: images(96), batch_norm, 6),
    "gradient of SiLU in float32": (lambda: images(96).float(), batch_norm, 12),
    "interpreted: norm, product, ReLU6": (
        lambda: images(96),
        lambda x: relu6(x, recipe(x, torch.mul, relu6(x, batch_norm(x)), 0.5)),
        4,
    ),
    "interpreted: the same, contiguous, 7 x 7": (
        lambda: images(96, 7, torch.contiguous_format),
        lambda x: relu6(x, recipe(x, torch.mul, relu6(x, batch_norm(x)), 0.5)),
        4,
    ),
}


def measure(name):
    make, chain, bytes = FORMS[name]
    torch.manual_seed(0)
    x = make()
    value = chain(x)
    if name.startswith("gradient"):
        grad = torch.randn_like(x)
        how = "silu_gradient" if x.dtype == torch.float32 else numbers(2**16, 2, dtype=torch.float32)  # factors
        run = lambda: _C.recipes.gradient(value, grad, how)  # noqa: E731
    elif name.startswith("addend"):
        total = x + numbers(*x.shape)
        run = lambda: _C.recipes.addend(value, total, torch.bfloat16)  # noqa: E731
    else:
        run = lambda: _C.recipes.fused(value)  # noqa: E731
    assert run() is not None
    source, target = (torch.empty(int(x.numel() * bytes) // 2, device="cuda", dtype=torch.uint8) for _ in range(2))
    time, copy = alternate(StepClock(rounds=15), run, lambda: target.copy_(source))
    return {
        "form": name,
        "us": round(time.median, 1),
        "copy_us": round(copy.median, 1),
        "rate": round(copy.median / time.median, 3),
        "spread": spread(copy, time),
        "at_least": None if name.startswith("interpreted") else AT_LEAST,
    }


def main():
    rows = [measure(name) for name in tqdm(FORMS, unit=" forms")]
    record.write(record.path("-programs"), {**record.origin(), "elements": ELEMENTS, "rows": rows})
    print(tabulate(rows, headers="keys"))
    print("\nrate: of a copy of the bytes that are read and written")
    sys.exit(any(row["at_least"] and row["rate"] < row["at_least"] for row in rows))


if __name__ == "__main__":
    main()
