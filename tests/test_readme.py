"""The README's Python runs, and its figures are those of the committed results."""

import json
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if README.exists() else []


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block):
    exec(block, {})


def test_figures():
    results = README.parent / "benchmarks/results/nvidia-h200.json"
    rows = json.loads(results.read_text())["rows"] if results.exists() else []
    figures = {(f"{row['op']}, {row['case']}", row["dtype"], f"{row['ratio']:.2f}") for row in rows}
    table = re.findall(r"^\| (hard[^|]+) \| (\w+) \|.*\| (\d+\.\d+) \|$", README.read_text() if rows else "", re.MULTILINE)
    assert len(table) == (16 if rows else 0)
    assert set(table) <= figures
