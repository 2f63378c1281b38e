"""Trains a small convolutional net on scikit-learn's handwritten digits, once unmodified and once converted.

Shows that the losses and weights are equal, bit for bit, and draws both loss curves and what autograd saves for backward.
"""

import argparse
import copy
import os
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from tqdm import trange

import activations_cuda

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BATCH = 64


class SqueezeExcite(nn.Module):
    """Scales each channel by a gate that it computes from all of them, as in MobileNetV3."""

    def __init__(self, channels):
        super().__init__()
        self.reduce = nn.Conv2d(channels, channels // 4, 1)
        self.act = nn.ReLU6()
        self.expand = nn.Conv2d(channels // 4, channels, 1)
        self.gate = nn.Hardsigmoid()

    def forward(self, x):
        return x * self.gate(self.expand(self.act(self.reduce(x.mean((2, 3), keepdim=True)))))


def block(inputs, outputs, stride):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU6(inplace=True)
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(block(1, 32, 1), block(32, 64, 2), SqueezeExcite(64), block(64, 64, 2))
        self.classifier = nn.Linear(64, 10)

    def forward(self, images):
        return self.classifier(self.features(images).mean((2, 3)))


def be_deterministic():
    """Else PyTorch's own convolutions on a GPU differ from run to run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS asks for
    torch.use_deterministic_algorithms(True)


def digits(device):
    """Images of shape (1797, 1, 8, 8), float32 from 0 to 1, and their labels."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return images.to(device), torch.tensor(labels, device=device)


def train(model, steps, device, name):
    """The loss of every step."""
    images, labels = digits(device)
    generator = torch.Generator().manual_seed(0)  # the same batches for every model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in trange(steps, desc=name):
        chosen = torch.randint(len(images), (BATCH,), generator=generator).to(device)
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def plot(before, after, report, path):
    figure, (curves, bars) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    curves.plot(before, label="unmodified", color="tab:gray", linewidth=4)
    curves.plot(after, label="converted", color="tab:blue", linewidth=1)
    curves.set(xlabel="step", ylabel="loss", title="the same losses, bit for bit")
    curves.legend()
    heights = [report.before / 2**20, report.after / 2**20]
    bars.bar_label(bars.bar(["unmodified", "converted"], heights, color=["tab:gray", "tab:blue"]), fmt="%.1f MiB")
    bars.set(title=f"saved for backward, batch of {BATCH}", ylabel="MiB")
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--plot", type=Path, default=Path("digits.png"), help="where to draw (default: %(default)s)")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    be_deterministic()
    model = Net().to(arguments.device)
    report = activations_cuda.memory_report(model, torch.empty(BATCH, 1, 8, 8))
    converted = activations_cuda.convert(copy.deepcopy(model))
    before = train(model, arguments.steps, arguments.device, "unmodified")
    after = train(converted, arguments.steps, arguments.device, "converted")

    same_losses = torch.equal(before, after)
    same_weights = all(map(torch.equal, model.state_dict().values(), converted.state_dict().values()))
    plot(before, after, report, arguments.plot)
    print(f"last loss {after[-1]:.4f}; losses equal: {same_losses}; weights equal: {same_weights}")
    print(f"saved for backward: {report.before / 2**20:.1f} MiB unmodified, {report.after / 2**20:.1f} MiB converted")
    print(f"drawn: {arguments.plot}")


if __name__ == "__main__":
    main()
