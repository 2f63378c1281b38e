"""The README's Python runs, and its figures are those of the committed results."""

import json
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
RESULTS = README.parent / "benchmarks/results/nvidia-h200.json"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if README.exists() else []


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block):
    exec(block, {})


@pytest.mark.skipif(not RESULTS.exists(), reason="needs the source tree")
def test_figures():
    rows = json.loads(RESULTS.read_text())["rows"]
    figures = {(f"{row['op']}, {row['case']}", row["dtype"], f"{row['ratio']:.2f}") for row in rows}
    table = re.findall(r"^\| (hard[^|]+) \| (\w+) \|.*\| (\d+\.\d+) \|$", README.read_text(), re.MULTILINE)
    assert len(table) == 16
    assert set(table) <= figures
