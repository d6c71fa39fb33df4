"""Memory of one rank of many, against what others measured or assert on real GPUs.

    python -m benchmarks.many_gpus [--only NAME] [-o docs/results/many_gpus.md]

Each section is a publication, and each row one of its figures.
"""

from __future__ import annotations

import argparse
import functools
import runpy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from benchmarks.published.sources import fms_acceleration
from benchmarks.stamp import write_stamp
from fxmem.analysis import Analysis
from fxmem.graph import Category, Phase
from fxmem.memory.allocation import _list_events
from fxmem.memory.allocator import replay

COMMAND = "python -m benchmarks.many_gpus -o docs/results/many_gpus.md"
LLAMA = Path(__file__).parent.parent / "examples" / "llama.py"
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
    """Finds the most allocated up to the end of each phase of the first step.

    As ``torch.cuda.max_memory_allocated()`` tells there, without cuBLAS's workspaces, which stay
    from their first use on. None is the moment before the inputs move to the device.
    """
    assert analysis.settings is not None
    graph = analysis.graph
    events, count = _list_events(graph)
    allocated = replay(events[:count], analysis.settings).allocated_bytes
    phases = {count - len(graph.warmup) + op.start: op.phase for op in graph.first_operations}
    is_input = {s.index for s in graph.storages if s.category is Category.INPUT}
    is_workspace = {s.index for s in graph.storages if s.name == "cuBLAS workspace"}
    peaks: dict[Phase | None, int] = {}
    phase: Phase | None = None
    peak = workspaces = 0
    for index, event in enumerate(events[:count]):
        following = phases.get(index, phase)
        if phase is Phase.OPTIMIZER and following is Phase.FORWARD:
            break  # DDP lays its buckets out in a second step
        if phase is not None or event.storage in is_input:
            phase = following or Phase.FORWARD
        if event.storage in is_workspace:
            workspaces += allocated[index] - allocated[index - 1]
        peak = peaks[phase] = max(peak, allocated[index] - workspaces)
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
    first, base = find_first_peaks(analysis), measure_workspaces(analysis)
    found = {
        "forward": first[Phase.FORWARD],
        "backward": first[Phase.BACKWARD],
        "optimizer": find_peak_in(analysis, (Phase.OPTIMIZER,)) - base,
        "after zero_grad": find_allocated_after(analysis, ()) - base,
    }
    way = "resharded" if reshard else "kept"
    return [
        Row(f"{name}, parameters {way} after forward", 4 * bound, found[name])
        for name, bound in bounds.items()
    ]


class EarlyZeroRedundancyOptimizer(ZeroRedundancyOptimizer):
    """With the partition of torch 1.8, which took parameters in their order, not by size."""

    def _partition_parameters(self, params_per_rank: Any = None) -> Any:
        if not self._partition_parameters_cache:
            params_per_rank = [[] for _ in range(self.world_size)]
            sizes = [0] * self.world_size
            for parameter in self.param_groups[0]["params"]:
                rank = sizes.index(min(sizes))
                params_per_rank[rank].append(parameter)
                sizes[rank] += parameter.numel()
        return super()._partition_parameters(params_per_rank)


def check_zero_tutorial(sharded: bool) -> list[Row]:
    """Compares with PyTorch's recipe of the ZeroRedundancyOptimizer, run with torch 1.8.

    That torch took cuBLAS's workspace from the driver.
    """
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(20)))

    def make_optimizer(parameters: Any) -> Any:
        settings: dict[str, Any] = {"lr": 0.01, "foreach": False}
        if sharded:
            return EarlyZeroRedundancyOptimizer(parameters, Adam, **settings)
        return Adam(parameters, **settings)

    options: dict[str, Any] = {"optimizer": make_optimizer, "loss": "mse", "alloc_conf": ""}
    replicated = fxmem.analyze(model, ("20x2000",), mesh={"dp": 2}, parallelize="ddp", **options)
    alone = fxmem.analyze(model, ("20x2000",), **options | {"optimizer": "adam"})
    first = find_first_peaks(replicated)
    stages = {
        "model created": (335, find_first_peaks(alone)[None]),
        "DDP created": (656, first[None]),
        "before step()": (992, first[Phase.BACKWARD]),
        "after step()": (1361 if sharded else 1697, first[Phase.OPTIMIZER]),
    }
    name = "ZeroRedundancyOptimizer" if sharded else "Adam"
    return [Row(f"{name}, {stage}", n * MB, found) for stage, (n, found) in stages.items()]


def check_torchtitan(gpus: int, published_gib: float) -> list[Row]:
    """Compares with torchtitan's Llama 3.1 8B in eager mode: most reserved memory of a rank."""
    llama: Any = runpy.run_path(str(LLAMA))
    with use_cudnn(90100):  # torch of that month prefers flash attention to cuDNN's
        analysis = fxmem.analyze(
            f'{LLAMA}:Llama("8B")',
            ("2x8192:int64",),
            gpu="h100-nvl",  # has the memory of theirs, nearly
            mesh={"dp": gpus},
            parallelize=llama["parallelize_fsdp"],
            loss=llama["next_token_loss"],
            optimizer=lambda parameters: AdamW(parameters, foreach=True),
            loop=fxmem.Loop(outputs="loss", clip_grad=True),
            alloc_conf="expandable_segments:True",
        )
    return [Row(f"FSDP on {gpus} GPUs", published_gib * GIB, analysis.reserved_bytes)]


def check_mistral(batch: int, published: int) -> list[Row]:
    """Compares with fms-acceleration's fine-tuning of Mistral-7B on two GPUs.

    They ran FSDP1, whose flat parameters hold as much as the shards here when the optimizer steps.
    """
    length = 4096
    import_torchvision()
    tokens = fxmem.TensorSpec((batch, length), "int64")
    settings = "name='mistral', transformers='4.48.1', dtype='bfloat16', rank=0"
    analysis = fxmem.analyze(
        f"{fms_acceleration.__name__}:FineTuning({settings}, dropout=0.0, amp=False)",
        (tokens, tokens, tokens),
        gpu="a100-80gb",
        mesh={"dp": 2},
        parallelize=shard_layers,
        optimizer=AdamW,
        loop="huggingface",
        loss=fms_acceleration.take_loss,
        alloc_conf="",
    )
    return [Row(f"batch {batch} per GPU", published, analysis.peak_bytes)]
