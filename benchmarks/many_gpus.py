"""Memory of one rank of many, against what others measured or assert on real GPUs.

    python -m benchmarks.many_gpus [--only NAME] [--sources FOLDER] [-o docs/results/many_gpus.md]

Each section is a publication, and each row one of its figures. The folder is for the scripts of
:mod:`benchmarks.torchtitan_logs`; without it their section is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import runpy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Adam, AdamW

import fxmem
from benchmarks.cases import import_torchvision
from benchmarks.large import measure
from benchmarks.published.predicting import find_allocated_after, use_cudnn
from benchmarks.published.sources import fms_acceleration
from benchmarks.stamp import write_stamp
from benchmarks.torchtitan_logs import RUNS, Run, predict
from fxmem.analysis import Analysis
from fxmem.graph import Category, Phase
from fxmem.memory.allocation import list_events, replay
from fxmem.memory.allocator.settings import parse_settings

COMMAND = "python -m benchmarks.many_gpus -o docs/results/many_gpus.md"
LLAMA = Path(__file__).parent.parent / "examples" / "llama.py"
_BLOCKS = ("TransformerBlock", "MistralDecoderLayer", "GPTBigCodeBlock")
MB, GIB = 10**6, 2**30


@dataclasses.dataclass(frozen=True)
class Row:
    """A published figure and the predicted one, in bytes."""

    what: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """The signed difference, as a share of the published figure."""
        return self.predicted / self.published - 1


def find_first_peaks(analysis: Analysis) -> dict[Phase | None, int]:
    """Finds the most allocated in each phase of the first step.

    Without cuBLAS's workspaces, which stay from their first use on. None is all that happens
    before the inputs move to the device.
    """
    assert analysis.settings is not None
    graph = analysis.graph
    events, count = list_events(graph)
    allocated = replay(events[:count], analysis.settings).allocated_bytes
    phases = {count - len(graph.warmup) + op.start: op.phase for op in graph.first_operations}
    is_input = {s.index for s in graph.storages if s.category is Category.INPUT}
    is_workspace = {s.index for s in graph.storages if s.name == "cuBLAS workspace"}
    peaks: dict[Phase | None, int] = {}
    phase: Phase | None = None
    workspaces = 0
    for index, event in enumerate(events[:count]):
        following = phases.get(index, phase)
        if phase is Phase.OPTIMIZER and following is Phase.FORWARD:
            break  # DDP lays its buckets out in a second step
        if phase is not None or event.storage in is_input:
            phase = following or Phase.FORWARD
        if event.storage in is_workspace:
            workspaces += allocated[index] - allocated[index - 1]
        peaks[phase] = max(peaks.get(phase, 0), allocated[index] - workspaces)
    return peaks


def shard_layers(model: nn.Module, mesh: DeviceMesh, **settings: Any) -> None:
    """Shards each block of a transformer, and the rest."""
    for module in model.modules():
        if type(module).__name__ in _BLOCKS:
            fully_shard(module, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)


def flatten_layers(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shards the flat parameter of each block of a transformer, and that of the rest."""
    blocks = {type(module) for module in model.modules() if type(module).__name__ in _BLOCKS}
    return FullyShardedDataParallel(
        model, device_mesh=mesh, auto_wrap_policy=ModuleWrapPolicy(blocks), device_id=0
    )


def check_fsdp_test(reshard: bool) -> list[Row]:
    """Compares with the bounds of ``test_fully_shard_memory.py``, in PyTorch at 5ae3db1."""
    from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

    arguments = ModelArgs(vocab_size=32, n_layers=3, dim=768, n_heads=12, weight_tying=False)
    with torch.device("meta"):
        model = Transformer(arguments)
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
    bounds = {  # elements, and MB of leeway
        "forward": (shard + 3 * block + rest if reshard else shard + whole + block, 16),
        "backward": (2 * shard + 4 * block + rest if reshard else shard + whole + 1.5 * block, 16),
        "optimizer": (4 * shard, 16),
        "after zero_grad()": (3 * shard, 32),
    }
    first = find_first_peaks(analysis)
    workspaces = (s for s in analysis.allocated_graph.storages if s.name == "cuBLAS workspace")
    found = {
        "forward": first[Phase.FORWARD],
        "backward": max(first[Phase.LOSS], first[Phase.BACKWARD]),
        "optimizer": first[Phase.OPTIMIZER],
        "after zero_grad()": find_allocated_after(analysis, ()) - sum(s.nbytes for s in workspaces),
    }
    way = "freed" if reshard else "kept"
    return [
        Row(f"{name}, parameters {way} after forward", 4 * bound + leeway * MB, found[name])
        for name, (bound, leeway) in bounds.items()
    ]


