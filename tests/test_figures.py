"""The figures in the README and the pages are those of the committed results."""

import json
import math
import re
import statistics
from collections import Counter

from trees import FROM_SOURCE, ROOT

RESULTS = ROOT / "benchmarks/results"
MODELS = r"^\| .+ \| b?float\d+ \| .+% \|$"  # a line of a table of models


def read(path):
    return (ROOT / path).read_text() if (ROOT / path).exists() else ""


README = read("README.md")
BENCHMARKS = read("docs/benchmarks.md")
FEW_BITS = read("docs/few-bits.md")
QUICK_START = read("docs/quick-start.md")
UNITS = ("gib", ".2f"), ("ms", ".1f")


@FROM_SOURCE
def test_figures():
    def line(row):
        reference = {"F": f"F.{row['op']}", "aten": f"aten::{row['op']}_backward"}.get(row["reference"], row["reference"])
        times = f"{row['ours_us']:.1f} | {row['reference_us']:.1f} | {row['ratio']:.2f}"
        return f"| {row['op']}, {row['case']} | {row['dtype']} | {reference} | {times} |"

    rows = json.loads((RESULTS / "nvidia-h200.json").read_text())["rows"]
    expected = {line(row) for row in rows if row["numel"] == 2**28}
    table = re.findall(r"^\| hard.+ [\d.]+ \|$", BENCHMARKS, re.MULTILINE)
    assert len(table) == 16
    assert set(table) <= expected


@FROM_SOURCE
def test_figures_of_smooth_activations():
    rows = json.loads((RESULTS / "nvidia-h200.json").read_text())["rows"]
    ratios = {(row["op"], row["case"], row["dtype"]): row["ratio"] for row in rows if row["numel"] == 2**28}
    table = re.findall(r"^\| `(\w+)`(, by tanh)? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", FEW_BITS, re.MULTILINE)
    assert len(table) == 5
    for name, by_tanh, *figures in table:
        cases = ("forward", "bfloat16"), ("forward + backward", "bfloat16"), ("forward + backward", "float16")
        op = name + (", tanh" if by_tanh else "")
        assert figures == [f"{ratios[(op, *case)]:.2f}" for case in cases]


@FROM_SOURCE
def test_figures_beside_the_compiler():
    rows = [row for row in json.loads((RESULTS / "nvidia-h200-models.json").read_text())["rows"] if "compiled_ms" in row]
    for row in rows:
        gib, ms = ([f"{row[f'{how}_{unit}']:{digits}}" for how in ("before", "after", "compiled")] for unit, digits in UNITS)
        assert f"| {row['model']} | {' | '.join(gib + ms)} |" in BENCHMARKS
    assert len(rows) == 10
    assert sum(row["compiled_gib"] < row["after_gib"] for row in rows) == 6
    for page in BENCHMARKS, FEW_BITS:
        assert re.search(r"than converting( does)? in six of the ten", page)
    low, high = (bound(row["kernels"] for row in rows) - 1 for bound in (min, max))
    assert f"the kernels take between {-low:.1%} less and {high:.1%} more time" in FEW_BITS.replace("\n", " ")


@FROM_SOURCE
def test_figures_of_models():
    result = json.loads((RESULTS / "nvidia-h200-models.json").read_text())

    def line(row):
        gib = f"{row['before_gib']:.2f} | {row['after_gib']:.2f} | {row['memory'] - 1:+.1%}"
        ms = f"{row['before_ms']:.1f} | {row['after_ms']:.1f} | {row['time'] - 1:+.1%} | {row['kernels'] - 1:+.1%}"
        return f"| {row['model']} | {row['batch']} | {row['dtype']} | {gib} | {ms} |"

    lines = [line(row) for row in result["rows"]]
    assert re.findall(MODELS, BENCHMARKS, re.MULTILINE) == lines
    assert all(row["losses_equal"] and row["weights_equal"] for row in result["rows"])
    for row in result["rows"]:
        assert f"the {row['steps']} losses of the first steps" in BENCHMARKS.replace("\n", " ")

    def less(what, model):
        rows = [row for row in result["rows"] if row["model"] == model]
        low, *_, high = sorted((round(100 * (1 - row[what])) for row in rows for _ in range(2)), key=abs)
        span = str(abs(low)) if low == high else f"{abs(low)} to {abs(high)}"
        return f"{span}% {'less' if low > 0 else 'more'} {what}"

    text = BENCHMARKS.replace("\n", " ")
    assert less("memory", "mobilenet_v2") in text
    assert less("time", "mobilenet_v2") in text
    assert less("memory", "squeezenet1_1") in text


