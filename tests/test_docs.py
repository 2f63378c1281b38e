"""The README and the pages build without a warning, their code runs, their commands and links exist, and every public name is
on the API page."""

import importlib.util
import inspect
import json
import re
import shlex
import sys

import pytest
from torch import nn

import activations_cuda
from activations_cuda.replacements import OURS
from family import BY_DEFAULT, SMOOTH
from trees import FROM_SOURCE, ROOT, run

PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if path.exists()}
BLOCKS = {name: blocks for name, text in PAGES.items() if (blocks := re.findall(r"```python\n(.*?)```", text, re.DOTALL))}


@FROM_SOURCE
@pytest.mark.parametrize("page", BLOCKS)
def test_blocks_run(page):
    """One after another, as they are read."""
    has_torchvision = importlib.util.find_spec("torchvision") is not None
    exec("\n".join(block for block in BLOCKS[page] if has_torchvision or "torchvision" not in block), {})


@FROM_SOURCE
def test_the_readme_is_short():
    assert len(PAGES["README.md"].split()) <= 1000


@FROM_SOURCE
def test_all_pages_have_the_version():
    version = activations_cuda.__version__
    assert f"activations_cuda-{version}-cp" in PAGES["README.md"] and f"activations_cuda-{version}-cp" in PAGES["install.md"]
    assert re.search(rf"^version: {version}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert (ROOT / "CHANGELOG.md").read_text().split("## ")[1].startswith(f"{version} (")


@FROM_SOURCE
def test_bits_of_the_codes():
    bits = {str(row): row.bits for row in SMOOTH}
    for name, first in (("gelu", "gelu_none"), ("silu", "silu"), ("hardswish", "hardswish"), ("mish", "mish")):
        (line,) = re.findall(rf"^\| `{name}\(.*", PAGES["README.md"], re.MULTILINE)
        assert f"output and {bits[first][0]} bits" in line
    assert f"({bits['gelu_tanh'][0]} with tanh)" in PAGES["README.md"]
    assert {in_float16 for _, in_float16 in bits.values()} == {8, 10}
    assert "in float16 the codes have 8 or 10 bits" in PAGES["README.md"].replace("\n", " ")


@FROM_SOURCE
def test_commands():
    """They ask for what the Makefile asks for, and are its targets."""
    makefile = (ROOT / "Makefile").read_text()
    text = PAGES["README.md"] + PAGES["install.md"]
    (needs,) = set(re.findall(r"^    pip install (.* ninja)$", text, re.MULTILINE))
    assert f"BUILD_NEEDS = {needs}\n" in makefile
    assert f"requires = {json.dumps(shlex.split(needs))}\n" in (ROOT / "pyproject.toml").read_text()
    targets = re.findall(r"^    make ([\w-]+)", text, re.MULTILINE)
    assert targets
    for target in targets:
        assert f"\n{target}:" in makefile


@FROM_SOURCE
def test_links_lead_to_tests():
    links = re.findall(r"\[(\w+)\]\(\.\./(tests/\w+\.py)\)", PAGES["compatibility.md"])
    assert links
    for name, path in links:
        assert f"def test_{name}(" in (ROOT / path).read_text()


@pytest.mark.parametrize("name", [name for name in activations_cuda.__all__ if name.islower()])
def test_docstrings_tell_of_arguments_and_result(name):
    function = getattr(activations_cuda, name)
    for part in (*inspect.signature(function).parameters, *(["Returns"] if inspect.isfunction(function) else [])):
        assert re.search(rf"^ *{part}:", function.__doc__, re.MULTILINE), part


def test_docstrings_name_what_is_converted_by_default():
    def names(function):
        by_default = re.search(r"By default (.+?)\.\n", function.__doc__, re.DOTALL)[1]
        return [set(re.findall(r"[A-Z]\w+", part)) for part in by_default.split("with inputs")]

    def named(kinds):
        return {kind.__name__ for kind in kinds}

    assert names(activations_cuda.convert) == [named(BY_DEFAULT), named(OURS.keys() - set(BY_DEFAULT))]
    mode = activations_cuda.ConvertMode
    assert mode().functions == mode([getattr(nn, name) for name in names(mode)[0]]).functions


@FROM_SOURCE
def test_few_bits_counts(monkeypatch):
    """In bfloat16; the page's are a GPU's, whose ops may round otherwise."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "docs")
    few_bits = importlib.import_module("few_bits")
    page = PAGES["few-bits.md"].replace("`", "")
    for name, function in few_bits.FUNCTIONS.items():
        _, count = few_bits.shared(function)
        assert f"| {name} | {count.max():.0f} |" in page


@FROM_SOURCE
def test_the_pages_build(tmp_path):
    for name in ("furo", "myst_parser", "sphinx", "sphinx-mathjax-offline"):
        pytest.importorskip(name)
    result = run(sys.executable, "-m", "sphinx", "-W", "-q", str(ROOT / "docs"), str(tmp_path), cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    page = (tmp_path / "api.html").read_text()
    missing = [name for name in (*activations_cuda.__all__, "inductor.options", "LayerMemory") if f'.{name}"' not in page]
    assert not missing
