"""The examples run, and a converted net trains to the same bits."""

import copy
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import activations_cuda

EXAMPLES = Path(__file__).parents[1] / "examples"
DIGITS = EXAMPLES / "digits.py"
pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="needs the source tree")


@pytest.fixture
def digits():
    pytest.importorskip("sklearn")
    example = runpy.run_path(str(DIGITS))
    yield example
    torch.use_deterministic_algorithms(False)


def test_training_is_bit_identical(digits, device):
    digits["be_deterministic"]()
    torch.manual_seed(0)
    model = digits["Net"]().to(device)
    converted = activations_cuda.convert(copy.deepcopy(model))
    assert activations_cuda.converted(converted) == {"ReLU6": 4, "Hardsigmoid": 1}
    before, after = (digits["train"](net, 100, device, "") for net in (model, converted))
    assert before[-10:].mean() < before[:10].mean() / 2  # it learns
    assert torch.equal(before, after)
    assert model.state_dict().keys() == converted.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, converted.state_dict()[name]), name


def test_digits_as_a_command(tmp_path):
    pytest.importorskip("sklearn")
    command = [sys.executable, str(DIGITS), "--steps", "5", "--plot", str(tmp_path / "digits.png")]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "losses equal: True; weights equal: True" in result.stdout
    assert (tmp_path / "digits.png").stat().st_size > 10000


def test_finetune_as_a_command(device):
    for library in "sklearn", "timm":
        pytest.importorskip(library)
    options = ["--no-pretrained", "--model=mobilenetv2_050", "--steps=3", "--batch=8", "--size=32", f"--device={device}"]
    command = [sys.executable, str(EXAMPLES / "finetune.py"), *options]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "losses equal: True; weights equal: True" in result.stdout
    before, after = map(float, re.findall(r"([\d.]+) MiB", result.stdout)[:2])
    assert after < before
