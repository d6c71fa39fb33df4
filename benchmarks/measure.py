"""Measures what PyTorch really does in the second step of each case, without fxmem.

    python -m benchmarks.measure [NAME ...] [--mode MODE] [--remeasure]

Each case is measured in a process of its own and the results are kept as JSON, by case and mode.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cases import Case
from benchmarks.live_tensors import LiveTensors
from benchmarks.models import CASES, find
from benchmarks.step import MODES, Mode, Step

SCHEMA = 3
THREADS = 2  # scratch memory of some kernels is per thread, so the number is part of the result
CACHE = Path(__file__).parent / ".cache" / torch.__version__
STEP_MARK = "fxmem measured step"

Result = dict[str, Any]


@contextmanager
def no_collector() -> Iterator[None]:
    """Keeps the cycle collector out of the step, so that two measurements agree."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure_tensors(case: Case, mode: Mode, *, eager_adds: bool) -> Result:
    """Peak of live tensor bytes under a dispatch mode."""
    step = Step(case, mode)
    live = LiveTensors(eager_adds=eager_adds)
    kinds: Counter[str] = Counter()
    for kind, tensor in step.resident():
        before = live.live_bytes
        live.add(tensor)
        kinds[kind] += live.live_bytes - before
    with no_collector(), live.watch():
        start = live.live_bytes
        step.run()
        step.release()
        if step.optimizer is None:
            kinds["other"] = live.live_bytes - start  # what the model itself keeps between steps
        else:
            kinds["optimizer_state"] = live.live_bytes - start
        live.reset_peak()
        resident_bytes = live.live_bytes
        step.run()
        peak_bytes = live.peak_bytes
    return {
        "peak_bytes": peak_bytes,
        "peak_at": live.peak_at,
        "resident_bytes": resident_bytes,
        "resident": {kind: nbytes for kind, nbytes in kinds.items() if nbytes},
        "engine_adds": live.engine_adds,
        "in_place_adds": live.in_place_adds,
    }


