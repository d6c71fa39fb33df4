"""Times fxmem against `MemTracker` on the same step, and its command against `import torch`.

    python -m benchmarks.speed [--rounds 3] [--command "fxmem analyze ..."]

Both analyse the same fake step; they take turns within one run, after one warm-up each.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.cases import import_torchvision

MODELS = ("resnet50", "densenet121")
SHAPE = (8, 3, 224, 224)
COMMAND = (
    f"{shlex.quote(sys.executable)} -m fxmem analyze examples/resnet.py:ResNet50"
    f" --input {'x'.join(map(str, SHAPE))} --device cpu"
)


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


def wall_seconds(command: str, rounds: int) -> float:
    """Returns the median time of a whole process.

    Raises:
        subprocess.CalledProcessError: The command failed.
    """

    def run() -> None:
        subprocess.run(shlex.split(command), check=True, stdout=subprocess.DEVNULL)

    run()  # fills the file cache
    return statistics.median(timed(run)[0] for _ in range(rounds))


def main() -> None:
    """Prints both comparisons as Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="repetitions; the median counts")
    parser.add_argument("--command", default=COMMAND, help="the command line to time")
    options = parser.parse_args()
    rows = [compare(name, options.rounds) for name in MODELS]
    headers = ["model", "MemTracker s", "fxmem s", "ratio", "MemTracker MiB", "fxmem MiB"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    bare = wall_seconds(f"{shlex.quote(sys.executable)} -c 'import torch'", options.rounds)
    command = wall_seconds(options.command, options.rounds)
    print(
        f"\n`import torch`: {bare:.2f} s; `fxmem analyze`: {command:.2f} s ({command / bare:.2f}x)"
    )


if __name__ == "__main__":
    main()
