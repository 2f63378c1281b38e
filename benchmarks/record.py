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


def write(path, result):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


class Rows(list):
    """A file's rows of models, in these models' order, each with the commit that it is of. Those of the chosen models go, and
    new ones are written as they come, with these facts of the run.
    """

    def __init__(self, path, models, chosen, **facts):
        result = json.loads(path.read_text()) if path.exists() else {"rows": []}
        others = set(models) - set(chosen)
        super().__init__({"commit": result["commit"], **row} for row in result["rows"] if row["model"] in others)
        self.path, self.models, self.facts = path, list(models), {**origin(), **facts}

    def add(self, row):
        self.append({"commit": self.facts["commit"], **row})
        self.sort(key=lambda row: self.models.index(row["model"]))
        write(self.path, {**self.facts, "rows": self})
