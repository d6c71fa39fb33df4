"""Measures real steps on a GPU: peaks, and for some models every event of the allocator.

    python -m benchmarks.cuda_measure [--out tests/data/cuda] [--only TEXT] [--minutes 9]
        [--shard I/N]

Needs torch with CUDA and nothing of fxmem; runs under torch 2.11 to 2.13. Cases that are in the
output already are left alone, so that a run that was cut off goes on where it stopped. With
``--shard``, N processes share the GPU: what a process takes outside the allocator is then unknown.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import platform
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import SEED
from benchmarks.cuda_cases import CUDA_CASES, CudaCase
from benchmarks.step import default_loss

SCHEMA = 1
DEVICE = "cuda"
MEMORY_DEVICE = torch.autograd.DeviceType.CUDA
MAX_TRACE_EVENTS = 1_000_000
SCALE = 1.0

Result = dict[str, Any]


class CudaStep:
    """A model on the GPU, its inputs and its optimizer."""

    def __init__(self, case: CudaCase) -> None:
        built = case.build(case.batch)
        self.case = case
        self.model = built.model().train(case.optimizer is not None).to(DEVICE)
        torch._dynamo.reset()
        torch._functorch.config.activation_memory_budget = case.activation_memory_budget or 1.0
        case.compile_model(self.model)
        self.args, self.kwargs = _to_device(built.inputs())
        self.optimizer = _make_optimizer(case.optimizer, self.model)
        # The usual scale overflows in float16: the first steps would be skipped, without states.
        is_scaled = case.precision == "fp16" and case.optimizer is not None
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=SCALE) if is_scaled else None
        self.output: Any = None
        self.loss: torch.Tensor | None = None

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of forward and loss."""
        if self.case.precision == "fp32":
            return nullcontext()
        dtype = torch.bfloat16 if self.case.precision == "bf16" else torch.float16
        return torch.autocast(DEVICE, dtype=dtype)

    def run(self) -> Iterator[str]:
        """One step; stops after each of its phases, naming it."""
        torch.manual_seed(SEED)
        training = self.optimizer is not None
        with self.autocast(), torch.set_grad_enabled(training):
            self.output = self.model(*self.args, **self.kwargs)
            if training:
                self.loss = default_loss(self.output)
        if self.optimizer is None or self.loss is None:
            yield "forward"
            return
        scaled = self.loss if self.scaler is None else self.scaler.scale(self.loss)
        yield "forward"
        scaled.backward()
        del scaled
        yield "backward"
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        yield "optimizer"

    def release(self) -> None:
        """Releases output, loss and gradients between two steps."""
        self.output = self.loss = None
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        gc.collect()


def _to_device(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(DEVICE).requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_to_device, value))
    if isinstance(value, dict):
        return {key: _to_device(item) for key, item in value.items()}
    return value


def _make_optimizer(name: str | None, model: torch.nn.Module) -> torch.optim.Optimizer | None:
    if name is None:
        return None
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-4)
    return torch.optim.Adam(model.parameters(), lr=1e-4, fused=name == "adam-fused" or None)


def measure_case(case: CudaCase, alone: bool = True) -> Result:
    """Peaks of the first and the second step, phase by phase.

    Where the process is ``alone`` on the GPU, what it takes outside the allocator too. ``skipped``
    says that the scaler left the optimizer out, as gradients were not finite.
    """
    with _clean_device():
        before = torch.cuda.memory_allocated()
        step = CudaStep(case)
        result: Result = {
            "before_bytes": before,
            "model_and_inputs_bytes": torch.cuda.memory_allocated(),
            "first": _measure_step(step),
        }
        step.release()
        result["between_steps_bytes"] = torch.cuda.memory_allocated()
        result["second"] = _measure_step(step)
        if alone:
            free, total = torch.cuda.mem_get_info()
            result["outside_the_allocator_bytes"] = total - free - torch.cuda.memory_reserved()
        result["skipped"] = step.scaler is not None and step.scaler.get_scale() < SCALE
        return result


def _measure_step(step: CudaStep) -> Result:
    torch.cuda.reset_peak_memory_stats()
    phases: Result = {}
    peaks: list[tuple[int, int, int]] = []
    for phase in step.run():
        stats = torch.cuda.memory_stats()
        peak = tuple(stats[f"{kind}_bytes.all.peak"] for kind in _KINDS)
        peaks.append(peak)  # type: ignore[arg-type]
        phases[phase] = {
            "peak_bytes": peak[0],
            "peak_requested_bytes": peak[2],
            "allocated_bytes": stats["allocated_bytes.all.current"],
            "reserved_bytes": stats["reserved_bytes.all.current"],
        }
        torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    highest = [max(values) for values in zip(*peaks, strict=True)]
    named = zip(("peak_bytes", "peak_reserved_bytes", "peak_requested_bytes"), highest, strict=True)
    return {**dict(named), "phases": phases}


_KINDS = ("allocated", "reserved", "requested")


