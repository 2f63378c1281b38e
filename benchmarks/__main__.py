"""Runs every case on the machine at hand, prints the table, writes benchmarks/results/<device>.json and draws it.

Exits with 1 where a row is below its target, with 2 where a result differs from PyTorch's.
"""

import argparse
import sys

from tabulate import tabulate
from tqdm import tqdm

from activations_cuda._load import has_gpu
from activations_cuda.memory import saved_bytes
from activations_cuda.recipes.verification import is_identical
from benchmarks import record
from benchmarks.cases import FLOAT, HALF, OPS, cpu_cases, gpu_cases, normal
from benchmarks.plot import draw
from benchmarks.timing import alternate, spread


def measure(case):
    if case.equal and not is_identical(case.ours(), case.reference()):
        print(f"{case.case}, {case.op}, {case.x.dtype}, {case.x.numel()} elements: not equal to {case.reference_name}")
        sys.exit(2)
    ours, reference = alternate(case.clock, case.ours, case.reference)
    return {
        "case": case.case,
        "op": case.op,
        "dtype": str(case.x.dtype).removeprefix("torch."),
        "numel": case.x.numel(),
        "reference": case.reference_name,
        "ours_us": round(ours.median, 3),
        "reference_us": round(reference.median, 3),
        "ratio": round(reference.median / ours.median, 4),
        "spread": spread(reference, ours),
        "at_least": None if case.at_least is None else round(case.at_least, 4),
    }


def saved_rows(device):
    """The bytes saved for backward, in place of microseconds."""
    for name, op in OPS.items():
        for dtype in (FLOAT, HALF):
            x = normal(1 << 20, dtype, device).requires_grad_()
            ours, reference = (saved_bytes(function, x) / x.numel() for function in (op.ours, op.pytorch))
            yield {
                "case": "bytes saved per element",
                "op": name,
                "dtype": str(dtype).removeprefix("torch."),
                "numel": x.numel(),
                "reference": "F",
                "ours_bytes": ours,
                "reference_bytes": reference,
                "ratio": reference / ours,
                "at_least": x.element_size() / 0.125,
            }


def is_below(row):
    return row["at_least"] is not None and row["ratio"] < row["at_least"]


def table(rows):
    def cells(row):
        return [
            row["case"],
            row["op"],
            row["dtype"],
            row["numel"],
            row["reference"],
            row.get("ours_us", row.get("ours_bytes")),
            row.get("reference_us", row.get("reference_bytes")),
            f"{row['ratio']:.3f}",
            "-".join(f"{r:.2f}" for r in row.get("spread", [])),
            "" if row["at_least"] is None else f"{row['at_least']:.3f}",
            "BELOW" if is_below(row) else "",
        ]

    headers = ["case", "op", "dtype", "elements", "reference", "ours", "reference's", "ratio", "spread", "at least", ""]
    return tabulate([cells(row) for row in rows], headers=headers, disable_numparse=True)


def main():
    argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__).parse_args()
    device = "cuda" if has_gpu() else "cpu"
    rows = list(saved_rows(device))
    for case in tqdm(gpu_cases() if device == "cuda" else cpu_cases(), unit=" cases"):
        rows.append(measure(case))
    path = record.path()
    record.write(path, {**record.origin(), "rows": rows})
    draw(path)
    print(table(rows))
    below = sum(map(is_below, rows))
    print("\nours, reference's: median microseconds, or bytes; spread: the middle 80% of the rounds' ratios.")
    print(f"{len(rows)} rows, {below} below their targets.")
    print(f"Written to {path.name}.")
    sys.exit(1 if below else 0)


if __name__ == "__main__":
    main()