def measure_allocator(case: Case, mode: Mode) -> Result:
    """Peak of the CPU allocator's own events; kernels' scratch memory is in it.

    The profiler runs from before the model is built: it does not report the release of a block
    whose allocation it did not see, and what is live when the step starts is then a sum of
    events as well.
    """
    with no_collector(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step = Step(case, mode)
        step.run()
        step.release()
        with record_function(STEP_MARK):
            step.run()
    return read_events(prof)


def read_events(prof: profile) -> Result:
    """Reads the peak of the step that is marked in a profile of all that came before it."""
    events = prof.profiler.kineto_results.events()  # type: ignore[union-attr]
    mark = next(e for e in events if e.name() == STEP_MARK)
    start, end = mark.start_ns(), mark.start_ns() + mark.duration_ns()
    memory = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    memory.sort(key=lambda event: event[0])  # stable: equal times keep the order of recording
    ties = sum(a[0] == b[0] for a, b in pairwise(memory))
    resident = peak = live = sum(nbytes for at, nbytes in memory if at < start)
    peak_at = start
    for at, nbytes in memory:
        if start <= at <= end:
            live += nbytes
            if live > peak:
                peak, peak_at = live, at
    around = [e for e in events if e.start_ns() <= peak_at <= e.start_ns() + e.duration_ns()]
    names = [e.name() for e in sorted(around, key=lambda e: e.start_ns())]
    return {
        "peak_bytes": peak,
        "peak_at": [name for name in names if name not in (STEP_MARK, "[memory]")],
        "resident_bytes": resident,
        "events": len(memory),
        "tied_events": ties,
    }


def measure_saved(case: Case, mode: Mode) -> Result:
    """The storages that autograd saves in forward and loss, in the order of their first saving."""
    step = Step(case, mode)
    step.run()
    step.release()
    kinds = {t.untyped_storage()._cdata: kind for kind, t in step.resident()}
    saved: dict[int, Result] = {}
    kept: list[torch.Tensor] = []  # keeps addresses from being used again

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.append(tensor.detach())
        entry = {
            "nbytes": storage.nbytes(),
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "kind": kinds.get(storage._cdata, "activation"),
        }
        saved.setdefault(storage._cdata, entry)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    step.run(forward=hooks)
    entries = list(saved.values())
    activations = [e["nbytes"] for e in entries if e["kind"] == "activation"]
    return {"storages": entries, "saved_bytes": sum(activations)}


def measure_flops(case: Case, mode: Mode) -> Result:
    """FLOPs of forward (with the loss) and of backward, by torch's own counter."""
    step = Step(case, mode)
    step.run()
    step.release()
    forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
    step.run(forward=forward, backward=backward)
    return {
        "forward_flops": forward.get_total_flops(),
        "backward_flops": backward.get_total_flops() if mode != "infer" else 0,
    }


def measure_time(case: Case, mode: Mode) -> Result:
    """Seconds of the undisturbed second step."""
    step = Step(case, mode)
    step.run()
    step.release()
    start = time.perf_counter()
    step.run()
    return {"seconds": time.perf_counter() - start}


MEASUREMENTS: dict[str, Callable[[Case, Mode], Result]] = {
    "time": measure_time,
    "under_mode": lambda case, mode: measure_tensors(case, mode, eager_adds=False),
    "tensors": lambda case, mode: measure_tensors(case, mode, eager_adds=True),
    "allocator": measure_allocator,
    "saved": measure_saved,
    "flops": measure_flops,
}


def measure_here(case: Case, mode: Mode) -> Result:
    """Takes all measurements of a case in this process; a failure is a result too."""
    result: Result = {"schema": SCHEMA, "case": case.name, "mode": mode, "threads": THREADS}
    result["torch"] = torch.__version__
    for name, measurement in MEASUREMENTS.items():
        try:
            result[name] = measurement(case, mode)
        except Exception as error:
            result[name] = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
    return result


def _path(case: str, mode: Mode) -> Path:
    return CACHE / f"{case}.{mode.replace('+', '-')}.json"


def cached(case: str, mode: Mode) -> Result | None:
    """Returns the kept result, if it was made by this version with this torch."""
    path = _path(case, mode)
    if not path.exists():
        return None
    result: Result = json.loads(path.read_text())
    current = (SCHEMA, THREADS, torch.__version__)
    return result if (result["schema"], result["threads"], result["torch"]) == current else None


def measured(case: str, mode: Mode, *, remeasure: bool = False) -> Result:
    """Returns the measurements of a case, from the cache or from a fresh process.

    A process measures all modes of its case, since most of its time goes into starting.
    """
    result = None if remeasure else cached(case, mode)
    if result is None:
        _path(case, mode).unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.measure", "--here", case]
        patient = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}  # do not spin on a shared machine
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=patient)
        result = cached(case, mode)
        if result is None:
            lines = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
            raise RuntimeError(f"measuring {case} failed: {lines[-1]}")
    return result


def main() -> None:
    """Measures the named cases, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="cases; default all")
    parser.add_argument("--remeasure", action="store_true", help="ignore what is kept")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name in options.names or [case.name for case in CASES]:
        if options.here:
            torch.set_num_threads(THREADS)
            CACHE.mkdir(parents=True, exist_ok=True)
            for mode in MODES:
                result = measure_here(find(name), mode)
                _path(name, mode).write_text(json.dumps(result, indent=1))
            continue
        stale = options.remeasure
        for mode in MODES:
            result = measured(name, mode, remeasure=stale)
            stale = False  # one process has made all three
            print(summary(result), flush=True)


def summary(result: Result) -> str:
    """Returns one line: the peaks of a result, and how far they are apart."""

    def peak(name: str) -> int:
        return int(result[name].get("peak_bytes", 0))

    tensors = peak("tensors") or 1
    parts = {name: result[name] for name in MEASUREMENTS}
    errors = [f"{name}: {part['error']}" for name, part in parts.items() if "error" in part]
    return (
        f"{result['case']:26s} {result['mode']:10s} tensors {tensors / 2**20:9.3f} MiB"
        f"  mode {100 * (peak('under_mode') / tensors - 1):+7.3f} %"
        f"  allocator {100 * (peak('allocator') / tensors - 1):+8.3f} %"
        f"  adds {result['tensors'].get('in_place_adds')}/{result['tensors'].get('engine_adds')}"
        f"  {' '.join(errors)}"
    )


if __name__ == "__main__":
    main()