def make_early_zero(parameters: Any, **settings: Any) -> Any:
    """Makes a ZeroRedundancyOptimizer of Adam with the partition of torch 1.8.

    That takes parameters in their order, not by size.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class Early(ZeroRedundancyOptimizer):
        def _partition_parameters(self, params_per_rank: Any = None) -> Any:
            if not self._partition_parameters_cache:
                params_per_rank = [[] for _ in range(self.world_size)]
                sizes = [0] * self.world_size
                for parameter in self.param_groups[0]["params"]:
                    rank = sizes.index(min(sizes))
                    params_per_rank[rank].append(parameter)
                    sizes[rank] += parameter.numel()
            return super()._partition_parameters(params_per_rank)

    return Early(parameters, Adam, **settings)


def check_zero_tutorial(sharded: bool) -> list[Row]:
    """Compares with PyTorch's recipe of the ZeroRedundancyOptimizer, run with torch 1.8.

    That torch took cuBLAS's workspace from the driver.
    """
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(20)))

    make_optimizer = functools.partial(make_early_zero if sharded else Adam, foreach=False)
    options: dict[str, Any] = {"optimizer": make_optimizer, "loss": "mse", "alloc_conf": ""}
    replicated = fxmem.analyze(model, ("20x2000",), mesh={"dp": 2}, parallelize="ddp", **options)
    alone = fxmem.analyze(model, ("20x2000",), **options | {"optimizer": "adam"})
    first = find_first_peaks(replicated)
    stages = {
        "after creating local model": (335, find_first_peaks(alone)[None]),
        "after creating DDP": (656, first[None]),
        "before optimizer step()": (992, first[Phase.BACKWARD]),
        "after optimizer step()": (1361 if sharded else 1697, first[Phase.OPTIMIZER]),
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
            loop="plain(outputs='loss', clip_grad=True)",
            alloc_conf="",
        )
    rows = []
    for kind in ("default allocator", "expandable segments"):
        settings = parse_settings("expandable_segments:True" if "expandable" in kind else "")
        predicted = dataclasses.replace(analysis, settings=settings).reserved_bytes
        rows.append(Row(f"FSDP on {gpus} GPUs, {kind}", published_gib * GIB, predicted))
    return rows


def check_log(run: Run, sources: Path) -> list[Row]:
    """Compares with a log of torchtitan, by running its script as it was."""
    return [Row(*figure) for figure in predict(run, sources)]


def check_fine_tuning(name: str, batch: int, length: int, published: int) -> list[Row]:
    """Compares with fms-acceleration's fine-tuning on two GPUs, by FSDP1."""
    import_torchvision()
    tokens = fxmem.TensorSpec((batch, length), "int64")
    settings = f"name={name!r}, transformers='4.48.1', dtype='bfloat16', rank=0"
    analysis = fxmem.analyze(
        f"{fms_acceleration.__name__}:FineTuning({settings}, dropout=0.0, amp=False)",
        (tokens, tokens, tokens),
        gpu="a100-80gb",
        mesh={"dp": 2},
        parallelize=flatten_layers,
        optimizer=AdamW,
        loop="huggingface",
        loss=fms_acceleration.take_loss,
        alloc_conf="",
    )
    return [Row(f"{name}, batch {batch} on each GPU", published, analysis.peak_bytes)]