def percents(values):
    """The least and the most, in words."""
    return f"{100 * min(values):.0f} to {max(values):.0%}"


@FROM_SOURCE
def test_figures_of_alternatives():
    rows = json.loads((RESULTS / "nvidia-h200-alternatives.json").read_text())["rows"]

    def line(row):
        if "failure" in row:
            return f"| {row['model']} | {row['way']} |  |  |  |  |  | fails |"
        same = "but for running statistics" if row["parameters_equal"] else "no"
        same = "yes" if row["losses_equal"] and row["weights_equal"] else same
        compiles = "" if row["compile_s"] is None else f"{row['compile_s']:.0f}"
        of_eager = f"{row['after_gib']:.2f} | {row['memory'] - 1:+.0%} | {row['after_ms']:.1f} | {row['time'] - 1:+.0%}"
        return f"| {row['model']} | {row['way']} | {of_eager} | {compiles} | {same} |"

    table = re.findall(r"^\| .+ \| (?:yes|no|fails|but for running statistics) \|$", BENCHMARKS, re.MULTILINE)
    assert table == [*map(line, rows)]
    rows = [row for row in rows if "failure" not in row]
    recomputed = json.loads((RESULTS / "nvidia-h200-recompute.json").read_text())["rows"]
    batches = [{(row["model"], row["batch"]) for row in each} for each in (rows, recomputed)]
    assert batches[0] <= batches[1] and "Batches are those of [Recompute]" in BENCHMARKS
    assert all(row["losses_equal"] and row["weights_equal"] for row in rows if row["way"] in ("converted", "recompute"))
    times, memories = {}, {}
    for row in rows:
        times.setdefault(row["way"], []).append(row["time"])
        memories.setdefault(row["way"], []).append(row["memory"])
    saved = {way: percents([1 - memory for memory in each]) for way, each in memories.items()}
    more = {way: percents([time - 1 for time in each]) for way, each in times.items()}
    text = re.sub(r"\s+", " ", BENCHMARKS)
    assert (
        f"**recompute** saves {saved['recompute']} of the memory for at most {max(times['recompute']) - 1:.0%} more time"
        in text
    )
    assert [time < 1 for time in times["recompute"]].count(True) == 3 and "is faster in three of the seven" in text
    both = "recompute, every 2nd block checkpointed"
    assert f"it is {saved[both]}, for {more[both]} more time" in text
    page = re.sub(r"\s+", " ", read("docs/recompute.md"))
    assert f"[{saved[both]} less memory](benchmarks.md#beside-the-alternatives), for {more[both]} more time" in page
    assert f"saves {saved['torch.compile, budget 0.5']}, and takes less time once" in text
    assert f"saves {saved['checkpoint']}, for {more['checkpoint']} more time" in text
    assert f"takes {more['selective checkpoint']} more time" in text
    takes = {way: f"takes {min(each):.0f} to {max(each):.0f} times" for way, each in times.items()}
    assert f"saves the most, and {takes['save_on_cpu']} the time" in text
    assert f"no recipe, and {takes['recompute within save_on_cpu']}." in text
    of_mobilenet = {
        row["way"]: [f"{abs(1 - row[what]):.0%}" for what in ("memory", "time")]
        for row in rows
        if row["model"] == "mobilenet_v2"
    }
    text = README.replace("\n", " ")
    assert "converting saves {} of the memory and {} of the time".format(*of_mobilenet["converted"]) in text
    assert "recomputing {} and {}, bit for bit".format(*of_mobilenet["recompute"]) in text
    assert "checkpointing its blocks saves {} and takes {} more time".format(*of_mobilenet["checkpoint"]) in text
    assert "a budget of 0.5 saves {} and takes {} less".format(*of_mobilenet["torch.compile, budget 0.5"]) in text


@FROM_SOURCE
def test_figures_of_batches():
    result = json.loads((RESULTS / "nvidia-h200-batches.json").read_text())
    lines = [f"| {row['model']} | {row['eager']} | {row['converted']} | {row['recompute']} |" for row in result["rows"]]
    assert "\n".join(lines) in BENCHMARKS and f"limited to {result['cap_gib']:.0f} GiB" in BENCHMARKS


