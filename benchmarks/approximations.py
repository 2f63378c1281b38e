"""Sets fewbit's and Tempo's gradients beside this package's: how far they are from PyTorch's, and what is saved for backward.

fewbit (Novikov et al., 2022, arXiv 2202.00441) takes a step function for an activation's derivative, and saves the number of
the step. Its borders and levels are in fewbit/data/builtin.npz of github.com/skolai/fewbit. Tempo (Andoorveedu et al., 2022,
arXiv 2210.10246) has GELU alone: it saves the output and a byte that says on which side of the minimum the input was, and takes
polynomials of the output for the derivative. Their coefficients are in src/inplace_gelu/gelu_kernel.cu of
github.com/UofT-EcoSystem/Tempo. The two files are this command's arguments. Inputs and gradients are normal, in bfloat16.
Writes benchmarks/results/approximations.json.
"""

import argparse
import re
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tabulate import tabulate

import activations_cuda
from activations_cuda.memory import saved_bytes
from benchmarks import record

NUMEL = 1 << 20
OPS = {"gelu": F.gelu, "silu": F.silu, "hardswish": F.hardswish, "mish": F.mish}
BITS = 1, 2, 3, 4


def derivative(function, x, grad):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(x), x, grad)[0]


def stepwise(steps, name, bits, x, grad):
    """The gradient by fewbit's step function."""
    borders, levels = (torch.from_numpy(steps[f"{name}{bits:02}-{part}"]).float() for part in ("borders", "levels"))
    return (grad.float() * levels[torch.bucketize(x.float(), borders[1:-1])]).to(grad.dtype)


def polynomials(source):
    """Tempo's, as functions of the output: on the right of GELU's minimum the far one, that at the minimum and the one between
    them; then the one on the left.
    """
    for sign, shift, formula in re.findall(r"o_fp ([+-]) \(\(float\) ([\d.]+)\);\s*rval =([^;]+);", source):
        coefficients = [float(number) for number in re.findall(r"\(float\) ([-+.\de]+)\)", formula)]
        constant = coefficients.pop() if re.search(r"\)\)\) \+ \(\(float\) [-+.\de]+\)$", formula) else 0.0
        yield float(sign + shift), [*reversed(coefficients), constant]


def evaluate(polynomial, y):
    shift, coefficients = polynomial
    result = torch.zeros_like(y)
    for coefficient in coefficients:
        result = result * (y + shift) + coefficient
    return result


def piecewise(regions, x, grad):
    """The gradient by Tempo's polynomials, in float32 as in its kernel."""
    y = F.gelu(x).float()
    far, near, between, left = (evaluate(polynomial, y) for polynomial in regions)
    right = torch.where(y < 0.10682432, near, torch.where(y > 0.97742819, far.where(y < 3, 1.0), between))
    return (grad.float() * right.where(x >= -0.751791631228899, left)).to(grad.dtype)


def error(actual, expected):
    """The norm of the difference, relative to that of PyTorch's gradient."""
    return round(((actual.double() - expected.double()).norm() / expected.double().norm()).item(), 4)


def rows(steps, source):
    torch.manual_seed(0)
    x, grad = (torch.randn(NUMEL).bfloat16() for _ in range(2))
    for name, pytorch in OPS.items():
        expected, ours = derivative(pytorch, x, grad), getattr(activations_cuda, name)
        for bits in BITS:
            yield name, "fewbit", bits / 8, 0, error(stepwise(steps, name, bits, x, grad), expected)
        if name == "gelu":
            (shift, far), *others = polynomials(source)
            for scheme, sign in ("Tempo", 1), ("Tempo, with the far one's sign mended", -1):
                regions = [(sign * shift, far), *others]
                yield name, scheme, 1, x.element_size(), error(piecewise(regions, x, grad), expected)
        beside_output = saved_bytes(ours, x.requires_grad_()) / NUMEL - x.element_size()
        yield name, "activations_cuda", beside_output, x.element_size(), error(derivative(ours, x, grad), expected)
        yield name, "PyTorch", saved_bytes(pytorch, x) / NUMEL, 0, 0.0


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.approximations", description=__doc__)
    parser.add_argument("steps", type=Path, metavar="builtin.npz", help="fewbit's borders and levels")
    parser.add_argument("source", type=Path, metavar="gelu_kernel.cu", help="Tempo's polynomials")
    arguments = parser.parse_args()
    names = "op", "scheme", "bytes", "output_bytes", "error"
    found = [dict(zip(names, row, strict=True)) for row in rows(np.load(arguments.steps), arguments.source.read_text())]
    record.write(record.RESULTS / "approximations.json", {**record.origin(), "numel": NUMEL, "rows": found})
    print(tabulate(found, headers="keys"))


if __name__ == "__main__":
    main()
