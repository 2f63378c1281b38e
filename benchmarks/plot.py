"""Draws the results of one device, as PNG beside their JSON."""

import json
from pathlib import Path

import matplotlib.pyplot as plt

OURS, PYTORCH, COMPILED, COPY = "tab:blue", "tab:gray", "tab:orange", "black"
MARKS = {  # of the ways in benchmarks.alternatives
    "eager": (PYTORCH, "o"),
    "converted": (OURS, "o"),
    "recompute": (OURS, "*"),
    "recompute, every 2nd block checkpointed": (OURS, "s"),
    "recompute within save_on_cpu": (OURS, "^"),
    "checkpoint": (PYTORCH, "s"),
    "selective checkpoint": (PYTORCH, "D"),
    "save_on_cpu": (PYTORCH, "^"),
    "torch.compile": (COMPILED, "o"),
    "torch.compile, budget 0.5": (COMPILED, "s"),
}


def select(rows, **wanted):
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def bandwidth(axes, rows):
    """Forward pass over size, beside the ceiling that a copy sets."""
    large = select(rows, case="forward", op="hardtanh", dtype="float32", reference="F")[1:]
    sizes = select(rows, case="forward, by size", op="hardtanh") + large
    x = [row["numel"] for row in sizes]
    for key, label, color in (("reference_us", "PyTorch", PYTORCH), ("ours_us", "activations_cuda", OURS)):
        axes.plot(x, [8 * row["numel"] / row[key] / 1e3 for row in sizes], "o-", markersize=3, label=label, color=color)
    for row in select(rows, case="forward", op="hardtanh", reference="copy"):
        axes.axhline(8 * row["numel"] / row["reference_us"] / 1e3, color=COPY, linestyle=":", label="device-to-device copy")
    axes.set(xlabel="elements", ylabel="GB/s", title="forward, float32")
    axes.set_xscale("log", base=2)
    axes.legend()


def training(axes, rows):
    """Forward + backward of 2^28 elements."""
    labels, bars = [], {"PyTorch": [], "torch.compile": [], "activations_cuda": []}
    for op in ("hardtanh", "hardsigmoid"):
        for dtype in ("float32", "bfloat16"):
            case = {"case": "forward + backward", "op": op, "dtype": dtype, "numel": 1 << 28}
            (eager,), (compiled,) = select(rows, reference="F", **case), select(rows, reference="torch.compile", **case)
            labels.append(f"{op}\n{dtype}")
            bars["PyTorch"].append(eager["reference_us"])
            bars["torch.compile"].append(compiled["reference_us"])
            bars["activations_cuda"].append(eager["ours_us"])
    for i, ((label, heights), color) in enumerate(zip(bars.items(), (PYTORCH, COMPILED, OURS), strict=True)):
        axes.bar([x + (i - 1) * 0.27 for x in range(len(labels))], heights, 0.25, label=label, color=color)
    axes.set_xticks(range(len(labels)), labels)
    axes.set(ylabel="us", title="forward + backward, 2^28 elements", ylim=(0, 1.35 * max(bars["PyTorch"])))
    axes.legend()


def ratios(axes, rows):
    """How many times faster than PyTorch each measured pass is."""
    timed = [row for row in rows if "ours_us" in row and row["dtype"] == "float32"]
    labels = [f"{row['case']}\n{row['op']}, 2^{row['numel'].bit_length() - 1}" for row in timed]
    axes.barh(labels, [row["ratio"] for row in timed], color=OURS)
    axes.axvline(1, color=COPY, linestyle=":")
    axes.tick_params(axis="y", labelsize=6)
    axes.set(xlabel="times faster than PyTorch", title="float32")


def saved(axes, rows):
    """Bytes saved for backward, per element."""
    rows = select(rows, case="bytes saved per element", op="hardtanh")
    for i, (key, label, color) in enumerate(
        (("reference_bytes", "PyTorch", PYTORCH), ("ours_bytes", "activations_cuda", OURS))
    ):
        bars = axes.bar(
            [x + (i - 0.5) * 0.4 for x in range(len(rows))], [row[key] for row in rows], 0.38, label=label, color=color
        )
        axes.bar_label(bars)
    axes.set_xticks(range(len(rows)), [row["dtype"] for row in rows])
    axes.set(ylabel="bytes an element", title="saved for backward")
    axes.legend()


