"""Trains a small Llama with transformers' Trainer, in bfloat16 on sequences that it makes, once unmodified and once with
recompute.

Prints what both save for backward, on a GPU their peak memory too, and whether losses and weights are equal, bit for bit.
"""

import argparse
import os
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import activations_cuda

VOCABULARY = 256


class Counting(torch.utils.data.Dataset):
    """Sequences that count up from a random number by a random step."""

    def __init__(self, length, count=512):
        generator = torch.Generator().manual_seed(0)
        start, step = torch.randint(1, VOCABULARY, (2, count, 1), generator=generator)
        self.tokens = (start + step * torch.arange(length)) % VOCABULARY

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


def create(width):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=6,
        num_attention_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def train(arguments, recompute):
    """The loss of every step, the weights after the last and, on a GPU, the peak memory in bytes."""
    model = create(arguments.width)
    if recompute:
        activations_cuda.convert(model, recompute=True)  # the one line
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=arguments.batch,
            max_steps=arguments.steps,
            learning_rate=1e-3,
            bf16=True,
            logging_steps=1,
            full_determinism=True,  # or PyTorch's own attention differs from run to run on a GPU
            report_to=[],
            save_strategy="no",
            use_cpu=not on_gpu,
        )
        trainer = Trainer(model=model, args=options, train_dataset=Counting(arguments.length))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
    return losses, weights, torch.cuda.max_memory_allocated() if on_gpu else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="training steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a batch (default: %(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens in a sequence (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the model (default: %(default)s)")
    arguments = parser.parse_args()

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which cuBLAS asks for
    before, weights_before, peak_before = train(arguments, recompute=False)
    after, weights_after, peak_after = train(arguments, recompute=True)
    with torch.autocast("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16):
        batch = torch.zeros(arguments.batch, arguments.length, dtype=torch.long)
        report = activations_cuda.memory_report(create(arguments.width), input_ids=batch, labels=batch, recompute=True)

    same_weights = all(map(torch.equal, weights_before.values(), weights_after.values()))
    print(f"last loss {after[-1]:.4f}; losses equal: {before == after}; weights equal: {same_weights}")
    print(f"saved for backward: {report.before / 2**20:.1f} MiB unmodified, {report.recompute / 2**20:.1f} MiB with recompute")
    if peak_before is not None:
        print(f"peak memory: {peak_before / 2**20:.0f} MiB unmodified, {peak_after / 2**20:.0f} MiB with recompute")


if __name__ == "__main__":
    main()
