"""Memory of one rank of many, against what others measured or assert on real GPUs.

    python -m benchmarks.many_gpus [--only NAME] [-o docs/results/many_gpus.md]

Each section is a publication, and each row one of its figures.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW

import fxmem
from benchmarks.cases import import_torchvision
from benchmarks.published.predicting import find_allocated_after, find_peak_in, use_cudnn
from benchmarks.stamp import write_stamp
from fxmem.analysis import Analysis
from fxmem.graph import Phase
from fxmem.memory.allocation import _list_events
from fxmem.memory.allocator import replay

COMMAND = "python -m benchmarks.many_gpus -o docs/results/many_gpus.md"
ROOT = Path(__file__).parent.parent
MB, GIB = 10**6, 2**30


@dataclass(frozen=True)
class Row:
    """A published figure, in bytes."""

    what: str
    published: float
    predicted: float | None = None  # None where it is not modelled
    reason: str = ""  # that it is not

    @property
    def error(self) -> float:
        """The signed difference, as a share of the published figure."""
        assert self.predicted is not None
        return self.predicted / self.published - 1


def find_first_peaks(analysis: Analysis) -> dict[Phase | None, int]:
    """Finds the most allocated so far at the end of each phase of the first step.

    As ``torch.cuda.max_memory_allocated()`` tells there; None is the moment before forward.
    """
    assert analysis.settings is not None
    events, count = _list_events(analysis.graph)
    allocated = replay(events[:count], analysis.settings).allocated_bytes
    unseen = count - len(analysis.graph.warmup)
    operations = analysis.graph.first_operations
    starts = [(0, None), *((unseen + first.start, first.phase) for first in operations)]
    peaks: dict[Phase | None, int] = {}
    peak = 0
    for (start, phase), (end, _) in pairwise([*starts, (count, None)]):
        peak = peaks[phase] = max(peak, *allocated[start:end], 0)
    return peaks


def measure_workspaces(analysis: Analysis) -> int:
    """Measures cuBLAS's workspaces, which stay from their first use on."""
    storages = analysis.allocated_graph.storages
    return sum(storage.nbytes for storage in storages if storage.name == "cuBLAS workspace")


def shard_layers(model: nn.Module, mesh: DeviceMesh, **settings: Any) -> None:
    """Shards each block of a transformer, and the rest."""
    for module in model.modules():
        if type(module).__name__ in ("TransformerBlock", "MistralDecoderLayer"):
            fully_shard(module, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)


def check_fsdp_test(reshard: bool) -> list[Row]:
    """Compares with the bounds of ``test_fully_shard_memory.py``, in PyTorch at 5ae3db1.

    A bound is met if the prediction is no more; its buffer of 16 MB is left out.
    """
    from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

    with torch.device("meta"):
        model = Transformer(
            ModelArgs(vocab_size=32, n_layers=3, dim=768, n_heads=12, weight_tying=False)
        )
    analysis = fxmem.analyze(
        model,
        ("1x4:int64",),
        mesh={"dp": 2},
        parallelize=functools.partial(shard_layers, reshard_after_forward=reshard),
        optimizer=lambda parameters: Adam(parameters, foreach=False),
        alloc_conf="",
    )
    whole = sum(parameter.numel() for parameter in model.parameters())
    block = sum(parameter.numel() for parameter in model.layers[0].parameters())
    shard, rest = (whole + 1) // 2, whole - 3 * block
    bounds = {
        "forward": shard + 3 * block + rest if reshard else shard + whole + block,
        "backward": 2 * shard + 4 * block + rest if reshard else shard + whole + 1.5 * block,
        "optimizer": 4 * shard,
        "after zero_grad": 3 * shard,
    }
    first = find_first_peaks(analysis)
    found = {
        "forward": first[Phase.FORWARD],
        "backward": first[Phase.BACKWARD],
        "optimizer": find_peak_in(analysis, (Phase.OPTIMIZER,)),
        "after zero_grad": find_allocated_after(analysis, ()),
    }
    way = "resharded" if reshard else "kept"
    base = measure_workspaces(analysis)
    return [
        Row(f"{name}, parameters {way} after forward", 4 * bound, found[name] - base)
        for name, bound in bounds.items()
    ]


def check_zero_tutorial(sharded: bool) -> list[Row]:
    """Compares with PyTorch's recipe of the ZeroRedundancyOptimizer, run with torch 1.8.

    That torch took cuBLAS's workspace from the driver, so it is not counted.
    """
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(20)))

    def make_optimizer(parameters: Any) -> Any:
        settings: dict[str, Any] = {"lr": 0.01, "foreach": False}
        if sharded:
            return ZeroRedundancyOptimizer(parameters, optimizer_class=Adam, **settings)
        return Adam(parameters, **settings)

    analysis = fxmem.analyze(
        model,
        ("20x2000",),
        mesh={"dp": 2},
        parallelize="ddp",
        loss="mse",
        optimizer=make_optimizer,
        alloc_conf="",
    )
    first, base = find_first_peaks(analysis), measure_workspaces(analysis)
    stages = {
        "wrapped": (656, first[None]),
        "before optimizer.step()": (992, first[Phase.BACKWARD] - base),
        "after it": (1361 if sharded else 1697, first[Phase.OPTIMIZER] - base),
    }
    name = "ZeroRedundancyOptimizer" if sharded else "Adam"
    return [Row(f"{name}, {stage}", n * MB, found) for stage, (n, found) in stages.items()]


def check_torchtitan(gpus: int, published_gib: float) -> list[Row]:
    """Compares with torchtitan's Llama 3.1 8B in eager mode, reserved memory."""
    path = ROOT / "examples" / "llama.py"
    spec = importlib.util.spec_from_file_location("llama", path)
    assert spec is not None and spec.loader is not None
    llama: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(llama)
    with use_cudnn(90100):  # torch of that month prefers flash attention
        analysis = fxmem.analyze(
            f'{path}:Llama("8B")',
            ("2x8192:int64",),
            gpu="h100-nvl",
            mesh={"dp": gpus},
            parallelize=llama.parallelize_fsdp,
            loss=llama.next_token_loss,
            optimizer=lambda parameters: AdamW(parameters, foreach=True),
            loop=fxmem.Loop(outputs="loss", clip_grad=True),
            alloc_conf="expandable_segments:True",
        )
    return [Row(f"8B on {gpus} GPUs", published_gib * GIB, analysis.reserved_bytes)]
