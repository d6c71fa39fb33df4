"""Times fxmem against `MemTracker` on the same step, and its command against `import torch`.

    python -m benchmarks.speed [--rounds 3] [-o docs/results/speed.md]

Both analyse the same fake step; they take turns within one run, after one warm-up each.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.cases import import_torchvision
from benchmarks.stamp import put_page, write_stamp

MODELS = ("resnet50", "densenet121")
SHAPE = (8, 3, 224, 224)
COMMAND = "python -m benchmarks.speed -o docs/results/speed.md"
PROCESSES = {
    "`import torch`": ["-c", "import torch"],
    "`fxmem analyze` of ResNet-50": [
        *("-m", "fxmem", "analyze", "examples/resnet.py:ResNet50", "--device", "cpu"),
        *("--input", "x".join(map(str, SHAPE))),
    ],
}
_LEGEND = """\
Two steps of batch 8 at 224x224 on fake tensors, for the CPU, by fxmem and by
`torch.distributed._tools.mem_tracker.MemTracker`, in turns after one warm-up of each.
"""


def track(name: str) -> int:
    """Takes two fake steps under torch's own tracker; returns its peak."""
    models = import_torchvision().models
    with FakeTensorMode():
        model = models.get_model(name, weights=None)
        inputs = torch.randn(SHAPE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tracker = MemTracker()
        tracker.track_external(model, optimizer, inputs)
        with tracker:
            for _ in range(2):
                optimizer.zero_grad(set_to_none=True)
                output = model(inputs)
                loss = output.sum()
                loss.backward()
                optimizer.step()
                del output, loss
                tracker.reset_mod_stats()  # it refuses a second step otherwise
        peak: dict[Any, dict[str, int]] = tracker.get_tracker_snapshot("peak")
    return sum(snapshot["Total"] for snapshot in peak.values())


def analyse(name: str) -> int:
    """Analyses the same step with fxmem; returns its peak."""
    import fxmem

    with torch.device("meta"):
        model = import_torchvision().models.get_model(name, weights=None)
    shape = "x".join(map(str, SHAPE))
    return int(fxmem.analyze(model, (shape,), optimizer="sgd", device="cpu").peak_bytes)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the seconds of one call, and its result."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def compare(name: str, rounds: int) -> list[str]:
    """Returns a row: both medians and their ratio."""
    track(name), analyse(name)
    theirs: list[float] = []
    ours: list[float] = []
    for _ in range(rounds):
        seconds, their_peak = timed(lambda: track(name))
        theirs.append(seconds)
        seconds, our_peak = timed(lambda: analyse(name))
        ours.append(seconds)
    ratio = statistics.median(theirs) / statistics.median(ours)
    return [
        name,
        f"{statistics.median(theirs):.2f}",
        f"{statistics.median(ours):.2f}",
        f"{ratio:.1f}",
        f"{their_peak / 2**20:.1f}",
        f"{our_peak / 2**20:.1f}",
    ]


def time_process(arguments: Sequence[str], rounds: int) -> float:
    """Returns the median seconds of a Python process, once the file cache is filled."""

    def run() -> None:
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)

    run()
    return statistics.median(timed(run)[0] for _ in range(rounds))


def main() -> None:
    """Prints both comparisons as a page, or writes the page to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="repetitions; the median counts")
    parser.add_argument("-o", "--output", type=Path, help="write there, not to stdout")
    options = parser.parse_args()
    rows = [compare(name, options.rounds) for name in MODELS]
    headers = ["model", "MemTracker s", "fxmem s", "ratio", "MemTracker MiB", "fxmem MiB"]
    times = [(name, f"{time_process(p, options.rounds):.2f}") for name, p in PROCESSES.items()]
    page = "\n\n".join(
        [
            "# Speed",
            f"{write_stamp(COMMAND)} Seconds are the medians of {options.rounds}.",
            _LEGEND.strip(),
            tabulate(rows, headers, "github", disable_numparse=True),
            "Whole processes, from a warm file cache:",
            tabulate(times, ["process", "s"], "github", disable_numparse=True),
            "",
        ]
    )
    put_page(page, options.output)


if __name__ == "__main__":
    main()
