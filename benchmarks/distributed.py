"""Compares the predicted memory of each rank with what real processes allocate.

    python -m benchmarks.distributed [--only NAME ...] [-o docs/results/distributed.md]

Each rank is a process, its group is gloo's, and PyTorch's profiler sees every allocation and free
of three steps, of which the third counts.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as ddp
from tabulate import tabulate
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.distributed_cases import CASES, DistributedCase, replicate_in_place
from benchmarks.stamp import write_stamp
from fxmem.analysis import Analysis
from fxmem.setup import Loop

_MARK = "measured step"
_STEPS = 3
_PATIENCE_S = 4e-3
_SMALL_BYTES = 128  # scalars that a dispatcher wraps, and a reducer's counts

_INTRODUCTION = """\
# Ranks of distributed steps

{stamp}

Small models on 2 and 4 ranks. Each rank is a process of a gloo group, and PyTorch's profiler sees
all allocations and frees of three steps. Compared is the peak of the third step, in bytes, with
`fxmem.analyze(model, args, mesh=..., parallelize=..., rank=..., device="cpu")`.

gloo gathers and reduces in buffers of its own, which NCCL does not have: a copy of the output of
each all-gather in the calling thread, another in gloo's thread, and a copy of the input of each
reduce-scatter (`ProcessGroupGloo.cpp`). The profiler shows them below `c10d::` and `gloo:`. They
are left out of the measured peak; the column beside it has them. Not predicted are the ranks in a
mesh, 4 bytes each, and the counts of DDP's reducer. `CPUOffloadPolicy` cannot be compared: a step
on the CPU has one memory. The last column compares the sizes of all that the step allocates, of
{small} bytes or more and outside of kernels.

