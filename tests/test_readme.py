"""The README's Python runs."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if README.exists() else []


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block):
    exec(block, {})