def draw(path):
    result = json.loads(Path(path).read_text())
    rows = result["rows"]
    panels = [bandwidth, training, saved] if result["cuda"] else [ratios, saved]
    figure, axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 4.5 if result["cuda"] else 9), layout="constrained")
    for panel, axis in zip(panels, axes, strict=True):
        panel(axis, rows)
    figure.suptitle(f"{result['device']}, torch {result['torch']}, commit {result['commit']}")
    figure.savefig(Path(path).with_suffix(".png"), dpi=110)


def commits(result):
    return ", ".join(dict.fromkeys(row.get("commit", result["commit"]) for row in result["rows"]))


def draw_models(path):
    """Peak memory and step time of real models in bfloat16, before and after conversion, in the order of what it saves."""
    result = json.loads(Path(path).read_text())
    rows = sorted(select(result["rows"], mode="eager", dtype="bfloat16"), key=lambda row: row["memory"])
    figure, axes = plt.subplots(1, 2, figsize=(9, 1 + 0.28 * len(rows)), layout="constrained", sharey=True)
    for axis, unit, change, title in (
        (axes[0], "gib", "memory", "peak memory of a training step, GiB"),
        (axes[1], "ms", "time", "time of a training step, ms"),
    ):
        for offset, when, label, color in ((-0.2, "before", "unmodified", PYTORCH), (0.2, "after", "converted", OURS)):
            places = [place + offset for place in range(len(rows))]
            axis.barh(places, [row[f"{when}_{unit}"] for row in rows], 0.38, label=label, color=color)
        for place, row in enumerate(rows):
            longer = max(row[f"before_{unit}"], row[f"after_{unit}"])
            axis.text(longer, place, f" {row[change] - 1:+.1%}", va="center", fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.14, y=0.01)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(rows)), [row["model"].removeprefix("timm ") for row in rows])
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    figure.suptitle(f"{result['device']}, bfloat16, eager, torch {result['torch']}, of {commits(result)}", fontsize=10)
    figure.savefig(Path(path).with_suffix(".png"), dpi=140)


def frontier(rows):
    """Those that no other beats in both time and memory, the fastest first."""
    best = []
    for row in sorted(rows, key=lambda row: (row["time"], row["memory"])):
        if not best or row["memory"] < best[-1]["memory"]:
            best.append(row)
    return best


def draw_alternatives(path):
    """Memory against time of each way to train a model, both relative to eager, and the best of them joined."""
    result = json.loads(Path(path).read_text())
    models = list(dict.fromkeys(row["model"] for row in result["rows"]))
    columns = 3
    lines = -(-len(models) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(9, 1.2 + 2.9 * lines), layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    for axis in grid.flat[len(models) :]:
        axis.set_visible(False)
    for axis, model in zip(grid.flat, models, strict=False):
        rows = [row for row in select(result["rows"], model=model) if "failure" not in row]
        eager = {"way": "eager", "time": 1, "memory": 1}
        best = frontier([eager, *rows])
        axis.plot([row["time"] for row in best], [row["memory"] for row in best], color="lightgray", zorder=0)
        for row in [eager, *rows]:
            color, marker = MARKS[row["way"]]
            size = 110 if marker == "*" else 36
            axis.scatter(row["time"], row["memory"], size, color=color, marker=marker, label=row["way"])
        axis.set_title(f"{model}, batch {rows[0]['batch']}", fontsize=9)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8, labelbottom=True)
        axis.set_xlabel("time of a step, eager = 1", fontsize=8)
    for axis in grid[:, 0]:
        axis.set_ylabel("peak memory, eager = 1", fontsize=8)
    grid[0][0].set_ylim(bottom=0)
    handles = {label: handle for axis in grid.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    labels = [label for label in MARKS if label in handles]
    figure.legend([handles[label] for label in labels], labels, loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(f"{result['device']}, bfloat16, torch {result['torch']}, of {commits(result)}", fontsize=10)
    figure.savefig(Path(path).with_suffix(".png"), dpi=140)