def measure_largest() -> list[str]:
    """Measures the analysis of a rank of 512 that train Llama 3.1 405B, in a process of its own."""
    setting = f"""
import functools, runpy
llama = runpy.run_path({str(LLAMA)!r})
analyze = lambda: fxmem.analyze(
    {str(LLAMA)!r} + ':Llama("405B")', ("1x8192:int64",), gpu="h100", mesh={{"dp": 64, "tp": 8}},
    parallelize=llama["parallelize_2d"], loss=llama["next_token_loss"], optimizer="adamw",
    loop="plain(outputs='loss')",
)
"""
    found = measure(LLAMA.parent.parent, setting, 1)
    seconds, memory = found["seconds"][0], found["rss"] // 1024
    return [f"{found['peak'] / GIB:.2f} GiB", f"{seconds:.1f} s", f"{memory:,} MiB"]


@dataclasses.dataclass(frozen=True)
class Section:
    """A publication: its title, notes, unit, and functions that predict its figures."""

    title: str
    text: str
    checks: Sequence[Callable[[], list[Row]]]
    unit: int = MB
    published: str = "published"

    def write(self) -> str:
        """Writes the section, with a table of its figures."""
        digits = 2 if self.unit == GIB else 1
        rows = [
            (
                row.what,
                f"{row.published / self.unit:,.{digits}f}",
                f"{row.predicted / self.unit:,.{digits}f}",
                f"{row.error:+.2%}",
            )
            for check in self.checks
            for row in check()
        ]
        name = "GiB" if self.unit == GIB else "MB"
        headers = ["figure", f"{self.published}, {name}", f"predicted, {name}", "differs by"]
        sides = ("left", "right", "right", "right")
        table = tabulate(rows, headers, "pipe", colalign=sides, disable_numparse=True)
        return f"## {self.title}\n\n{self.text.strip()}\n\n{table}\n"


