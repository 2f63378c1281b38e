"""Draws docs/few-bits.svg: how many inputs share an output in bfloat16.

python docs/few_bits.py
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

FUNCTIONS = {
    "gelu": F.gelu,
    "gelu, by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "hardswish": F.hardswish,
    "mish": F.mish,
}
COLORS = ["#1f77b4", "#17a2b8", "#d62728", "#2ca02c", "#e08a00"]
GRAY = "#808080"  # readable on white and on black
STYLE = dict.fromkeys(["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"], GRAY)
BINS = torch.linspace(-0.4, 0.05, 181)


def patterns(step=1):
    return torch.arange(0, 1 << 16, step, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@torch.backends.mkldnn.flags(enabled=False)  # whose gelu is another where the processor has bfloat16
def shared(function):
    """The outputs that are numbers, and how many inputs each has that some gradient tells apart."""
    x = patterns()
    x = x[~x.isnan()].requires_grad_()
    y = function(x)
    told_apart = torch.zeros(len(x), dtype=torch.int64)  # a hash
    for grad in patterns(step=241):
        (gradient,) = torch.autograd.grad(y, x, grad.expand_as(y).contiguous(), retain_graph=True)
        bits = torch.where(gradient.isnan(), torch.nan, gradient).view(torch.int16)
        told_apart = told_apart * 6364136223846793005 + bits
    pairs = torch.stack([y.detach().view(torch.int16).long(), told_apart], 1).unique(dim=0)
    outputs, count = pairs[:, 0].unique(return_counts=True)
    return outputs.short().view(torch.bfloat16).float(), count


def main():
    plt.rcParams.update(STYLE)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", width_ratios=(2, 3))
    x = torch.linspace(-6, 2, 400)
    for (name, function), color in zip(FUNCTIONS.items(), COLORS, strict=True):
        left.plot(x, function(x), color=color, lw=1.2)
        y, count = shared(function)
        most = torch.zeros(len(BINS) + 1).scatter_reduce(0, torch.bucketize(y, BINS), count.float(), "amax")[1:-1]
        label = f"{name}: at most {count.max():.0f}"
        right.stairs(most.where(most > 0, torch.nan), BINS, baseline=None, color=color, lw=1.2, label=label)
    left.set(xlabel="input", ylabel="output", ylim=(-0.4, 0.5))
    left.axhline(-0.1, color=GRAY, lw=0.8, ls=":")
    left.annotate("one output,\ntwo branches", (-2.3, -0.1), (-5.5, 0.2), arrowprops={"arrowstyle": "-", "color": GRAY})
    right.set(xlabel="output", ylabel="inputs that share it", yscale="log", xlim=(-0.4, 0.05))
    right.yaxis.set_major_formatter("{x:g}")
    right.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.25, 1))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_name("few-bits.svg"), transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
