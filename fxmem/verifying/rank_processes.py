"""Real steps of two models on the ranks of a gloo group, compared bit for bit on each.

The processes run on this machine's CPU. Each lays a copy of either model out on the mesh.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import start_processes

from fxmem.errors import FxmemError, TraceError, UsageError, summarize_error
from fxmem.loading.importing import import_target
from fxmem.loading.parsing import is_target, parse_target
from fxmem.loading.target import prepare_targets
from fxmem.parallelism.layout import Layout
from fxmem.parallelism.wrapping import parallelize_model
from fxmem.training.options import load_choice
from fxmem.verifying.running import ComparedSteps, Runner, StepTask, compare_steps

_MOST_RANKS = 4
_PATIENCE = timedelta(minutes=5)


def compare_ranks(
    task: StepTask, models: Sequence[nn.Module], layout: Layout, targets: Sequence[object]
) -> tuple[ComparedSteps, int]:
    """Compares the steps of two models on all ranks of a layout, each in a process of its own.

    Args:
        task: The steps.
        models: The two models, on the CPU.
        layout: How each rank lays both models out.
        targets: TARGETs whose files the processes import; what is no text is passed over.

    Returns:
        The comparison on the first rank that found a difference, else on the first; and the rank.

    Raises:
        UsageError: There are too many ranks, or what the task has cannot be sent to a process.
        TraceError: A process fails.
    """
    size = layout.world_size
    if size > _MOST_RANKS:
        raise UsageError(
            f"verify runs each rank on this machine, and {size} are too many",
            hint=f"a mesh of at most {_MOST_RANKS}, such as {{'dp': 2}}",
        )
    try:
        sent = pickle.dumps((task, models, layout))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"ranks are processes of their own, to which this cannot be sent:"
            f" {summarize_error(error)}",
            hint="define models, parallelize, loss and optimizer at the top of a module",
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        names = [target for target in targets if is_target(target)]
        Path(folder, "task").write_bytes(pickle.dumps((names, size, sent)))
        try:
            start_processes(_run_rank, (folder,), size)  # type: ignore[no-untyped-call]
        except Exception as error:  # its text ends with the traceback of the process
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise TraceError(
                f"a rank fails: {lines[-1]}",
                hint="code that starts this needs: if __name__ == '__main__'",
            ) from error
        results = [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(size)]
    for result in results:
        if isinstance(result, FxmemError):
            raise result
    rank = next((rank for rank, found in enumerate(results) if found.differences), 0)
    note = "their peaks are not measured, as gloo has buffers of its own"
    return replace(results[rank], notes=(f"All {size} ranks were compared; {note}.",)), rank


def _run_rank(rank: int, folder: str) -> None:
    names, size, sent = pickle.loads(Path(folder, "task").read_bytes())
    torch.set_num_threads(1)
    store = dist.FileStore(  # type: ignore[attr-defined]
        str(Path(folder, "store")), size
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_PATIENCE)
    with contextlib.redirect_stdout(sys.stderr), prepare_targets(*names):
        for target in map(parse_target, names):
            import_target(target, again=False)  # what it registers may be needed to unpickle
        try:
            result: ComparedSteps | FxmemError = compare_rank(*pickle.loads(sent))
        except FxmemError as error:
            result = error
    Path(folder, str(rank)).write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


def compare_rank(task: StepTask, models: Sequence[nn.Module], layout: Layout) -> ComparedSteps:
    """Compares the steps of two models on this rank of the default process group."""
    names, sizes = zip(*layout.mesh, strict=True)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    lay_out = load_choice(layout.parallelize)
    # A planned model shares all with its model.
    laid_out = [parallelize_model(copy.deepcopy(model), lay_out, mesh) for model in models]
    ours, theirs = (Runner(task, model) for model in laid_out)
    return compare_steps(ours, theirs, _agree)


def _agree(differs: bool) -> bool:
    """Returns whether any rank found a difference: all ranks stop at one step, or none."""
    found = torch.tensor(int(differs))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)
