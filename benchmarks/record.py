"""Where results lie, and what each says of the machine and the build that it comes from."""

import json
import re
from pathlib import Path

import torch

import activations_cuda
from activations_cuda._load import has_gpu

RESULTS = Path(__file__).parent / "results"


def device_name():
    if has_gpu():
        return torch.cuda.get_device_name()
    model = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{model[1] if model else 'CPU'}, {torch.get_num_threads()} threads"


def origin():
    info = activations_cuda.build_info()
    cuda = torch.version.cuda if has_gpu() else None
    return {"device": device_name(), "torch": torch.__version__, "cuda": cuda, "commit": info["commit"]}


def path(kind=""):
    """The file of this device's results."""
    name = re.sub(r"[^a-z0-9]+", "-", device_name().lower()).strip("-")
    return RESULTS / f"{name}{kind}.json"


def other_rows(path, models, chosen):
    """The rows that the file has of these models but the chosen ones, each with the commit that it is of."""
    result = json.loads(path.read_text()) if path.exists() else {"rows": []}
    return [{"commit": result["commit"], **row} for row in result["rows"] if row["model"] in set(models) - set(chosen)]


def write(path, result):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
