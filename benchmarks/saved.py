"""The bytes that autograd saves for a training step of each model of `benchmarks.recompute`: unmodified, converted, by recipes
alone and by both.

Counted on fake tensors; a GPU is needed for its autocast alone. Writes benchmarks/results/<device>-saved.json.
"""

import torch
from tabulate import tabulate
from tqdm import tqdm

from activations_cuda import memory_report
from activations_cuda.scope_survey import ScopeSurvey
from benchmarks import record
from benchmarks.models import GIB, autocast
from benchmarks.recompute import CASES


def measure(name, case):
    with torch.device("meta"):
        model = case.model()
    batch = case.batch("meta")
    with autocast(case.dtype or torch.float32):
        report = memory_report(model, batch, recompute=True)
        alone = ScopeSurvey(model, (batch,), {}, names={}, convolutions=False).kept.total()
    ways = {"converted": report.after, "recipes": alone, "both": report.recompute}
    return {
        "model": name,
        "gib": round(report.before / GIB, 3),
        **{way: round(size / report.before, 4) for way, size in ways.items()},
    }


def main():
    cases = {name: case for name, case in CASES.items() if not case.convolutions and not case.time_at_most}
    rows = [measure(name, case) for name, case in tqdm(cases.items(), unit=" models")]
    record.write(record.path("-saved"), {**record.origin(), "rows": rows})
    print(tabulate(rows, headers="keys"))


if __name__ == "__main__":
    main()
