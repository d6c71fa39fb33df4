"""Meshes and knobs that were compared, as pure data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fxmem.parallelism.layout import Knobs, Mesh, Way
from fxmem.report.blocks import Block, Heading, Paragraph
from fxmem.report.result import Result
from fxmem.report.tables import Bytes, Cell, Table
from fxmem.report.text import write_mesh, write_share, write_subject
from fxmem.setup import Setup
from fxmem.units import format_bytes

SCHEMA_VERSION = 1
_NUMBERS = ("peak", "reserved", "sent in node", "to others", "recomputed")
FAR_WEIGHT = 9
"""A byte to another node is as dear as so many within one.

An H100 sends 450 GB/s by NVLink, and 50 GB/s by the adapter of 400 Gbit/s that it has of its node.
"""


@dataclass(frozen=True, slots=True)
class Place:
    """A mesh, and the way a model is laid out on it."""

    mesh: Mesh
    parallelize: Way

    @property
    def shards(self) -> int:
        """The number of parts that ``fully_shard`` cuts a parameter into; 1 without it."""
        return self.mesh[-1][1] if self.parallelize == "fsdp" else 1

    @property
    def replicas(self) -> int:
        """The number of processes that have the same part."""
        return math.prod(size for _, size in self.mesh) // self.shards


@dataclass(frozen=True, slots=True)
class MeshFit:
    """One rank's step on a mesh, with some knobs.

    Attributes:
        mesh: Sizes of the mesh's dimensions, by name.
        parallelize: ``"fsdp"``, ``"ddp"``, or the function that lays the model out.
        knobs: The knobs.
        fits: ``"yes"``, ``"no"``, or ``"maybe"`` where the CUDA context and NCCL decide.
        cause: Why it does not fit; empty where it does.
        peak_bytes: Most bytes allocated; None where the step was not analysed, because it cannot
            fit.
        reserved_bytes: Most bytes that the allocator holds; None where the step was not
            analysed.
        sent_bytes: What the rank sends in a step, by the dimensions that its groups run along.
        near_bytes: The part that stays within a node.
        far_bytes: The part that goes to another node.
        flops: Floating-point operations of the step, without those recomputed.
        recomputed_flops: Floating-point operations that checkpoints recompute.
        is_recorded: Whether the step was recorded, not computed from other meshes.
    """

    mesh: Mapping[str, int]
    parallelize: str
    knobs: Knobs
    fits: str
    cause: str
    peak_bytes: int | None
    reserved_bytes: int | None
    sent_bytes: Mapping[str, int] = field(default_factory=dict)
    near_bytes: int = 0
    far_bytes: int = 0
    flops: int = 0
    recomputed_flops: int = 0
    is_recorded: bool = False

    def sort_key(self) -> tuple[Any, ...]:
        """Returns what rows are sorted by: fit, communication for each FLOP, recomputation."""
        if self.fits == "no":
            return 2, math.inf if self.peak_bytes is None else self.peak_bytes
        cost = (self.near_bytes + FAR_WEIGHT * self.far_bytes) / max(self.flops, 1)
        recomputed = self.recomputed_flops / max(self.flops, 1)
        return ("yes", "maybe").index(self.fits), cost, recomputed, self.peak_bytes


@dataclass(frozen=True, slots=True)
class Fitting(Result):
    """The meshes of so many GPUs, each with its cheapest knobs that fit.

    Attributes:
        rows: The fitting ones first, cheapest communication first; then the others, lowest peak
            first.
        setup: The step of one rank.
        gpu: The GPU's name.
        gpus: How many there are.
        gpus_per_node: How many of them are in a node.
        capacity_bytes: Memory of each.
        mixed_precision: The dtype of parameters in forward and backward; None for their own.
        recordings: How many steps were recorded to find the rows.
    """

    rows: tuple[MeshFit, ...]
    setup: Setup
    gpu: str
    gpus: int
    gpus_per_node: int
    capacity_bytes: int
    mixed_precision: str | None
    recordings: int

    @property
    def best(self) -> MeshFit | None:
        """The cheapest row that fits; None where none does for certain."""
        return self.rows[0] if self.rows[0].fits == "yes" else None

    def __repr__(self) -> str:
        return f"Fitting(model={self.setup.model!r}, gpus={self.gpus}, best={self.best!r})"

    def list_blocks(self) -> list[Block]:
        headers = ["fits", "mesh", "by", "with", *_NUMBERS]
        rows = [(row.fits, *_list_cells(row)) for row in self.rows]
        return [
            Heading(_write_headline(self), [write_subject(self.setup)]),
            Table(headers, rows, right=_NUMBERS, names=("by",)),
            Paragraph([*_write_notes(self)]),
        ]

    def list_bars(self) -> Mapping[str, int | None]:
        return {_write_layout(row): row.reserved_bytes for row in self.rows}

    def to_dict(self) -> dict[str, Any]:
        setup = self.setup
        return {
            "schema_version": SCHEMA_VERSION,
            "model": setup.model,
            "inputs": list(setup.inputs),
            "optimizer": setup.optimizer,
            "gpu": self.gpu,
            "gpus": self.gpus,
            "gpus_per_node": self.gpus_per_node,
            "capacity_bytes": self.capacity_bytes,
            "mixed_precision": self.mixed_precision,
            "recordings": self.recordings,
            "rows": [asdict(row) for row in self.rows],
        }


def _write_layout(row: MeshFit) -> str:
    """Writes a mesh, the way a model is laid out on it, and the knobs."""
    knobs = f" with {row.knobs}" if str(row.knobs) else ""
    return f"{row.parallelize} on {write_mesh(row.mesh)}{knobs}"


def _write_headline(found: Fitting) -> str:
    where = f"{found.gpus} x {found.gpu} ({format_bytes(found.capacity_bytes)})"
    best = found.best
    if best is None:
        return f"Nothing was found that fits {where}"
    return f"Fits {where}: {_write_layout(best)}"


def _list_cells(row: MeshFit) -> tuple[Cell, ...]:
    head = write_mesh(row.mesh), row.parallelize, str(row.knobs)
    if row.peak_bytes is None or row.reserved_bytes is None:
        return *head, *[""] * len(_NUMBERS)
    sizes = row.peak_bytes, row.reserved_bytes, row.near_bytes, row.far_bytes
    return *head, *map(Bytes, sizes), write_share(row.recomputed_flops / max(row.flops, 1))


def _write_notes(found: Fitting) -> Iterator[str]:
    for row in found.rows:
        if row.fits == "maybe":
            yield f"{write_mesh(row.mesh)}: fits if the CUDA context and NCCL take little."
        elif row.fits == "no":
            yield f"{write_mesh(row.mesh)} by {row.parallelize}: {row.cause}."
    rows = "Rows that fit are in the order of what a rank sends for each FLOP of the model"
    if found.gpus > found.gpus_per_node:
        rows += f", a byte to another node counting as {FAR_WEIGHT}"
    yield f"{rows}; then of recomputation, as a share of the model's FLOPs."
    is_plain = any(row.parallelize in ("fsdp", "ddp") for row in found.rows)
    if is_plain and found.mixed_precision is None and not found.setup.autocast:
        yield "Blocks compute in the dtype of their parameters: --mixed-precision bf16 for another."
    steps = "1 step was" if found.recordings == 1 else f"{found.recordings} steps were"
    computed = sum(row.peak_bytes is not None and not row.is_recorded for row in found.rows)
    others = f", {computed} computed from them" if computed else ""
    yield f"{steps} recorded{others}."
