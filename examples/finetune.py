"""Fine-tunes a model of timm in bfloat16 on scikit-learn's handwritten digits, once unmodified and once converted.

Prints what both save for backward, on a GPU their peak memory too, and whether losses and weights are equal, bit for bit.
"""

import argparse
import os

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from tqdm import trange

import activations_cuda


def digits(device):
    """Images of shape (1797, 3, 8, 8), float32 from -1 to 1, and their labels."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8).expand(-1, 3, -1, -1) / 8 - 1
    return images.to(device), torch.tensor(labels, device=device)


def example_inputs(arguments):
    """A batch of no memory."""
    return (torch.empty(arguments.batch, 3, arguments.size, arguments.size, device="meta"),)


def autocast(arguments):
    return torch.autocast(torch.device(arguments.device).type, torch.bfloat16)


def train(arguments, name, convert):
    """The loss of every step, the weights after the last and, on a GPU, the peak memory in bytes."""
    images, labels = digits(arguments.device)
    generator = torch.Generator().manual_seed(0)  # the same batches for both models
    torch.manual_seed(0)  # the same new weights and dropout
    model = timm.create_model(arguments.model, pretrained=arguments.pretrained, num_classes=10).to(arguments.device)
    if convert:
        with autocast(arguments):
            activations_cuda.convert(model, *example_inputs(arguments), recompute=arguments.recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    on_gpu = torch.device(arguments.device).type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(arguments.device)
    losses = []
    for _ in (progress := trange(arguments.steps, desc=name)):
        chosen = torch.randint(len(images), (arguments.batch,), generator=generator).to(arguments.device)
        batch = F.interpolate(images[chosen], size=(arguments.size, arguments.size))
        with autocast(arguments):
            loss = F.cross_entropy(model(batch), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
    weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
    return torch.stack(losses).cpu(), weights, torch.cuda.max_memory_allocated(arguments.device) if on_gpu else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="efficientnet_b0", help="a model of timm (default: %(default)s)")
    parser.add_argument(
        "--pretrained", action=argparse.BooleanOptionalAction, default=True, help="start from weights that timm downloads"
    )
    parser.add_argument("--recompute", action="store_true", help="recompute what follows from other saved tensors too")
    parser.add_argument("--steps", type=int, default=100, help="training steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="images in a batch (default: %(default)s)")
    parser.add_argument("--size", type=int, default=128, help="height and width of an image (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's learning rate (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)")
    arguments = parser.parse_args()

    # Else PyTorch's own convolutions on a GPU differ from run to run. cuBLAS asks for the variable.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    before, weights_before, peak_before = train(arguments, "unmodified", convert=False)
    after, weights_after, peak_after = train(arguments, "converted", convert=True)
    with torch.device("meta"), autocast(arguments):
        model = timm.create_model(arguments.model, num_classes=10)
        report = activations_cuda.memory_report(model, *example_inputs(arguments), recompute=arguments.recompute)
    saved = report.recompute if arguments.recompute else report.after

    same_weights = all(map(torch.equal, weights_before.values(), weights_after.values()))
    print(f"last loss {after[-1]:.4f}; losses equal: {torch.equal(before, after)}; weights equal: {same_weights}")
    print(f"saved for backward: {report.before / 2**20:.1f} MiB unmodified, {saved / 2**20:.1f} MiB converted")
    if peak_before is not None:
        print(f"peak memory: {peak_before / 2**20:.0f} MiB unmodified, {peak_after / 2**20:.0f} MiB converted")


if __name__ == "__main__":
    main()