@FROM_SOURCE
def test_figures_of_compiled_models():
    rows = json.loads((RESULTS / "nvidia-h200-compiled.json").read_text())["rows"]
    text = BENCHMARKS.replace("\n", " ")
    net = {row["compiled"]: row for row in rows if row["model"] == "mobilenet_v2"}
    before, after = net["unmodified"], net["converted"]
    assert before["gib"] == after["gib"]
    assert abs(after["ms"] / before["ms"] - 1) < 0.001
    assert "takes the same memory, and the same time within 0.1%" in text
    text = QUICK_START.replace("\n", " ")
    for model in "MLP, 4 x 4096", "MLP, 4 x 4096, GELU":
        mlp = {row["compiled"]: row for row in rows if row["model"] == model}
        before, after = mlp["converted"], mlp["with the pass"]
        memory = f"in {after['gib']:.3f} GiB instead of {before['gib']:.3f}"
        assert f"{memory}, and in {1 - after['time'] / before['time']:.0%} less time" in text


@FROM_SOURCE
def test_figures_of_approximations():
    rows = json.loads((RESULTS / "approximations.json").read_text())["rows"]
    errors, tempos = {}, []
    for row in rows:
        if row["scheme"].startswith("Tempo"):
            tempos.append(f"{row['error']:.1%}")
        elif row["scheme"] != "PyTorch":
            errors.setdefault(row["op"], []).append(row["error"])
    text = FEW_BITS.replace("\n", " ")
    assert f"as published the gradient is {tempos[0]} off" in text
    assert f"With that fixed it is {tempos[1]} off" in text
    assert len(errors) == 4
    for op, of_schemes in errors.items():
        assert of_schemes[-1] == 0
        assert f"| `{op}` | {' | '.join(f'{error:.1%}' for error in of_schemes)} |" in FEW_BITS


def gib(row):
    return f"{row['before_gib']:.2f} | {row['after_gib']:.2f}"


def changes(row, *names):
    return " | ".join(f"{row[name] - 1:+.1%}" for name in names)


