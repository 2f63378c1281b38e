"""The README's Python runs, and its figures are those of the committed results."""

import json
import re
import shlex

from trees import FROM_SOURCE, ROOT

README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks/results"
TEXT = README.read_text() if README.exists() else ""
UNITS = ("gib", ".2f"), ("ms", ".1f")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@FROM_SOURCE
def test_blocks_run():
    """One after another, as they are read."""
    exec("\n".join(BLOCKS), {})


@FROM_SOURCE
def test_commands():
    """They ask for what the Makefile asks for, and are its targets."""
    makefile = (ROOT / "Makefile").read_text()
    (needs,) = re.findall(r"^    pip install (.* ninja)$", TEXT, re.MULTILINE)
    assert f"BUILD_NEEDS = {needs}\n" in makefile
    assert f"requires = {json.dumps(shlex.split(needs))}\n" in (ROOT / "pyproject.toml").read_text()
    targets = re.findall(r"^    make ([\w-]+)", TEXT, re.MULTILINE)
    assert targets
    for target in targets:
        assert f"\n{target}:" in makefile


@FROM_SOURCE
def test_figures():
    def line(row):
        reference = {"F": f"F.{row['op']}", "aten": f"aten::{row['op']}_backward"}.get(row["reference"], row["reference"])
        times = f"{row['ours_us']:.1f} | {row['reference_us']:.1f} | {row['ratio']:.2f}"
        return f"| {row['op']}, {row['case']} | {row['dtype']} | {reference} | {times} |"

    rows = json.loads((RESULTS / "nvidia-h200.json").read_text())["rows"]
    expected = {line(row) for row in rows if row["numel"] == 2**28}
    table = re.findall(r"^\| hard.+ [\d.]+ \|$", TEXT, re.MULTILINE)
    assert len(table) == 16
    assert set(table) <= expected


@FROM_SOURCE
def test_figures_of_smooth_activations():
    rows = json.loads((RESULTS / "nvidia-h200.json").read_text())["rows"]
    ratios = {(row["op"], row["case"], row["dtype"]): row["ratio"] for row in rows if row["numel"] == 2**28}
    page = (ROOT / "docs/few-bits.md").read_text()
    table = re.findall(r"^\| `(\w+)`(, by tanh)? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(table) == 5
    for name, by_tanh, *figures in table:
        cases = ("forward", "bfloat16"), ("forward + backward", "bfloat16"), ("forward + backward", "float16")
        op = name + (", tanh" if by_tanh else "")
        assert figures == [f"{ratios[(op, *case)]:.2f}" for case in cases]


@FROM_SOURCE
def test_figures_beside_the_compiler():
    page = (ROOT / "docs/few-bits.md").read_text()
    rows = [row for row in json.loads((RESULTS / "nvidia-h200-models.json").read_text())["rows"] if "compiled_ms" in row]
    for row in rows:
        gib, ms = ([f"{row[f'{how}_{unit}']:{digits}}" for how in ("before", "after", "compiled")] for unit, digits in UNITS)
        assert f"| {row['model']} | {' | '.join(gib + ms)} |" in page
    assert len(rows) == 10
    assert sum(row["compiled_gib"] < row["after_gib"] for row in rows) == 6
    assert "than converting does in six of the ten" in page
    low, high = (round(100 * (bound(row["time"] for row in rows) - 1)) for bound in (min, max))
    assert f"takes between {-low}% less and {high}% more time" in page.replace("\n", " ")


@FROM_SOURCE
def test_figures_of_models():
    result = json.loads((RESULTS / "nvidia-h200-models.json").read_text())

    def line(row):
        gib = f"{row['before_gib']:.2f} | {row['after_gib']:.2f} | {row['memory'] - 1:+.1%}"
        ms = f"{row['before_ms']:.1f} | {row['after_ms']:.1f} | {row['time'] - 1:+.1%}"
        return f"| {row['model']} | {row['dtype']} | {gib} | {ms} |"

    table = re.findall(r"^\| .+% \|$", TEXT, re.MULTILINE)
    assert table == [line(row) for row in result["rows"]]
    assert all(row["losses_equal"] and row["weights_equal"] for row in result["rows"])
    assert {f"the {row['steps']} losses of the first steps" in TEXT for row in result["rows"]} == {True}

    def less(what, model):
        rows = [row for row in result["rows"] if row["model"] == model]
        low, *_, high = sorted((round(100 * (1 - row[what])) for row in rows for _ in range(2)), key=abs)
        span = str(abs(low)) if low == high else f"{abs(low)} to {abs(high)}"
        return f"{span}% {'less' if low > 0 else 'more'} {what}"

    text = TEXT.replace("\n", " ")
    assert less("memory", "mobilenet_v2") in text
    assert less("time", "mobilenet_v2") in text
    assert less("memory", "squeezenet1_1") in text
    for name, model in (("EfficientNet-B0 (SiLU) trains in ", "efficientnet_b0"), ("ConvNeXt-T (GELU) in ", "convnext_tiny")):
        assert name + less("memory", model).removesuffix(" memory") in text
    largest = result["largest_batch"]
    assert f"takes {largest['after']} images instead of {largest['before']}" in TEXT


@FROM_SOURCE
def test_figures_of_compiled_models():
    rows = json.loads((RESULTS / "nvidia-h200-compiled.json").read_text())["rows"]
    text = TEXT.replace("\n", " ")
    net = {row["compiled"]: row for row in rows if row["model"] == "mobilenet_v2"}
    before, after = net["as it comes"], net["converted"]
    assert before["gib"] == after["gib"]
    assert abs(after["ms"] / before["ms"] - 1) < 0.001
    assert "takes the same memory, and the same time within 0.1%" in text
    for model in "MLP, 4 x 4096", "MLP, 4 x 4096, GELU":
        mlp = {row["compiled"]: row for row in rows if row["model"] == model}
        before, after = mlp["converted"], mlp["with the pass"]
        memory = f"in {after['gib']:.3f} GiB instead of {before['gib']:.3f}"
        assert f"{memory}, and in {1 - after['time'] / before['time']:.0%} less time" in text


@FROM_SOURCE
def test_links_lead_to_tests():
    links = re.findall(r"\[(\w+)\]\((tests/\w+\.py)\)", TEXT)
    assert links
    for name, path in links:
        assert f"def test_{name}(" in (ROOT / path).read_text()
