"""The package's commands: a comparison with PyTorch on the machine at hand, the memory report of a known model, and what was
built and found."""

import argparse
import dataclasses
import json
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

import torch

from activations_cuda import build_info, demo, known_models
from activations_cuda._load import has_gpu
from activations_cuda.memory import memory_report


def autocast(dtype):
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=getattr(torch, dtype))


def report(arguments):
    model = known_models.load(arguments.model)
    try:
        inputs = known_models.inputs_of(model, arguments.batch, arguments.size, arguments.tokens)
        with autocast(arguments.autocast):
            result = memory_report(model, inputs, recompute=arguments.recompute)
    except Exception as error:  # whatever a model raises that wants something else
        given = f"--batch {arguments.batch}, --size {arguments.size}, --tokens {arguments.tokens}"
        raise ValueError(f"{arguments.model} fails with inputs of {given}: {error}") from error
    try:
        if arguments.json:
            arguments.json.write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n")
        if arguments.chart:
            result.plot(arguments.chart)
    finally:  # after which the pipe may be closed
        print(result)


def why_no_gpu(built):
    """Why the ops don't run on a GPU here; None if they do."""
    if has_gpu():
        return None
    if torch.version.cuda is None:
        return "this torch is a build for the CPU"
    if built["cuda"] is None:
        return "activations_cuda was built for the CPU: build it with CUDA_HOME set, or FORCE_CUDA=1 to see what is missing"
    return "torch finds no GPU"


def info():
    built = build_info()
    found = {"torch here": torch.__version__, "Python": sys.version.split()[0]}
    for i in range(torch.cuda.device_count() if has_gpu() else 0):
        found[f"GPU {i}"] = "{}, {}.{}".format(torch.cuda.get_device_name(i), *torch.cuda.get_device_capability(i))
    found["on a GPU"] = why_no_gpu(built) or "yes"
    rows = {**{f"built: {key}" if key in ("torch", "cuda") else key: value for key, value in built.items()}, **found}
    for key, value in rows.items():
        print(f"{key:<14}{(', '.join(value) or None) if isinstance(value, list) else value}")


def positive(text):
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to {2**31 - 1}, got {text}")
    return int(text)


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m activations_cuda", description=demo.__doc__)
    commands = parser.add_subparsers(title="other commands", metavar="COMMAND")
    about = "Reports what autograd saves for the backward pass of a model, layer by layer, before and after conversion."
    command = commands.add_parser(
        "report", help="what a model saves for backward, before and after conversion", description=about
    )
    command.add_argument(
        "model",
        help="torchvision:NAME, timm:NAME or transformers:NAME, e.g. torchvision:mobilenet_v2; of transformers, NAME is a "
        "model on the Hugging Face Hub, of which only the configuration is downloaded, or a local folder",
    )
    command.add_argument("--batch", type=positive, default=1, help="images or sequences in a batch (default: %(default)s)")
    command.add_argument("--size", type=positive, default=224, help="height and width of an image (default: %(default)s)")
    command.add_argument("--tokens", type=positive, default=512, help="tokens in a sequence (default: %(default)s)")
    command.add_argument("--autocast", choices=["bfloat16", "float16"], help="count under torch.autocast with this dtype")
    command.add_argument("--recompute", action="store_true", help="report what is saved within recompute() too")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the numbers, in bytes, to this file too")
    command.add_argument("--chart", type=Path, metavar="FILE", help="draw a bar chart into this file, e.g. a PNG or SVG")
    commands.add_parser("info", help="versions, devices, and why the ops don't run on a GPU").set_defaults(info=True)
    arguments = parser.parse_args(argv)
    if "info" in arguments:
        return info()
    if "model" not in arguments:
        return demo.main()
    try:
        return report(arguments)
    except (ImportError, OSError, ValueError) as error:
        command.error(str(error))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # or `| head` would be an error
    sys.exit(main())