@FROM_SOURCE
def test_figures_of_recompute():
    rows = json.loads((RESULTS / "nvidia-h200-recompute.json").read_text())["rows"]
    expected = [
        f"| {re.sub(' float32|, few', '', row['model'])} | {row['batch']} | {row['dtype']} | {gib(row)} | "
        f"{changes(row, 'memory', 'kernels', 'time')} |"
        for row in rows
    ]
    page = read("docs/recompute.md")
    assert re.findall(r"^\| .+% \|$", page, re.MULTILINE) == expected
    assert all(row[f"{what}_equal"] for row in rows for what in ("losses", "weights", "recipes"))
    assert {row["steps"] for row in rows} == {4} and "the losses of four steps" in page.replace("\n", " ")
    text, readme = (each.replace("\n", " ") for each in (page, README))
    by_name = {row["model"]: row for row in rows}
    (commit, _), *_ = Counter(row["commit"] for row in rows).most_common()
    later = "GPT-2, PyTorch's GELU"
    with_loss = ["GPT-2, language model", "Llama, language model"]
    runs = [row["model"] for row in rows if row["commit"] != commit]
    assert {re.sub(" float32|, .+", "", name) for name in runs} == {
        *("resnet50", "vgg16", "vit_b_16", "swin_t", "U-Net", "GPT-2", "BERT-base", "ModernBERT-base", "Qwen3-0.6B", "Llama")
    }
    assert {name for name in by_name if name.startswith(("resnet50", "U-Net", "GPT-2", "BERT"))} <= set(runs)
    assert f'The row "{later}" has `activation_function="gelu_pytorch_tanh"`' in text
    later_runs = "ResNet-50, VGG-16, ViT, Swin, the U-Net, GPT-2, BERT, ModernBERT, Qwen3 and Llama"
    assert f"The rows of {later_runs} are of later runs than the others." in text
    of_bfloat16 = (name for name, row in by_name.items() if row["dtype"].startswith("bfloat16"))
    large = [name for name in of_bfloat16 if not name.endswith((", few", ", contiguous", ", convolutions"))]
    kernels = {name: by_name[name]["kernels"] - 1 for name in large}
    slower = {name: more for name, more in kernels.items() if more > 0}
    in_bfloat16 = "GPT-2, weights in bfloat16"
    nets = ["densenet121", "vgg16", "vit_b_16", later, in_bfloat16, "BERT-base", "Qwen3-0.6B", "Llama, language model"]
    assert list(slower) == nets
    most = math.ceil(100 * max(slower.values()))
    nets = "DenseNet, VGG-16, ViT, BERT, Qwen3, the Llama with its head, and GPT-2 with PyTorch's GELU or weights in bfloat16"
    assert f"at the larger batches, all but {nets}, whose kernels take up to {most}% more" in text
    of_float32 = [row["kernels"] - 1 for row in rows if row["dtype"] == "float32" and "resnet50" in row["model"]]
    assert f"in float32 ResNet-50's take {percents(of_float32)} more" in text
    nets = [name for name in by_name if name.endswith(", contiguous")]
    slower = [name for name in nets if by_name[name]["after_ms"] > by_name[name.removesuffix(", contiguous")]["before_ms"]]
    assert slower == nets and len(nets) == 4
    assert "even unmodified, the four nets take less time in it than contiguous ones recomputed" in text
    by_tanh = [f"{by_name[later][each]:.2f}" for each in ("before_gib", "after_gib")]
    assert "with `gelu_pytorch_tanh` eager needs {} GiB, recompute {}".format(*by_tanh) in readme
    most = max(row["time"] for row in rows) - 1
    of_float32 = max(by_name[name]["time"] for name in ("resnet50 float32", "resnet50, contiguous float32")) - 1
    assert f"steps take up to {math.ceil(100 * most)}% more time, float32 ResNet-50 {of_float32:.0%}" in readme
    memory = sorted(1 - row["memory"] for row in rows if "convolutions" not in row["model"])
    assert f"with 28 to {memory[-1]:.0%} less memory in most of our benchmarks" in README
    assert statistics.mean(each >= 0.28 for each in memory) > 0.9
    less = {row["model"]: f"{1 - row['memory']:.0%}" for row in rows}
    first = [1 - by_name[f"{model}, contiguous"]["time"] for model in ("mobilenet_v2", "efficientnet_b0", "resnet50")]
    assert f"the first three take {percents(first)} *less* time" in readme
    of_gpt2, of_llama = (less[name] for name in with_loss)
    assert f"GPT-2 needs {of_gpt2} less, Llama {of_llama}" in readme
    of_readme = re.findall(r"^\| .+ \| \d+ \| .+% \|$", README, re.MULTILINE)
    lines = {f"| {row['model']} | {row['batch']} | {gib(row)} | {changes(row, 'memory', 'kernels', 'time')} |" for row in rows}
    assert len(of_readme) == 8 and set(of_readme) <= lines and f"has all {len(rows)} rows" in README


@FROM_SOURCE
def test_figures_of_the_zoo():
    result = json.loads((RESULTS / "nvidia-h200-zoo.json").read_text())
    skipped = [row for row in result["rows"] if "skipped" in row]
    memory = [row["memory"] for row in result["rows"] if row.get("equal")]
    text = read("docs/recompute.md").replace("\n", " ")
    assert f"for three steps of {result['batch']} images or sequences of {result['tokens']} tokens" in text
    assert result["steps"] == 3
    less = f"up to {1 - min(memory):.0%} less memory, the median {1 - statistics.median(memory):.0%}"
    more = f"and two need up to {max(memory) - 1:.1%} more"
    assert f"All {len(memory)} nets are equal to the bit. They need {less}, {more}" in text
    assert sum(each > 1 for each in memory) == 2
    assert statistics.mean(1 - each >= 0.28 for each in memory) > 0.5  # as README says of most
    assert len(memory) + len(skipped) == len(result["rows"])
    assert all(row["net"].startswith("transformers") for row in skipped)
    assert f"{len(skipped)} more of transformers were skipped" in text
    assert f"as in {len(memory)} small nets of timm, torchvision and transformers" in README.replace("\n", " ")


