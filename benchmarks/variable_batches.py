"""Compares the fullest of a thousand batches with what each really takes.

    python -m benchmarks.variable_batches [-o docs/results/variable_batches.md]

A small Transformer trains on the CPU on 8,000 texts of log-normal lengths, in batches that a loader
pads, under PyTorch's profiler, which sees every allocation and free. ``fxmem run`` then records the
same epoch, and once more with ``--fullest``, which reads the loader without running the model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.measure import THREADS
from benchmarks.scripts import measure_script
from benchmarks.stamp import put_page, write_stamp

COUNT = 1000
SCRIPT = """
import random
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

random.seed(0)
torch.manual_seed(0)
device = sys.argv[1]
lengths = [max(4, int(random.lognormvariate(3.5, 0.7))) for _ in range(8000)]
texts = [torch.randint(0, 500, (length,)) for length in lengths]


def collate(rows):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
model = nn.Sequential(nn.Embedding(500, 64), nn.TransformerEncoder(layer, 1), nn.Linear(64, 500))
model = model.to(device)
optimizer = torch.optim.AdamW(model.parameters())
for texts in DataLoader(texts, 8, shuffle=True, collate_fn=collate):
    texts = texts.to(device)
    F.cross_entropy(model(texts).flatten(0, 1), texts.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_METHOD = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip().replace("``", "`")


def find_peaks(what: str, path: str) -> Any:
    """Finds the peak of each step in bytes; of the fullest batches, by their names."""
    if what == "real":
        return measure_script(path, ["cpu"], COUNT)
    import fxmem

    if what == "every":
        return [
            step.peak_bytes for step in fxmem.run(path, ["cpu"], device="cpu", steps=COUNT).steps
        ]
    run = fxmem.run(path, ["cpu"], device="cpu", fullest=True)
    return {step.setup.window.partition(", batch ")[2]: step.peak_bytes for step in run.steps}


def write_page(real: list[int], every: list[int], fullest: dict[str, int]) -> str:
    """Writes the results."""
    rows: list[tuple[Any, ...]] = [
        (f"{at + 1:,}", real[at], every[at], every[at] - real[at]) for at in range(49, COUNT, 50)
    ]
    options: Any = {"tablefmt": "github", "intfmt": ",", "disable_numparse": [0]}
    steps = tabulate(rows, ["batch", "measured, bytes", "fxmem, bytes", "differs by"], **options)
    chosen = []
    for name, found in fullest.items():
        at = int(name.partition(" ")[0].replace(",", "")) - 1
        larger = sum(each > real[at] for each in real)
        chosen.append((f"{at + 1:,}", real[at], found, larger))
    headers = ["batch", "measured, bytes", "fxmem --fullest, bytes", "batches that took more"]
    equal = sum(a == b for a, b in zip(real, every, strict=True))
    return (
        "\n\n".join(
            (
                "# Batches of variable length",
                _METHOD,
                f"Of {COUNT:,} steps fxmem gives {equal:,} to the byte; every fiftieth:",
                steps,
                "The batches that `--fullest` chose:",
                tabulate(chosen, headers, **options),
                write_stamp("python -m benchmarks.variable_batches"),
            )
        )
        + "\n"
    )


def main() -> None:
    """Prints or writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs=2, metavar=("WHAT", "SCRIPT"))
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.only is not None:
        torch.set_num_threads(THREADS)
        print("\n" + json.dumps(find_peaks(*arguments.only)))
        return
    found = []
    for what in ("real", "every", "fullest"):
        path = Path(__file__).parent / ".cache" / "variable_batches.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(SCRIPT)
        command = [sys.executable, "-m", "benchmarks.variable_batches", "--only", what, str(path)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    put_page(write_page(*found), arguments.output)


if __name__ == "__main__":
    main()
