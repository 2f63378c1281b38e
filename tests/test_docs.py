"""The documentation builds without a warning, its code runs, and every public name is on the API page."""

import importlib
import inspect
import re
import sys

import pytest

import activations_cuda
from trees import FROM_SOURCE, ROOT, run

PAGES = sorted((ROOT / "docs").glob("*.md"))


@FROM_SOURCE
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    exec("\n".join(blocks), {})


@pytest.mark.parametrize("name", [name for name in activations_cuda.__all__ if name.islower()])
def test_docstrings_tell_of_arguments_and_result(name):
    function = getattr(activations_cuda, name)
    for part in (*inspect.signature(function).parameters, "Returns"):
        assert re.search(rf"^ +{part}:", function.__doc__, re.MULTILINE), part


@FROM_SOURCE
def test_few_bits_counts(monkeypatch):
    """In bfloat16; the page's are a GPU's, whose ops may round otherwise."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "docs")
    few_bits = importlib.import_module("few_bits")
    page = (ROOT / "docs/few-bits.md").read_text().replace("`", "")
    for name, function in few_bits.FUNCTIONS.items():
        _, count = few_bits.shared(function)
        assert f"| {name} | {count.max():.0f} |" in page


@FROM_SOURCE
def test_the_pages_build(tmp_path):
    for name in ("furo", "myst_parser", "sphinx"):
        pytest.importorskip(name)
    result = run(sys.executable, "-m", "sphinx", "-W", "-q", str(ROOT / "docs"), str(tmp_path), cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    page = (tmp_path / "api.html").read_text()
    missing = [name for name in (*activations_cuda.__all__, "inductor.options", "LayerMemory") if f'.{name}"' not in page]
    assert not missing
