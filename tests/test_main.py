"""`python -m activations_cuda`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import activations_cuda
import activations_cuda.__main__ as command
import activations_cuda.demo as main
from activations_cuda import known_models


def test_as_a_command():
    """On the shape for the machine at hand."""
    result = subprocess.run([sys.executable, "-m", "activations_cuda"], cwd=Path.home(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" yes ") == 4


def test_trains_within_recompute(small, monkeypatch, capsys):
    main.main()
    line = capsys.readouterr().out.splitlines()[-1]
    within, plain = map(float, re.findall(r"([\d.]+) MiB instead of ([\d.]+)", line)[0])
    assert within < 0.6 * plain and line.endswith("The gradients are equal.")
    monkeypatch.setattr(main, "train", lambda: (False, (1, 2), (1, 2)))
    with pytest.raises(SystemExit):
        main.main()
    assert "The gradients DIFFER." in capsys.readouterr().out


def test_a_pipe_that_is_closed_is_no_error():
    command = f"{sys.executable} -m activations_cuda info | true"
    result = subprocess.run(["bash", "-c", command], cwd=Path.home(), capture_output=True, text=True)
    assert not result.stderr


def test_counts_what_is_saved():
    x = torch.randn(4, 1000, requires_grad=True)
    assert [main.saved_bytes(f, x) for f in main.OPS["hardtanh"]] == [4000 // 8, 4000 * 4]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(main, "choose_shape", lambda: (torch.device("cpu"), (4, 1000)))


def test_prints_a_row_for_each_op_and_pass(small, capsys):
    main.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if " yes " in line]
    assert [row[0] for row in rows] == ["hardtanh", "hardtanh", "hardsigmoid", "hardsigmoid"]


def test_a_difference_is_shown_and_fails(small, monkeypatch, capsys):
    ours, theirs = main.OPS["hardtanh"]
    monkeypatch.setitem(main.OPS, "hardtanh", (lambda x: ours(x, -1.0, 1.0000001), theirs))
    with pytest.raises(SystemExit) as raised:
        main.main()
    assert raised.value.code not in (0, None)
    assert " NO " in capsys.readouterr().out


def test_info(monkeypatch, capsys):
    command.main(["info"])
    lines = dict(
        line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if not line.startswith(("GPU", "built"))
    )
    assert lines["version"] == activations_cuda.__version__
    monkeypatch.setattr(command, "has_gpu", lambda: False)
    for cuda, built, reason in (None, None, "for the CPU"), ("13.0", None, "FORCE_CUDA=1"), ("13.0", "13.0", "finds no GPU"):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert reason in command.why_no_gpu({"cuda": built})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "argument COMMAND: invalid choice: 'frobnicate'"),
        (["report", "torchvision:resnet18", "--batch", "1.5"], "expected a whole number from 1 to 2147483647, got 1.5"),
        (["report", "torchvision:resnet18", "--batch", "9" * 30], "expected a whole number from 1 to 2147483647, got 999"),
        (["report", "torchvision:wants_values"], "torchvision:wants_values can't be created on the meta device: no values"),
    ],
)
def test_mistakes_in_a_command(arguments, message, monkeypatch, capsys):
    def create():
        raise RuntimeError("no values")

    monkeypatch.setitem(known_models.LIBRARIES, "torchvision", lambda name: create)
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err