"""


@dataclass(frozen=True)
class RankMeasurement:
    """Memory events of one rank's step, apart from those of gloo's own buffers.

    Attributes:
        resident_bytes: Live when the step begins.
        allocations: Sizes of what the step allocates, in order.
        inner: Those that are freed within the operator that made them.
        peak_bytes: The most that is live.
        peak_with_buffers: The most that is live, gloo's buffers included.
    """

    resident_bytes: int
    allocations: Sequence[int]
    inner: Sequence[int]
    peak_bytes: int
    peak_with_buffers: int


# -- on a rank -----------------------------------------------------------------------------------


def _take_step(
    model: nn.Module,
    x: Tensor,
    compute_loss: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    accumulate: int = 1,
    clip_grad: bool = False,
    reduce_each: bool = True,
) -> None:
    for micro_batch in range(accumulate):
        time.sleep(_PATIENCE_S)
        if not reduce_each:
            model.set_requires_gradient_sync(micro_batch == accumulate - 1)  # type: ignore[operator]
        output = model(x)
        loss = compute_loss(output)
        loss.backward()
    if clip_grad:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _take_steps(case: DistributedCase) -> set[int]:
    """Takes the steps, and returns the addresses of what is there before the last one.

    None under DDP, in place or not, whose reducer has tensors that no code of Python reaches.
    """
    addresses = set[int]()
    mesh = init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
    model, x, compute_loss = case.make_step()
    model = case.parallelize(model, mesh) or model
    optimizer = case.optimizer([p for p in model.parameters() if p.requires_grad])
    is_wrapped = isinstance(model, ddp.DistributedDataParallel)
    is_reduced = is_wrapped or case.parallelize is replicate_in_place
    for step in range(_STEPS):
        gc.collect()
        if step == _STEPS - 1 and not is_reduced:
            tensors = (each for each in gc.get_objects() if isinstance(each, Tensor))
            inner = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
            addresses = {tensor.untyped_storage().data_ptr() for tensor in inner}
        with record_function(_MARK) if step == _STEPS - 1 else contextlib.nullcontext():
            _take_step(model, x, compute_loss, optimizer, **case.loop)
        optimizer.zero_grad(set_to_none=True)  # so that no gradient is there before a step
    return addresses


@contextlib.contextmanager
def _wait_patiently() -> Iterator[None]:
    """Lets gloo's thread drop its tensors first: frees are not reported from there.

    DDP waits in C++ where it compares and synchronises parameters, which are equal here.
    """
    work, functional = dist.distributed_c10d.Work, torch.ops._c10d_functional
    wait, wait_tensor = work.wait, functional.wait_tensor

    def wait_patiently(*args: Any) -> Any:
        result = wait(*args)
        time.sleep(_PATIENCE_S)
        return result

    def wait_for_tensor(tensor: Any) -> Any:
        time.sleep(_PATIENCE_S)
        result = wait_tensor(tensor)
        time.sleep(_PATIENCE_S)
        return result

    work.wait, functional.wait_tensor = wait_patiently, wait_for_tensor
    try:
        with (
            mock.patch.object(ddp, "_verify_param_shape_across_processes"),
            mock.patch.object(ddp, "_sync_module_states"),
        ):
            yield
    finally:
        work.wait, functional.wait_tensor = wait, wait_tensor


def measure_rank(case: DistributedCase) -> RankMeasurement:
    """Measures the third step of a case on this rank of the default process group."""
    cpu = [ProfilerActivity.CPU]
    gc.collect()
    gc.disable()
    try:
        with _wait_patiently(), profile(activities=cpu, profile_memory=True, acc_events=True) as p:
            known = _take_steps(case)
    finally:
        gc.enable()
    memory: list[tuple[int, Any, bool, int]] = []  # time, fields, whether gloo's, operator
    trees = p.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    waiting: list[tuple[Any, bool, int]] = [(event, False, 0) for event in trees]
    start = end = 0
    while waiting:
        event, is_gloo, operator = waiting.pop()
        kind, fields = event.typed
        if kind == _EventType.Allocation:
            memory.append((event.start_time_ns, fields, is_gloo, operator))
        elif event.name == _MARK:
            start, end = event.start_time_ns, event.end_time_ns
        is_gloo = is_gloo or event.name.startswith(("c10d::", "gloo:"))
        operator = operator or (event.start_time_ns if event.name.startswith("aten::") else 0)
        waiting.extend((child, is_gloo, operator) for child in event.children)
    memory.sort(key=lambda event: event[0])
    live: dict[int, tuple[int, bool, int]] = {}  # by address
    own = buffers = resident = peak = peak_with_buffers = 0
    allocations, inner = list[int](), list[int]()
    for at, fields, is_gloo, operator in memory:
        if at > end:
            break
        if at >= start and known:  # gloo's thread has freed the others, unseen
            gone = [each for each in live if each not in known and not live[each][1]]
            own -= sum(live.pop(each)[0] for each in gone)
            resident, peak, peak_with_buffers, known = own, own, own, set()
        if at < start:
            buffers, resident = 0, own
        nbytes, address = fields.alloc_size, fields.ptr
        if address in live:  # freed, here or unseen before
            freed, was_gloo, maker = live.pop(address)
            own, buffers = (own, buffers - freed) if was_gloo else (own - freed, buffers)
            inner += [freed] if at >= start and operator and operator == maker else []
        if nbytes > 0:
            live[address] = nbytes, is_gloo, operator
            own, buffers = (own, buffers + nbytes) if is_gloo else (own + nbytes, buffers)
            allocations += [nbytes] if at >= start and not is_gloo else []
        if at < start:
            resident = peak = peak_with_buffers = own
        peak, peak_with_buffers = max(peak, own), max(peak_with_buffers, own + buffers)
    return RankMeasurement(resident, allocations, inner, peak, peak_with_buffers)


def _measure_here(
    rank: int, cases: Sequence[DistributedCase], world_size: int, folder: Path
) -> None:
    gc.collect()
    gc.freeze()  # what is imported takes long to look through
    for case in cases:
        store = dist.FileStore(str(folder / f"{case.name}.store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        result = json.dumps(asdict(measure_rank(case)))
        (folder / f"{case.name} {rank}.json").write_text(result)
        dist.destroy_process_group()


# -- around them ---------------------------------------------------------------------------------


def _run_ranks(cases: Sequence[DistributedCase], folder: Path) -> None:
    """Measures cases in forks of this process, which has no threads yet."""
    torch.set_num_threads(1)
    for world_size in sorted({case.world_size for case in cases}):
        chosen = [case for case in cases if case.world_size == world_size]
        arguments = (chosen, world_size, folder)
        start_processes(_measure_here, arguments, nprocs=world_size, start_method="fork")


def measure_cases(cases: Sequence[DistributedCase]) -> dict[str, list[RankMeasurement]]:
    """Measures every rank of cases, in as many processes as a case has ranks."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.distributed", "--only"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "9"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command += [*[case.name for case in cases], "--folder", name]
        subprocess.run(command, env=environment, check=True)
        return {
            case.name: [
                RankMeasurement(**json.loads((folder / f"{case.name} {rank}.json").read_text()))
                for rank in range(case.world_size)
            ]
            for case in cases
        }


