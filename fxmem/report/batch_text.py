"""The largest batch that fits, as plain text: one answer, or a table of several settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fxmem.report.plan_text import write_share
from fxmem.report.tables import Table, join_blocks, wrap
from fxmem.report.text import write_subject
from fxmem.units import format_bytes

if TYPE_CHECKING:
    from fxmem.batching.record import MaxBatch

_NUMBERS = ("batch", "size", "peak", "added time", "next", "its peak", "with a plan")


def list_max_batch_blocks(found: MaxBatch, width: int | None = None) -> list[str | Table]:
    """Lists the blocks of the report on the largest size."""
    noun, rows = _name_size(found), []
    for label, each in ("as it is", found), ("with a plan", found.planned):
        if each is None:
            continue
        time = "" if each.plan is None else write_share(each.plan.overhead)
        if each.batch:
            rows.append((label, str(each.batch), _write_size(each.peak_bytes), time, "yes"))
        if each.next_batch is not None:
            cause = each.next_cause.removeprefix("out of memory: ").partition(", with ")[0]
            why = "refused" if each.next_peak_bytes is None else f"no: {cause}"
            rows.append((label, str(each.next_batch), _write_size(each.next_peak_bytes), "", why))
    headers = ["step", noun, "peak", "added time", "fits"]
    return [
        f"{_write_headline(found, noun)}\n{wrap(write_subject(found.setup), width)}",
        Table(headers, rows, right=_NUMBERS, names=("fits",), width=width),
        "\n".join(wrap(line, width) for line in _write_notes(found, noun)),
    ]


def render_max_batches(
    rows: Sequence[tuple[Mapping[str, str], MaxBatch]], *, width: int | None = None
) -> str:
    """Writes a row for each of several settings of one step, and what the memory is kept for."""
    first = rows[0][1]
    noun = _name_size(first)
    headers = [*rows[0][0], noun, "peak", "next", "its peak", "with a plan"]
    cells = []
    for settings, found in rows:
        planned = "" if found.planned is None else str(found.planned.batch)
        following = "" if found.next_batch is None else str(found.next_batch)
        peaks = (found.peak_bytes, found.next_peak_bytes)
        peak, other = map(_write_size, peaks)
        cells.append((*settings.values(), str(found.batch), peak, following, other, planned))
    fitting = f"The largest {noun} that fits {format_bytes(first.memory_bytes)}"
    return join_blocks(
        [
            f"{fitting}\n{wrap(first.setup.model, width)}",
            Table(headers, cells, right=_NUMBERS, width=width),
            "\n".join(wrap(line, width) for line in _write_notes(first, noun, len(rows))),
        ]
    )


def _name_size(found: MaxBatch) -> str:
    return "batch" if found.axis.startswith("dimension 0 of") else "size"


def _write_headline(found: MaxBatch, noun: str) -> str:
    if not found.batch:
        line = f"No {noun} fits {format_bytes(found.memory_bytes)}"
    else:
        line = f"Largest {noun} {found.batch}, with a peak of {_write_size(found.peak_bytes)}"
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
    notes = [
        f"{memory}.",
        f"The {noun} is {found.axis}{every}{analysed}.",
    ]
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


def _write_size(nbytes: int | None) -> str:
    return "" if nbytes is None else format_bytes(nbytes)
