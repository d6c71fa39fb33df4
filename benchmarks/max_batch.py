"""The largest size that `fxmem.max_batch` finds, against a scan of all sizes.

    python -m benchmarks.max_batch [--only NAME] [-o docs/results/max_batch.md]

The scan analyses the step with every size from 1 to a quarter beyond the answer, and asks the
allocator's simulation each time.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

import fxmem
from benchmarks import models
from benchmarks.stamp import write_stamp
from fxmem.gpus import CONTEXT_BYTES
from fxmem.planning.outcome import find_shortage
from fxmem.units import parse_bytes

COMMAND = "python -m benchmarks.max_batch -o docs/results/max_batch.md"
_LEGEND = """\
A training step on CUDA with AdamW and no margin. `found` is the answer of `fxmem.max_batch`, and
`scanned` the largest size that fits of all up to a quarter beyond it.
`analyses` is how many steps were analysed for the one, and `of all` for the other. The allocator's
blocks lie otherwise with each size, so a size may fit although a smaller one does not: `without`
is the smallest that does not fit, if a larger one does.
"""


@dataclass(frozen=True)
class Row:
    """A model, the axis that varies, and a memory into which a few dozen sizes go."""

    name: str  # of the case
    memory: str
    axis: str = "0"


ROWS = (
    Row("resnet18", "1600MiB"),
    Row("densenet121", "2GiB"),
    Row("mobilenet_v3_small", "1GiB"),
    Row("swin_t", "3GiB"),
    Row("timm_mixer", "1800MiB"),
    Row("hf_gpt2_labels", "800MiB"),
    Row("hf_gpt2_labels", "680MiB", "1"),
    Row("hf_bert_labels", "700MiB"),
    Row("lstm", "1GiB"),
    Row("transformer_encoder", "700MiB"),
    Row("unet", "1400MiB"),
    Row("unet", "1GiB", "2,3"),
)


def compare(row: Row) -> list[Any]:
    """Finds the largest size both ways, and counts seconds and analyses."""
    case = models.find(row.name)
    model, (args, kwargs) = case.model(), case.inputs()
    options: dict[str, Any] = {"optimizer": "adamw"}
    start = time.perf_counter()
    found = fxmem.max_batch(
        model, args, kwargs, memory=row.memory, axis=row.axis, margin=0, **options
    )
    seconds = time.perf_counter() - start
    scanned, tried, first_failure = scan(row, model, args, kwargs, found.batch, options)
    note = "" if first_failure is None or first_failure > scanned else str(first_failure)
    names = [row.name, row.memory, row.axis, found.batch, scanned, note]
    return [*names, found.analyses, tried, f"{seconds:.1f}", f"{time.perf_counter() - start:.0f}"]


def scan(
    row: Row, model: Any, args: Any, kwargs: Any, found: int, options: dict[str, Any]
) -> tuple[int, int, int | None]:
    """Scans all sizes: the largest that fits, how many ran, and the smallest that does not fit."""
    from fxmem.loading.inputs import find_axis, resize_inputs

    axis = find_axis(args, kwargs, row.axis)
    largest, tried, failure = 0, 0, None
    for size in range(1, found * 5 // 4 + 3):
        inputs = resize_inputs(args, kwargs, axis, size)
        try:
            analysis = fxmem.analyze(model, *inputs, **options)
        except fxmem.TraceError:
            continue  # a size that the model does not take
        tried += 1
        memory_bytes = parse_bytes(row.memory)
        if not find_shortage(analysis, None, memory_bytes, max(CONTEXT_BYTES)):
            largest = size
        elif failure is None:
            failure = size
    return largest, tried, failure


def main() -> None:
    """Prints the comparison as a page, or writes the page to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models with this in their names")
    parser.add_argument("-o", "--output", type=Path, help="write there, not to stdout")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for row in ROWS:
        if chosen.only in row.name:
            rows.append(compare(row))
            print(*rows[-1], flush=True)
    headers = [
        *("model", "memory", "axis", "found", "scanned", "without", "analyses", "of all"),
        *("seconds", "of all"),
    ]
    page = "\n\n".join(
        [
            "# The largest batch",
            write_stamp(COMMAND),
            _LEGEND.strip(),
            tabulate(rows, headers, "github", disable_numparse=True),
            "",
        ]
    )
    if chosen.output:
        chosen.output.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()