def predict_rank(case: DistributedCase, rank: int) -> Analysis:
    """Analyses the step of one rank."""
    import fxmem

    model, x, compute_loss = case.make_step()
    return fxmem.analyze(
        model,
        (x,),
        mesh=case.mesh,
        parallelize=case.parallelize,
        rank=rank,
        device="cpu",
        optimizer=case.optimizer,
        loss=compute_loss,
        loop=Loop("plain", case.loop),
    )


def compare_allocations(analysis: Analysis, real: RankMeasurement) -> str:
    """Compares what is allocated in a step by size; "" where all is equal.

    Several blocks within a kernel may be predicted as their peak.
    """
    events = [event for event in analysis.timeline.events if event.delta_bytes > 0]
    ours, theirs = Counter(event.nbytes for event in events), Counter(real.allocations)
    workspaces = Counter(event.nbytes for event in events if event.storage is None)
    parts = []
    for word, sizes in (
        ("missing", theirs - ours - Counter(real.inner)),
        ("extra", ours - theirs - workspaces),
    ):
        large = [f"{n} of {size:,}" for size, n in sorted(sizes.items()) if size >= _SMALL_BYTES]
        parts += [f"{word}: {', '.join(large[::-1])}"] if large else []
    return "; ".join(parts)


def _compare_rank(case: DistributedCase, rank: int, real: RankMeasurement) -> tuple[Any, ...]:
    try:
        analysis = predict_rank(case, rank)
    except Exception as error:  # a case that cannot be analysed is a row too
        reason = (str(error).splitlines() or [type(error).__name__])[0][:100]
        return case.name, rank, "", real.peak_bytes, "", real.peak_with_buffers, reason
    ours, theirs = analysis.peak_bytes, real.peak_bytes
    tensors = compare_allocations(analysis, real) or "equal"
    return case.name, rank, ours, theirs, ours - theirs, real.peak_with_buffers, tensors


def main() -> None:
    """Writes a table with a row for each rank of each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="names of cases; default all")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.only is None or case.name in arguments.only]
    if arguments.folder is not None:
        _run_ranks(cases, arguments.folder)
        return
    measured = measure_cases(cases)
    rows = [
        _compare_rank(case, rank, real)
        for case in cases
        for rank, real in enumerate(measured[case.name])
    ]
    headers = ["case", "rank", "predicted", "measured", "differs by", "with gloo's", "allocations"]
    align = ["left", *["right"] * 5, "left"]
    table = tabulate(rows, headers, "pipe", intfmt=",", colalign=align)
    if arguments.output is None:
        print(table)
        return
    stamp = write_stamp("python -m benchmarks.distributed")
    arguments.output.write_text(
        _INTRODUCTION.format(stamp=stamp, small=_SMALL_BYTES) + table + "\n"
    )


if __name__ == "__main__":
    main()
