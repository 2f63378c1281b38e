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


def equal_by(example, *options):
    """What an example prints, which is to say that all is equal."""
    result = subprocess.run([sys.executable, str(EXAMPLES / example), *options], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "losses equal: True; weights equal: True" in result.stdout and "False" not in result.stdout
    return result.stdout


@pytest.mark.parametrize("recompute", [False, True])
def test_finetune_as_a_command(recompute, device):
    for library in "sklearn", "timm":
        pytest.importorskip(library)
    options = ["--no-pretrained", "--model=mobilenetv2_050", "--steps=3", "--batch=16", "--size=64", f"--device={device}"]
    stdout = equal_by("finetune.py", *options, *(["--recompute"] if recompute else []))
    before, after = map(float, re.findall(r"([\d.]+) MiB", stdout)[:2])
    assert after < (0.5 if recompute else 1) * before


def test_trainer_as_a_command():
    for library in "accelerate", "transformers":
        pytest.importorskip(library)
    stdout = equal_by("trainer.py", "--steps=3", "--batch=4", "--length=32", "--width=64")
    before, after = map(float, re.findall(r"([\d.]+) MiB", stdout)[:2])
    assert after < 0.8 * before


@pytest.mark.parametrize("gpus", [0, pytest.param(2, marks=pytest.mark.cuda(gpus=2))])
def test_fsdp_as_a_command(gpus):
    equal_by("fsdp.py", "--steps=2", "--batch=2", "--length=32", "--width=64", "--depth=2")