SECTIONS = (
    Section(
        "torchtitan: Llama 3.1 8B in eager mode",
        """
torchtitan's `benchmarks/llama3_h100_202412_torchtitan.md`, with torch of December 2024: FSDP2,
checkpoints by operator, batch 2 of 8,192 tokens, H100 with 96 GB. The figure is the most that the
allocator reserves. The model is [examples/llama.py](../../examples/llama.py). The allocator's
settings are not published: torchtitan's script for one machine asks for expandable segments, that
for several does not.
""",
        [functools.partial(check_torchtitan, *row) for row in ((8, 82.4), (128, 67.0))],
        GIB,
    ),
    Section(
        "PyTorch's ZeroRedundancyOptimizer recipe",
        """
`recipes_source/zero_redundancy_optimizer.rst` in PyTorch's tutorials: DDP on two GPUs, with torch
1.8, which prints `max_memory_allocated()` in whole MB, rounded down.
""",
        [functools.partial(check_zero_tutorial, sharded) for sharded in (False, True)],
    ),
    Section(
        "fms-acceleration: Mistral-7B and SantaCoder on two GPUs",
        """
Fine-tuning in bf16 with FSDP1, AdamW and checkpoints, `max_memory_allocated()` on A100, torch
2.4.1.
""",
        [
            functools.partial(check_fine_tuning, *row)
            for row in (
                ("mistral", 2, 4096, 36_225_939_968),
                ("mistral", 4, 4096, 36_226_136_576),
                ("santacoder", 2, 2048, 5_716_304_896),
                ("santacoder", 4, 2048, 7_819_433_984),
            )
        ],
    ),
    Section(
        "PyTorch's memory test of FSDP2",
        """
The bounds that `test/distributed/_composable/fsdp/test_fully_shard_memory.py` asserts on two GPUs,
with their leeway of 16 MB, or 32 MB in the end: a prediction should be below. The predictions are
made up of S elements of shards, B of a block and N outside of blocks, four bytes each, less than
0.5 MB of activations, and 4 to 7 MB that the allocator rounds up:

- forward: S + N + 3B if parameters are freed after it (the all-gathers of two blocks, and the
  parameters of one); S + N + 5B if they are kept (those of three blocks);
- backward: S + N + 4.5B (freed: an all-gather, the parameters of two blocks, the input of a
  reduce-scatter and its output; kept: no all-gather, and the parameters of three);
- optimizer: 4S and two temporaries of Adam, 9.4 MB; after `zero_grad()`: 3S.

Two bounds are exceeded. That of the optimizer, by 0.2 %, is rounding. In a forward that keeps
parameters, PyTorch holds the all-gather of the block before until the next block's is copied out
(`prev_all_gather_state` in `FSDPParamGroup.wait_for_unshard`), B more than the bound has; with real
tensors on the CPU the same code takes 185.1 MB too. The test passes, since it subtracts the peak of
the subtest that ran before in its process.
""",
        [functools.partial(check_fsdp_test, reshard) for reshard in (True, False)],
        published="bound",
    ),
)
_LOGS = """
The most that a rank holds, as the script logs it. `fxmem run --world-size 8 --gpu h100-nvl
--attention flash` runs torchtitan's own `train.py` at the commit, with torch 2.13, and the
published figures are those of the commit's message or of a report. Told were: flash attention,
which torch of those months prefers on an H100 to cuDNN's; the length of a logging interval; made-up
texts, and made-up tokenizers of 128,256 and 32,000 words; and what follows.

- 5940ddeb5 (February 2025, #822): Llama 3 8B, batch 1 of 8,192 tokens, checkpoints by operator,
  expandable segments as in `run_llama_train.sh`. Nothing is edited.
- eddce1265 (January 2025): the same with `--training.compile`, which compiles block by block, as
  #808 has it for comparison with float8.
- 9dec370ad (December 2024): Llama 3.1 8B, batch 2, tables 1 and 3 of torchtitan's
  `benchmarks/llama3_h100_202412_torchtitan.md`, eager, with `--training.compile`, and with float8
  besides, by torchao 0.8. The allocator's settings are not published; the default ones are taken.
- e23bb707d (March 2025, #996): as before. The loss in chunks is defined there and used nowhere, so
  `loss_fn` of `torchtitan/models/llama/__init__.py` is edited to be it.
- 83c879f18 (March 2024, #165): Llama 2 7B, batch 8 of 2,048 tokens, no expandable segments,
  published in percent of 95.0396 GiB. Two private names of torch that are gone are edited in
  `parallelize_llama.py`. NCCL recorded streams then, which keeps blocks for longer and is not
  modelled: the likely cause of what is reserved there.

With cuDNN's attention, fxmem's default for that GPU, the policies default, always and never of
5940ddeb5 give 40.04, 39.87 and 52.64 GiB in the first step, then 47.56, 47.37 and 60.16: 2.0 GiB
less, for torchtitan's list of operators to save has not cuDNN's.

The loss in chunks is 2.15 GiB below what was published, 0.17 of them as without chunks. The rest,
1.98 GiB, is the size of one more gradient of the logits in bfloat16 (8,192 x 128,256); which tensor
held it there is not known.
"""
_HEAD = """
A rank of many, on a machine without GPUs and with a process group whose other ranks are not there.
"""
_NOT_MODELLED = """
## Not modelled

- torchtitan's figures with float8 and context parallelism (table 2: 83.9, 84.2, 84.0 and 84.5
  GiB), with asynchronous tensor parallelism (table 4), and with pipelines that are compiled (tables
  5 and 6).
- fms-acceleration's rows with LoRA, and those with bitsandbytes.
"""


def main() -> None:
    """Prints the page, or writes it to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="sections with this in their titles")
    parser.add_argument("--sources", type=Path, help="checkouts of torchtitan, by commit")
    parser.add_argument("-o", "--output", type=Path, help="write there, not to stdout")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    everything = list(SECTIONS)
    if chosen.sources:
        checks = [functools.partial(check_log, run, chosen.sources) for run in RUNS]
        everything.insert(
            1, Section("torchtitan: its own script at five commits", _LOGS, checks, GIB)
        )
    sections = [section for section in everything if chosen.only.lower() in section.title.lower()]
    parts = ["# Many GPUs", write_stamp(COMMAND), _HEAD.strip()]
    parts += [section.write().strip() for section in sections]
    if not chosen.only:
        largest = tabulate(
            [["Llama 3.1 405B, batch 1 x 8192, FSDP 64, TP 8", *measure_largest()]],
            ["rank 0 of 512", "peak", "time", "memory of the process"],
            "pipe",
        )
        parts += [f"## The largest\n\n{largest}", _NOT_MODELLED.strip()]
    page = "\n\n".join(parts) + "\n"
    if chosen.output:
        chosen.output.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()