def trace_case(case: CudaCase) -> Result:
    """Every event of the allocator over model, inputs and two steps, and operators of the second.

    Returns:
        ``events``: action, address, bytes and the index of its innermost Python line in
        ``lines``. ``marks``: how many events came before each phase. ``operators``: bytes and
        innermost operators of the profiler's own memory events in a third step, which repeats
        the second.
    """
    with _clean_device():
        torch.cuda.memory._record_memory_history(
            "all", context="all", stacks="python", max_entries=MAX_TRACE_EVENTS
        )
        try:
            marks = {"begin": 0}
            step = CudaStep(case)
            marks["step 1"] = _count_events()
            for phase in step.run():
                marks[f"step 1 {phase}"] = _count_events()
            step.release()
            marks["step 2"] = _count_events()
            for phase in step.run():
                marks[f"step 2 {phase}"] = _count_events()
            torch.cuda.synchronize()
            history = torch.cuda.memory._snapshot()["device_traces"][0]
        finally:
            torch.cuda.memory._record_memory_history(None)
        step.release()
        operators = [] if step.case.compiled else _profile_step(step)
    lines: dict[str, int] = {}
    events = [
        [e["action"], e["addr"], e["size"], lines.setdefault(_innermost_line(e), len(lines))]
        for e in history
        if "addr" in e
    ]
    return {"marks": marks, "events": events, "lines": list(lines), "operators": operators}


def _count_events() -> int:
    torch.cuda.synchronize()
    return len(torch.cuda.memory._snapshot()["device_traces"][0])


def _innermost_line(event: Result) -> str:
    for frame in event.get("frames", ()):
        if frame["filename"].endswith(".py"):
            return f"{'/'.join(Path(frame['filename']).parts[-3:])}:{frame['line']}"
    return ""


def _profile_step(step: CudaStep) -> list[Result]:
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, profile_memory=True) as profiler:
        for _ in step.run():
            pass
        torch.cuda.synchronize()
    kineto = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    on_cpu = [e for e in kineto if e.device_type() == torch.autograd.DeviceType.CPU]
    spans = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.start_thread_id(), e.name())
        for e in on_cpu
        if e.name() != "[memory]"
    )
    memory = [
        (e.start_ns(), e.start_thread_id(), e.nbytes())
        for e in kineto
        if e.name() == "[memory]" and e.device_type() == MEMORY_DEVICE
    ]
    return list(_attribute(spans, sorted(memory)))


def _attribute(
    spans: list[tuple[int, int, int, str]], memory: list[tuple[int, int, int]]
) -> Iterator[Result]:
    """The operators that run around each event in its thread, outermost first."""
    stacks: dict[int, list[tuple[int, str]]] = {}
    at = 0
    for time_ns, thread, nbytes in memory:
        while at < len(spans) and spans[at][0] <= time_ns:
            start, end, owner, name = spans[at]
            stack = stacks.setdefault(owner, [])
            while stack and stack[-1][0] <= start:
                stack.pop()
            stack.append((end, name))
            at += 1
        stack = stacks.get(thread, [])
        names = [name for end, name in stack if end >= time_ns]
        yield {"nbytes": nbytes, "operators": names[-3:]}


@contextmanager
def _clean_device() -> Iterator[None]:
    """Starts from an empty allocator, without the workspaces that libraries keep."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def describe_machine() -> Result:
    """Describes the environment that the numbers depend on."""
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    return {
        "schema": SCHEMA,
        "gpu": properties.name,
        "capability": list(torch.cuda.get_device_capability()),
        "multiprocessors": properties.multi_processor_count,
        "total_bytes": properties.total_memory,
        "context_bytes": total - free - torch.cuda.memory_reserved(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        **{name: _find_version(name) for name in ("torchvision", "timm", "transformers")},
    }


def _find_version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def main() -> None:
    """Measures what is missing; writes after each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("tests/data/cuda"))
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after so long")
    parser.add_argument("--shard", default="0/1", help="which part of the cases, of how many")
    options = parser.parse_args()
    shard, shards = map(int, options.shard.split("/"))
    deadline = time.monotonic() + 60 * options.minutes
    torch.zeros(1, device=DEVICE)
    machine = describe_machine()
    slug = f"{machine['gpu']}-torch{machine['torch']}".replace(" ", "-").replace("+", "-")
    folder = options.out / slug
    folder.mkdir(parents=True, exist_ok=True)
    if not (about := folder / "machine.json").exists():  # the first process was alone
        about.write_text(json.dumps(machine, indent=1) + "\n")
    ordered = sorted(CUDA_CASES, key=lambda case: (not case.traced, not case.compiled))
    cases = ordered[shard::shards]
    for case in cases:
        target = folder / f"{case.name}.json.gz"
        if options.only not in case.name or target.exists():
            continue
        if time.monotonic() > deadline:
            print("out of time; run again for the rest")
            return
        result = {"name": case.name, **_measure_or_explain(case, shards == 1)}
        with gzip.GzipFile(target, "wb", mtime=0) as file:
            file.write(json.dumps(result).encode())
        second = result.get("second", {})
        print(case.name, second.get("peak_bytes"), second.get("peak_reserved_bytes"), flush=True)


def _measure_or_explain(case: CudaCase, alone: bool = True) -> Result:
    try:
        result = measure_case(case, alone)
        if case.traced:
            result["trace"] = trace_case(case)
        return result
    except Exception:
        return {"error": traceback.format_exc(limit=3)}


if __name__ == "__main__":
    main()
