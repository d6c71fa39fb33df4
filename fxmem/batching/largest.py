"""The largest size that fits a memory, as pure data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fxmem.planning.plan import Plan
from fxmem.report.blocks import Block, Heading, Paragraph
from fxmem.report.result import Report, Result
from fxmem.report.tables import Bytes, Cell, Table
from fxmem.report.text import write_share, write_subject
from fxmem.setup import Setup
from fxmem.units import format_bytes

SCHEMA_VERSION = 1
_NUMBERS = ("batch", "size", "peak", "added time", "next", "its peak", "with a plan")


@dataclass(frozen=True, slots=True)
class MaxBatch(Result):
    """The largest batch, or other size along an axis of the inputs, whose step fits.

    Attributes:
        batch: The largest size that fits; 0 where none does.
        peak_bytes: The peak of its step; None where none fits.
        next_batch: The smallest size found that does not fit, or that the model refuses. None
            where the search found neither.
        next_peak_bytes: The peak of its step; None where the model refuses it.
        next_cause: Why it does not fit, in the allocator's words, or the model's.
        multiple_of: The distance of sizes that the model takes, or that were asked for.
        axis: The dimensions of the inputs that have the size.
        memory_bytes: All memory of the device.
        context_bytes: Memory kept free for CUDA's context; 0 on the CPU.
        margin_bytes: Memory kept free besides.
        analyses: How many steps were analysed to find the answer.
        setup: The step, with the inputs that were given.
        plan: The plan with which the step fits; None for the step as it is.
        planned: The largest size with a plan; None where no plan was asked for.
    """

    batch: int
    peak_bytes: int | None
    next_batch: int | None
    next_peak_bytes: int | None
    next_cause: str
    multiple_of: int
    axis: str
    memory_bytes: int
    context_bytes: int
    margin_bytes: int
    analyses: int
    setup: Setup
    plan: Plan | None = None
    planned: MaxBatch | None = None

    def __repr__(self) -> str:
        return (
            f"MaxBatch(batch={self.batch}, peak_bytes={self.peak_bytes}, "
            f"memory_bytes={self.memory_bytes}, model={self.setup.model!r})"
        )

    @property
    def is_exact(self) -> bool:
        """True if no size is left between the answer and the one that does not fit."""
        return self.next_batch is not None and self.next_batch - self.batch <= self.multiple_of

    def list_blocks(self) -> list[Block]:
        noun, rows = _name_size(self), list[Sequence[Cell]]()
        for label, each in ("as it is", self), ("with a plan", self.planned):
            if each is None:
                continue
            time = "" if each.plan is None else write_share(each.plan.overhead)
            if each.batch:
                rows.append((label, each.batch, _show_size(each.peak_bytes), time, "yes"))
            if each.next_batch is not None:
                cause = each.next_cause.removeprefix("out of memory: ").partition(", with ")[0]
                why = "refused" if each.next_peak_bytes is None else f"no: {cause}"
                rows.append((label, each.next_batch, _show_size(each.next_peak_bytes), "", why))
        headers = ["step", noun, "peak", "added time", "fits"]
        return [
            Heading(_write_headline(self, noun), [write_subject(self.setup)]),
            Table(headers, rows, right=_NUMBERS, names=("fits",)),
            Paragraph(_write_notes(self, noun)),
        ]

    def list_bars(self) -> Mapping[str, int | None]:
        return {
            f"batch {self.batch}": self.peak_bytes,
            f"batch {self.next_batch}": self.next_peak_bytes,
            "memory": self.memory_bytes,
        }

    def to_dict(self) -> dict[str, Any]:
        setup = self.setup
        values: dict[str, Any] = {
            "schema_version": SCHEMA_VERSION,
            "model": setup.model,
            "inputs": list(setup.inputs),
            "gpu": setup.gpu,
        }
        values |= {f.name: getattr(self, f.name) for f in fields(self) if f.name != "setup"}
        values["is_exact"] = self.is_exact
        values["plan"] = None if self.plan is None else json.loads(self.plan.to_json())
        values["planned"] = None if self.planned is None else self.planned.to_dict()
        return values


def report_max_batches(found: Sequence[tuple[Mapping[str, str], MaxBatch]]) -> Report:
    """Reports a row for each of several settings of one step, and what the memory is kept for."""
    first = found[0][1]
    noun = _name_size(first)
    headers = [*found[0][0], noun, "peak", "next", "its peak", "with a plan"]
    rows: list[Sequence[Cell]] = []
    for settings, each in found:
        planned = "" if each.planned is None else each.planned.batch
        following = "" if each.next_batch is None else each.next_batch
        peak, other = map(_show_size, (each.peak_bytes, each.next_peak_bytes))
        rows.append((*settings.values(), each.batch, peak, following, other, planned))
    fitting = f"The largest {noun} that fits {format_bytes(first.memory_bytes)}"
    blocks: list[Block] = [
        Heading(fitting, [first.setup.model]),
        Table(headers, rows, right=_NUMBERS),
        Paragraph(_write_notes(first, noun, len(found))),
    ]
    return Report(blocks, [{**settings, **each.to_dict()} for settings, each in found])


def _name_size(found: MaxBatch) -> str:
    return "batch" if found.axis.startswith("dimension 0 of") else "size"


def _write_headline(found: MaxBatch, noun: str) -> str:
    if not found.batch:
        line = f"No {noun} fits {format_bytes(found.memory_bytes)}"
    else:
        line = f"Largest {noun} {found.batch}, with a peak of {format_bytes(found.peak_bytes or 0)}"
    planned = found.planned
    if planned is not None and planned.plan is not None and planned.batch > found.batch:
        share = write_share(planned.plan.overhead)
        line += f"; {planned.batch} with a plan, for {share} more time"
    return line


def _write_notes(found: MaxBatch, noun: str, rows: int = 1) -> list[str]:
    kept = [(found.context_bytes, "for CUDA's context"), (found.margin_bytes, "as a margin")]
    texts = [f"{format_bytes(nbytes)} {what}" for nbytes, what in kept if nbytes]
    memory = f"Memory: {format_bytes(found.memory_bytes)}"
    if texts:
        memory += f", minus {' and '.join(texts)}"
    every = f", in multiples of {found.multiple_of}" if found.multiple_of > 1 else ""
    steps = max(found.analyses, 0 if found.planned is None else found.planned.analyses)
    count = "1 step was" if steps == 1 else f"{steps} steps were"
    analysed = "" if rows > 1 else f"; {count} analysed"
    notes = [f"{memory}.", f"The {noun} is {found.axis}{every}{analysed}."]
    if rows > 1:
        return notes
    for each in filter(None, (found, found.planned)):
        label = "" if each.plan is None else " with a plan"
        if each.next_batch is None:
            notes.append(f"No {noun} was found that does not fit{label}.")
        elif each.next_peak_bytes is None:
            notes.append(f"The model refuses {each.next_batch}: {each.next_cause.rstrip('.')}.")
        elif not each.is_exact:
            first, last = each.batch + each.multiple_of, each.next_batch - each.multiple_of
            notes.append(f"From {first} to {last} no {noun} was tried{label}.")
    return notes


def _show_size(nbytes: int | None) -> Cell:
    return "" if nbytes is None else Bytes(nbytes)