@FROM_SOURCE
def test_figures_of_programs():
    """How much longer than a copy each kind of chain takes."""
    rows = json.loads((RESULTS / "nvidia-h200-programs.json").read_text())["rows"]
    times = {row["form"]: f"{1 / row['rate']:.1f}" for row in rows}

    def of(*words):
        return {form: times.pop(form) for form in list(times) if any(word in form for word in words)}.values()

    any_other, across_rows = of("interpreted")
    (rotary_embedding,), (odd_channels,) = of("rotary embedding"), of("27 channels")
    page = read("docs/recompute.md").replace("\n", " ")
    common = times.values()
    assert f"takes {min(common)} to {max(common)} times as long as a copy of the same bytes for the chains" in page
    assert f"A rotary embedding of normalized queries or keys takes {rotary_embedding} times as long" in page
    assert f"where several rows are read as one to fill vectors, take {odd_channels} times" in page
    assert f"the one that we measured takes {any_other} times as long and, where rows end within vectors" in page
    assert f"planes of 7 x 7 do, {across_rows} times" in page


@FROM_SOURCE
def test_figures_of_nets():
    rows = json.loads((RESULTS / "nvidia-h200-nets.json").read_text())["rows"]
    for row in rows:
        gib = f"{row['before_gib']:.2f} | {row['after_gib']:.2f}"
        assert f"| {row['net']} | {gib} | {row['memory'] - 1:+.1%} | {row['kernels'] - 1:+.1%} |" in BENCHMARKS
    text = BENCHMARKS.replace("\n", " ")
    memory, kernels = (sorted(row[each] - 1 for row in rows) for each in ("memory", "kernels"))
    least, most = f"{-memory[-1]:.0%}".rstrip("%"), f"{-memory[0]:.0%}"
    assert f"All need {least} to {most} less memory" in text
    assert f"is between {kernels[0]:+.0%} and {kernels[-1]:+.0%}, in the median {statistics.median(kernels):+.0%}" in text
    assert f"In {sum(each < 0 for each in kernels)} nets they get faster." in text
    slow = ["eca_nfnet_l0", "efficientformer_l1", "hgnetv2_b3", "inception_next_tiny", "resmlp_24_224"]
    assert [row["net"] for row in rows if row["kernels"] > 1.05] == slow and "Five take over 5% more time" in text
    assert f"[{len(rows)} nets of timm](docs/benchmarks.md#nets-of-timm) need {least} to {most} less" in README


@FROM_SOURCE
def test_figures_of_what_is_saved():
    rows = json.loads((RESULTS / "nvidia-h200-saved.json").read_text())["rows"]
    contiguous = [row for row in rows if "contiguous" in row["model"]]
    rows = [row for row in rows if row not in contiguous]
    by_name = {row["model"]: row for row in rows}
    for row in contiguous:
        name = row["model"].replace(", contiguous", "")
        assert {**row, "model": name} == by_name[name]
    expected = [f"| {row['model']} | {row['gib']:.2f} | {changes(row, 'converted', 'recipes', 'both')} |" for row in rows]
    page = read("docs/one-bit.md")
    assert re.findall(r"^\| .+% \|$", page, re.MULTILINE) == expected
    assert "inside the scope conversion saves time, not memory; in PyTorch's default layout the bytes are the same" in page
    assert all(row["both"] > row["recipes"] - 0.001 for row in rows)
    assert "a converted MobileNetV2's kernels take less time than the unmodified one's" in page.replace("\n", " ")
    timed = json.loads((RESULTS / "nvidia-h200-recompute.json").read_text())["rows"]
    assert all(row["kernels"] < 1 for row in timed if row["model"].startswith("mobilenet_v2"))


@FROM_SOURCE
def test_figures_of_frameworks():
    rows = json.loads((RESULTS / "nvidia-h200-x2-distributed.json").read_text())["rows"]
    expected = [
        f"| {row['model']} | {row['mode'].removesuffix(', recompute')} | {row['batch']} | {gib(row)} | "
        f"{changes(row, 'memory', 'time')} |"
        for row in rows
    ]
    page = read("docs/frameworks.md")
    assert re.findall(r"^\| .+% \|$", page, re.MULTILINE) == expected
    assert all(row[f"{what}_equal"] for row in rows for what in ("losses", "weights"))
    assert {row["dtype"] for row in rows} == {"bfloat16"} and "Two H200, bfloat16" in page
    spreads = [f"by {100 * low - 100:+.0f}% to {100 * high - 100:+.0f}%" for low, high in (row["spread"] for row in rows)]
    assert "ResNet-50's step changed {}, Llama's {}.".format(*spreads) in page
    assert {row["steps"] for row in rows} == {20} and "All losses and weights of 20 steps are equal" in page
