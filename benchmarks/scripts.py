"""Compares the recorded steps of training scripts with what the real scripts allocate.

    python -m benchmarks.scripts SCRIPT [ARGUMENT ...] [--steps N]

The real script runs on the CPU under PyTorch's profiler, which sees every allocation and free,
until its optimizers have stepped N times; then ``fxmem run --device cpu`` does, in a process each.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import runpy
import subprocess
import sys
import time
import weakref
from typing import Any

import torch
from tabulate import tabulate
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.cases import import_torchvision

_MARK = "end of a step"


class _Enough(BaseException):
    pass


def measure_script(path: str, arguments: list[str], steps: int) -> list[int]:
    """Runs a script on the CPU and measures the peak of each step, in bytes."""
    optimizers: list[weakref.ref[Optimizer]] = []
    stepped: set[int] = set()
    count = 0
    original: Any = Optimizer.__init__

    def see(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        optimizers.append(weakref.ref(optimizer))

    def end(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        stepped.add(id(optimizer))
        if all(ref() is None or id(ref()) in stepped for ref in optimizers):
            end_step()

    def end_step() -> None:
        nonlocal count
        stepped.clear()
        gc.collect()
        with record_function(_MARK):
            count += 1
        if count == steps:
            raise _Enough

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        result = engine(*args, **kwargs)
        if not optimizers and kwargs.get("accumulate_grad"):
            end_step()
        return result

    engine = torch.autograd._engine_run_backward
    torch.autograd._engine_run_backward = run_backward
    Optimizer.__init__ = see  # type: ignore[method-assign]
    handle = register_optimizer_step_post_hook(end)
    before = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [path, *arguments], os.path.dirname(os.path.abspath(path))
    gc.disable()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        try:
            runpy.run_path(path, run_name="__main__")
        except (_Enough, SystemExit):
            pass
        finally:
            handle.remove()
            sys.argv, sys.path[0] = before
            Optimizer.__init__ = original  # type: ignore[method-assign]
            torch.autograd._engine_run_backward = engine
            gc.enable()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    ends = sorted(event.start_ns() for event in events if event.name() == _MARK)
    memory = sorted(
        ((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"),
        key=lambda event: event[0],
    )
    peaks, live, step = [0] * len(ends), 0, 0
    for at, nbytes in memory:
        while step < len(ends) and at > ends[step]:
            step += 1
            if step < len(ends):
                peaks[step] = live
        live += nbytes
        if step < len(ends):
            peaks[step] = max(peaks[step], live)
    return peaks


def predict_script(path: str, arguments: list[str], steps: int, device: str) -> list[int]:
    """Records the steps of a script, and returns their peaks in bytes."""
    import fxmem

    run = fxmem.run(path, arguments, steps=steps, device=device)
    return [step.peak_bytes for step in run.steps]


def _run_apart(what: str, arguments: argparse.Namespace) -> tuple[list[int], float]:
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.scripts", "--only", what]
    command += ["--steps", str(arguments.steps), arguments.script, *arguments.arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    peaks: list[int] = json.loads(done.stdout.splitlines()[-1])
    return peaks, time.monotonic() - began


def main() -> None:
    """Prints a table with a row for each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", choices=["real", "cpu", "cuda"])
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    script = arguments.script, arguments.arguments, arguments.steps
    if arguments.only is not None:
        torch.set_num_threads(2)
        import_torchvision()
        is_real = arguments.only == "real"
        peaks = measure_script(*script) if is_real else predict_script(*script, arguments.only)
        print("\n" + json.dumps(peaks))
        return
    real, _ = _run_apart("real", arguments)
    found, _ = _run_apart("cpu", arguments)
    on_gpu, elapsed_s = _run_apart("cuda", arguments)
    rows = [
        (step, measured, recorded, f"{100 * (recorded / measured - 1):+.3f} %", gpu)
        for step, (measured, recorded, gpu) in enumerate(zip(real, found, on_gpu, strict=True), 1)
    ]
    print(tabulate(rows, ["step", "measured", "fxmem, CPU", "differs by", "fxmem, CUDA"]))
    print(f"The answer for CUDA took {elapsed_s:.1f} s.")


if __name__ == "__main__":
    main()
