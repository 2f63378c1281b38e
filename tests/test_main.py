"""`python -m activations_cuda`."""

import pytest
import torch

import activations_cuda.__main__ as main


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(main, "choose_shape", lambda: (torch.device("cpu"), (4, 1000)))


def test_prints_a_row_for_each_op_and_pass(capsys):
    main.main()
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if " yes " in line]) == 4
    kept = [line.split() for line in lines if "backward  " in line]
    assert all(row[0] in main.OPS for row in kept)


def test_a_difference_is_shown_and_fails(monkeypatch, capsys):
    ours, theirs = main.OPS["hardtanh"]
    monkeypatch.setitem(main.OPS, "hardtanh", (lambda x: ours(x, -1.0, 1.0000001), theirs))
    with pytest.raises(SystemExit) as raised:
        main.main()
    assert raised.value.code not in (0, None)
    assert " NO " in capsys.readouterr().out
