"""Meshes and knobs that fit, as plain text."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.fitting.record import FAR_WEIGHT, Fitting, MeshFit
from fxmem.report.plan_text import write_share
from fxmem.report.tables import Table, wrap
from fxmem.report.text import write_mesh, write_subject
from fxmem.units import format_bytes

_NUMBERS = ("peak", "reserved", "sent in node", "to others", "recomputed")


def list_fitting_blocks(found: Fitting, width: int | None = None) -> list[str | Table]:
    """Lists the blocks of the report."""
    headers = ["fits", "mesh", "by", "with", *_NUMBERS]
    rows = [(row.fits, *_write_row(row)) for row in found.rows]
    return [
        f"{_write_headline(found)}\n{wrap(write_subject(found.setup), width)}",
        Table(headers, rows, right=_NUMBERS, names=("by",), width=width),
        "\n".join(wrap(note, width) for note in _write_notes(found)),
    ]


def write_layout(row: MeshFit) -> str:
    """Writes a mesh, the way a model is laid out on it, and the knobs."""
    knobs = f" with {row.knobs}" if str(row.knobs) else ""
    return f"{row.parallelize} on {write_mesh(row.mesh)}{knobs}"


def _write_headline(found: Fitting) -> str:
    where = f"{found.gpus} x {found.gpu} ({format_bytes(found.capacity_bytes)})"
    best = found.best
    if best is None:
        return f"Nothing was found that fits {where}"
    return f"Fits {where}: {write_layout(best)}"


def _write_row(row: MeshFit) -> tuple[str, ...]:
    head = write_mesh(row.mesh), row.parallelize, str(row.knobs)
    if row.peak_bytes is None or row.reserved_bytes is None:
        return *head, *[""] * len(_NUMBERS)
    sizes = row.peak_bytes, row.reserved_bytes, row.near_bytes, row.far_bytes
    return *head, *map(format_bytes, sizes), write_share(row.recomputed_flops / max(row.flops, 1))


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
