"""Compares the predicted peak of each rank of a pipeline with what real processes allocate.

    python -m benchmarks.pipelines [-o docs/results/pipelines.md]

Each rank is a process of its own that runs schedules of ``torch.distributed.pipelining`` over gloo,
on the CPU, under PyTorch's profiler, which sees every allocation and free. Measured is the second
step: the schedule, with the merged results held, and the optimizers.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import schedules
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.stamp import write_stamp

COMMAND = "python -m benchmarks.pipelines -o docs/results/pipelines.md"
_MARK = "the measured step"
VOCABULARY, WIDTH, LENGTH, BATCH = 512, 64, 32, 16
_INTRODUCTION = """\
Stages of a small transformer, of two blocks each, train with AdamW: 16 sequences of 32 tokens, width 64. Each rank is
a process of its own, which runs the schedule of `torch.distributed.pipelining` over gloo under PyTorch's profiler.
Compared is the peak of the second step, in bytes of the allocator's events, with that of
`fxmem.pipeline(..., device="cpu")`. Stages that pass two send the embedding along with the hidden state, drop out, and
end in a view; without outputs is `step(return_outputs=False)`; stages on two processes are sharded by `fully_shard`
(reshard gathers blocks anew for each micro-batch) or replicated by DDP, and the least of six processes is shown: a
thread of gloo may keep the tensors of an earlier collective.
"""  # noqa: E501


class Case(NamedTuple):
    """A pipeline."""

    schedule: str
    ranks: int
    stages: int
    microbatches: int
    passes_two: bool = False
    return_outputs: bool = True
    shards: int = 1  # processes that share each stage
    shared_by: str = "shard"  # one of SHARING


CASES = (
    Case("GPipe", 2, 2, 4),
    Case("1F1B", 2, 2, 4),
    Case("1F1B", 2, 2, 2, passes_two=True),
    Case("1F1B", 2, 2, 8, return_outputs=False),
    Case("Interleaved1F1B", 2, 4, 4),
    Case("LoopedBFS", 2, 4, 4),
    Case("InterleavedZeroBubble", 2, 4, 4),
    Case("InterleavedZeroBubble", 2, 6, 4, passes_two=True),
    Case("ZBVZeroBubble", 2, 4, 4),
    Case("DualPipeV", 2, 4, 8, passes_two=True, return_outputs=False),
    Case("GPipe", 2, 2, 4, shards=2),
    Case("1F1B", 2, 2, 4, shards=2),
    Case("Interleaved1F1B", 2, 4, 4, shards=2),
    Case("InterleavedZeroBubble", 2, 4, 4, shards=2),
    Case("1F1B", 2, 2, 4, shards=2, shared_by="reshard"),
    Case("1F1B", 2, 2, 4, shards=2, shared_by="replicate"),
    Case("GPipe", 4, 4, 8, passes_two=True),
    Case("1F1B", 4, 4, 8),
    Case("Interleaved1F1B", 4, 8, 8, passes_two=True),
    Case("InterleavedZeroBubble", 4, 8, 8),
    Case("ZBVZeroBubble", 4, 8, 8, passes_two=True),
)


class Block(nn.Module):
    """A block of a small transformer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.expand, self.contract = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Attends, then runs the two linear layers."""
        batch, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH)))
        return x + self.contract(nn.functional.gelu(self.expand(self.norm2(x))))


class TwoPassing(nn.Module):
    """A stage that sends the embedding along, and in the last one adds it and ends in a view."""

    def __init__(self, layers: nn.Sequential, *, is_last: bool) -> None:
        super().__init__()
        self.layers, self.is_last = layers, is_last

    def forward(self, x: Tensor, embedded: Tensor | None = None) -> Any:
        """Runs the layers."""
        if embedded is None:
            embedded = self.layers[0](x)
            return self.layers[1:](embedded), embedded
        if self.is_last:
            return self.layers(x + embedded).flatten(0, 1)
        return self.layers(x), embedded.clone()


def make_stages(case: Case) -> list[nn.Module]:
    """Makes the stages of a transformer of equal blocks, from tokens to logits."""
    stages: list[nn.Module] = []
    for index in range(case.stages):
        layers: list[nn.Module] = [Block(0.1 * case.passes_two) for _ in range(2)]
        is_last = index == case.stages - 1
        if index == 0:
            layers.insert(0, nn.Embedding(VOCABULARY, WIDTH))
        if is_last:
            layers += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)]
        stage = nn.Sequential(*layers)
        stages.append(TwoPassing(stage, is_last=is_last) if case.passes_two else stage)
    return stages


def shard(stage: nn.Module, mesh: DeviceMesh, *, reshards: bool = False) -> nn.Module:
    """Shards a stage, block by block, as torchtitan does in a pipeline."""
    for module in stage.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(stage, mesh=mesh, reshard_after_forward=reshards)
    return stage


def reshard(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shards a stage, whose blocks are gathered anew for each micro-batch."""
    return shard(stage, mesh, reshards=True)


def replicate(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Wraps a stage in DistributedDataParallel."""
    return nn.parallel.DistributedDataParallel(stage, process_group=mesh.get_group())


SHARING = {function.__name__: function for function in (shard, reshard, replicate)}


def compute_loss(logits: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy over all tokens."""
    return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), target.flatten())


