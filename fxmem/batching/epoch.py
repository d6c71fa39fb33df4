"""Memory of the batches of an epoch, as pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fxmem.batching.batchings import Batching
from fxmem.memory.succession import Fragmentation
from fxmem.report.blocks import Block, Heading, Paragraph
from fxmem.report.fragmentation import list_fragmentation
from fxmem.report.result import Result
from fxmem.report.tables import Bytes, Cell, Table
from fxmem.report.text import write_share, write_subject
from fxmem.setup import Setup
from fxmem.units import format_bytes

SCHEMA_VERSION = 1
SHARES = (0.5, 0.9, 0.99, 1.0)
"""Quantiles of the batches: half of them take no more than the first says."""
_EXACT = 0.0005
_QUANTILES = ("half up to", "90 % up to", "99 % up to", "fullest")
_NUMBERS = ("rows", "steps", "size", "padding", "FLOPs", *_QUANTILES, "do not fit")


@dataclass(frozen=True, slots=True)
class BatchingMemory:
    """Memory of the batches that a way of making them gives.

    Attributes:
        batching: The way.
        fullest: The number of the fullest batch.
        quantile_sizes: The sizes of batches that the shares :data:`SHARES` do not exceed.
        quantile_bytes: The highest peaks of steps up to these sizes.
        flops: Of all steps of an epoch.
        unfitting: How many steps do not fit the GPU; None without one.
    """

    batching: Batching
    fullest: int
    quantile_sizes: tuple[int, ...]
    quantile_bytes: tuple[int, ...]
    flops: int
    unfitting: int | None

    @property
    def label(self) -> str:
        """Names the way."""
        return {
            "padded": "padded to the longest",
            "grouped": "grouped by size",
            "packed": "packed",
            "capped": f"cut at {self.quantile_sizes[-1]:,}",
        }[self.batching.name]


@dataclass(frozen=True, slots=True)
class Batches(Result):
    """Memory of the batches of an epoch, made in several ways.

    Attributes:
        setup: The step of the fullest padded batch.
        axis: The dimensions of the inputs that have the sizes.
        samples: How many samples there are.
        batchings: The ways; the first pads each batch to its longest sample.
        fragmentation: What is reserved for the first of its batches, with the given settings of the
            allocator and with others; nothing on the CPU.
        analyses: How many steps were analysed; the others are computed from them.
        error: The largest error of computed peaks, where analyses can tell; a share.
    """

    setup: Setup
    axis: str
    samples: int
    batchings: tuple[BatchingMemory, ...]
    fragmentation: tuple[Fragmentation, ...]
    analyses: int
    error: float

    def list_blocks(self) -> list[Block]:
        padded, found = self.batchings[0], self.fragmentation
        headline = (
            f"Batch {padded.fullest:,} of {len(padded.batching.sizes):,} is the fullest, with a"
            f" peak of {format_bytes(padded.quantile_bytes[-1])}"
        )
        rows = [_write_row(each, padded) for each in self.batchings]
        title = f"After {found[0].steps:,} of the padded batches:" if found else ""
        return [
            Heading(headline, [write_subject(self.setup)]),
            Table(["batches", *_NUMBERS], rows, _NUMBERS, optional=("rows", "FLOPs", "size")),
            *list_fragmentation(found, title),
            Paragraph(_write_notes(self)),
        ]

    def list_bars(self) -> Mapping[str, int | None]:
        return {each.batching.name: each.quantile_bytes[-1] for each in self.batchings}

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.setup.model,
            "inputs": list(self.setup.inputs),
            "gpu": self.setup.gpu,
            "axis": self.axis,
            "samples": self.samples,
            "batchings": [_describe(each) for each in self.batchings],
            "fragmentation": [asdict(each) for each in self.fragmentation],
            "analyses": self.analyses,
            "error": self.error,
        }


def _describe(memory: BatchingMemory) -> dict[str, Any]:
    batching = memory.batching
    quantiles = zip(SHARES, memory.quantile_sizes, memory.quantile_bytes, strict=True)
    return {
        "name": batching.name,
        "rows": batching.rows,
        "steps": len(batching.sizes),
        "padding": batching.padding,
        "cut": batching.cut,
        "fullest": memory.fullest,
        "quantiles": [
            {"share": share, "size": size, "peak_bytes": peak_bytes}
            for share, size, peak_bytes in quantiles
        ],
        "flops": memory.flops,
        "unfitting": memory.unfitting,
    }


def _write_row(memory: BatchingMemory, padded: BatchingMemory) -> Sequence[Cell]:
    batching = memory.batching
    return (
        memory.label,
        batching.rows,
        len(batching.sizes),
        memory.quantile_sizes[-1],
        write_share(batching.padding),
        f"{memory.flops / padded.flops:.2f}x" if padded.flops else "",
        *map(Bytes, memory.quantile_bytes),
        "" if memory.unfitting is None else memory.unfitting,
    )


def _write_notes(found: Batches) -> list[str]:
    notes = [
        f"Of {found.samples:,} samples, shuffled. The size is {found.axis}.",
        f"{found.analyses} steps were analysed, all whose peaks are shown; others are computed.",
    ]
    if found.error > _EXACT:
        notes.append(f"Where both were done, peaks differ by up to {found.error:.1%}.")
    for each in found.batchings:
        if each.batching.name == "packed":
            notes.append("Packed: in rows of the longest sample, with no mask between samples.")
        if each.batching.cut:
            notes.append(f"{each.batching.cut:,} samples are longer than the cut.")
    half, most, nearly, _ = found.batchings[0].quantile_sizes
    notes.append(f"Half of the padded batches: up to {half:,}; 90 %: {most:,}; 99 %: {nearly:,}.")
    return [*notes, *found.setup.notes]
