"""The package's annotations hold, and tell a type checker what its users write."""

import sys
from pathlib import Path

import pytest

import activations_cuda
from trees import FROM_SOURCE, ROOT, run

pytest.importorskip("mypy")
pytestmark = pytest.mark.slow

PROGRAM = """
import torch
from torch import Tensor, nn

import activations_cuda as fa
from activations_cuda import inductor

y: Tensor = fa.hardtanh(torch.ones(3), 0.0, max_val=6.0, inplace=True)
y = fa.hardsigmoid(y, alpha=0.2, beta=0.5)
fa.hardtanh("x")  # type: ignore[arg-type]
fa.hardtanh(y, low=0.0)  # type: ignore[call-arg]

model: nn.Module = fa.convert(nn.Sequential(nn.ReLU6(), fa.Hardtanh(0.0, 6.0)), classes=[nn.ReLU6])
count: int = fa.converted(model)["ReLU6"]
report: fa.MemoryReport = fa.memory_report(fa.revert(model), y)
smaller: bool = report.after < report.before and report.layers[0].before > 0
fa.memory_report(y)  # type: ignore[arg-type]
with fa.ConvertMode(classes=[nn.ReLU]):
    pass

compiled = torch.compile(model, options=inductor.options({"max_autotune": True}))
version: str = fa.build_info()["version"] + fa.__version__
"""


def check(*arguments, cwd):
    in_place = Path(activations_cuda.__file__).parents[1] == ROOT  # an editable install, which mypy doesn't find
    return run(sys.executable, "-m", "mypy", *arguments, cwd=cwd, **({"MYPYPATH": str(ROOT)} if in_place else {}))


@FROM_SOURCE
def test_the_package_is_clean(tmp_path):
    result = check("--config-file", "pyproject.toml", "--cache-dir", str(tmp_path), cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_users_program(tmp_path):
    """In the strictest mode, where calling what has no annotations is an error, and so is an error that doesn't come."""
    (tmp_path / "program.py").write_text(PROGRAM)
    result = check("--strict", "--follow-imports=silent", "program.py", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