def predict_ranks(case: Case) -> list[int]:
    """Predicts the peak of each rank, in bytes."""
    import fxmem

    found = fxmem.pipeline(
        make_stages(case),
        f"{BATCH}x{LENGTH}:int64",
        schedule=case.schedule,
        microbatches=case.microbatches,
        ranks=case.ranks,
        optimizer="adamw",
        loss="cross_entropy",
        return_outputs=case.return_outputs,
        device="cpu",
        mesh={"dp": case.shards} if case.shards > 1 else None,
        parallelize=SHARING[case.shared_by] if case.shards > 1 else None,
    )
    return [rank.peak_bytes for rank in found.ranks]


def measure_ranks(cases: Sequence[Case]) -> list[list[int]]:
    """Runs cases of the same number of processes, each in one of its own.

    Returns:
        For each case the peak of each rank, in bytes: the least of the processes that share its
        stages, because gloo's threads may keep the tensors of an earlier collective.
    """
    ranks = cases[0].ranks * cases[0].shards
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.pipelines", "--worker", f"{folder}/store"]
        command.append(json.dumps(cases))
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        running = [
            subprocess.Popen(
                [*command, str(rank)],
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank in range(ranks)
        ]
        outputs = [process.communicate()[0] for process in running]
    peaks = [json.loads(output.splitlines()[-1]) for output in outputs]
    return [
        [min(each[at : at + case.shards]) for at in range(0, ranks, case.shards)]
        for case, each in zip(cases, zip(*peaks, strict=True), strict=True)
    ]


def _run_worker(store: str, cases: list[Case], rank: int) -> list[int]:
    world_size = cases[0].ranks * cases[0].shards
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    shape = cases[0].ranks, cases[0].shards
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
    peaks = []
    for case in cases:
        gc.collect()
        gc.disable()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            _train(case, mesh)
        events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        memory = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
        memory.sort(key=lambda event: event[0])
        mark = next(event for event in events if event.name() == _MARK)
        start, end = mark.start_ns(), mark.start_ns() + mark.duration_ns()
        live = peak = sum(nbytes for at, nbytes in memory if at < start)
        for at, nbytes in memory:
            live += nbytes if start <= at <= end else 0
            peak = max(peak, live)
        peaks.append(peak)
    dist.destroy_process_group()
    return peaks


def _train(case: Case, mesh: DeviceMesh) -> None:
    rank = mesh.get_local_rank("pp")
    own = [*range(rank, case.stages, case.ranks)]
    if case.schedule in ("ZBVZeroBubble", "DualPipeV"):
        own = [rank, case.stages - 1 - rank]
    modules = [m if at in own else nn.Identity() for at, m in enumerate(make_stages(case))]
    for index in own if case.shards > 1 else ():
        modules[index] = SHARING[case.shared_by](modules[index], mesh["dp"])
    device = torch.device("cpu")
    parts = [
        pipelining.PipelineStage(
            modules[index], index, case.stages, device, group=mesh.get_group("pp")
        )
        for index in own
    ]
    kind: Any = schedules.get_schedule_class(case.schedule)
    is_single = issubclass(kind, schedules.PipelineScheduleSingle)
    pipeline = kind(parts[0] if is_single else parts, case.microbatches, loss_fn=compute_loss)
    optimizers = [torch.optim.AdamW(part.submod.parameters()) for part in parts]
    args = (torch.zeros(BATCH, LENGTH, dtype=torch.int64),) if 0 in own else ()
    is_last = case.stages - 1 in own
    target = torch.zeros(BATCH, LENGTH, dtype=torch.int64) if is_last else None
    settings = {} if case.return_outputs else {"return_outputs": False}
    for name in ("the first step", _MARK):
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses: list[Tensor] | None = [] if is_last else None
        dist.barrier()
        with record_function(name):
            output = pipeline.step(*args, target=target, losses=losses, **settings)
            for optimizer in optimizers:
                optimizer.step()
        del output, losses


def main() -> None:
    """Prints a table with a row for each rank, or writes it to a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        store, cases, rank = arguments.worker
        print(
            json.dumps(_run_worker(store, [Case(*case) for case in json.loads(cases)], int(rank)))
        )
        return
    stamp, rows = write_stamp(COMMAND), []
    for ranks, shards in sorted({(case.ranks, case.shards) for case in CASES}):
        cases = [case for case in CASES if (case.ranks, case.shards) == (ranks, shards)]
        runs = [measure_ranks(cases) for _ in range(3 if shards > 1 else 1)]
        for case, *peaks in zip(cases, *runs, strict=True):
            measured = [min(each) for each in zip(*peaks, strict=True)]
            name = f"{case.schedule}, {case.stages} stages, {case.microbatches} micro-batches"
            name += ", passing two" * case.passes_two
            name += ", without outputs" * (not case.return_outputs)
            name += f", each on {shards} processes by {case.shared_by}" * (shards > 1)
            for rank, (real, found) in enumerate(zip(measured, predict_ranks(case), strict=True)):
                differs = f"{100 * (found / real - 1):+.3f} %" if found != real else "0"
                rows.append((name, f"{rank} of {ranks}", f"{real:,}", f"{found:,}", differs))
    headers = ["pipeline", "rank", "measured", "fxmem", "differs by"]
    align = ("left", "left", "right", "right", "right")
    table = tabulate(rows, headers, tablefmt="pipe", colalign=align, disable_numparse=True)
    page = f"# Pipelines\n\n{stamp}\n\n{_INTRODUCTION}\n{table}\n"
    if arguments.output is None:
        print(page)
        return
    with open(arguments.output, "w", encoding="utf-8") as file:
        file.write(page)


if __name__ == "__main__":
    main()
