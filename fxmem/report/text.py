"""A report as plain text, for a terminal or a file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from fxmem.gpus import CONTEXT_BYTES
from fxmem.graph import Phase, SourceLocation
from fxmem.memory.allocation import Exhaustion
from fxmem.report.cells import escape_controls, shorten_middle, shorten_name
from fxmem.report.document import Document, Fit, Headline, LiveRow, NodeRow, Subject
from fxmem.report.tables import Column, write_table
from fxmem.specs import DTYPES
from fxmem.units import format_bytes, format_flops

_NUMBER = Column(right=True)
_TEXT = Column()
_NAME = Column(shorten=shorten_name, least=24)
_SOURCE = Column(shorten=shorten_middle, least=24)
_SHORT_DTYPES = {name: short for short, name in reversed(DTYPES.items())}

_LIVE_COLUMNS = {
    "bytes": _NUMBER,
    "category": _TEXT,
    "alive at the peak": _NAME,
    "shape": _TEXT,
    "dtype": _TEXT,
    "tensor": _TEXT,
    "saved by": Column(shorten=shorten_name, least=12, yields=True),
    "source": _SOURCE,
}
_LIVE_LAYOUTS = (
    ("bytes", "category", "alive at the peak", "shape", "dtype", "saved by", "source"),
    ("bytes", "category", "alive at the peak", "shape", "dtype", "source"),
    ("bytes", "category", "alive at the peak", "tensor", "source"),
    ("bytes", "category", "alive at the peak", "source"),
)
_NODE_COLUMNS = {
    "node": _NAME,
    "target": Column(shorten=shorten_middle, least=12, yields=True),
    "shape": _TEXT,
    "dtype": _TEXT,
    "tensor": _TEXT,
    "output": _NUMBER,
    "saved": _NUMBER,
    "transient": _NUMBER,
    "forward": _NUMBER,
    "backward": _NUMBER,
    "source": _SOURCE,
}
_NODE_LAYOUTS = (
    (
        *("node", "target", "shape", "dtype", "output", "saved", "transient"),
        *("forward", "backward", "source"),
    ),
    ("node", "tensor", "output", "saved", "transient", "forward", "backward", "source"),
    ("node", "tensor", "output", "saved", "transient", "source"),
    ("node", "output", "saved", "transient", "source"),
)


def render_text(
    document: Document, *, top: int = 10, nodes: bool = False, width: int | None = None
) -> str:
    """The report, its first line the answer.

    Args:
        document: What to say.
        top: How many of the storages alive at the peak to list; the rest are one row.
        nodes: Whether to add a table with one row for each node.
        width: Columns that the lines of tables and notes may take: where they are few, columns
            are left out and names shortened. None for no limit.

    Returns:
        Lines, each ended by a newline.
    """
    about = [write_subject(document.subject), *write_first_step(document)]
    wrapped = (_wrap_note(line, width) for line in about)
    blocks = [
        "\n".join([write_headline(document.headline), *wrapped]),
        _write_device(document, width),
        _write_totals(document),
        _write_breakdown(document),
        _write_live(document, top, width),
    ]
    if nodes:
        rows = [_list_node_cells(row) for row in document.nodes]
        blocks.append(write_table(_NODE_COLUMNS, _NODE_LAYOUTS, rows, width))
    if document.notes:
        blocks.append("\n".join(_wrap_note(note, width) for note in document.notes))
    lines = "\n\n".join(filter(None, blocks)).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


def write_headline(headline: Headline) -> str:
    """How much, and where, in one line."""
    return escape_controls(f"Peak {_write_peak(headline)}")


def write_first_step(document: Document) -> Iterator[str]:
    """The peak of the first step in one line; none where it is that of the second."""
    first = document.first_step
    if first is not None:
        than = "lower" if first.peak_bytes < document.headline.peak_bytes else "higher"
        yield escape_controls(
            f"The first step peaks {than}: {_write_peak(first)}; "
            "all other figures are the second step's"
        )


def _write_peak(headline: Headline) -> str:
    peak = format_bytes(headline.peak_bytes)
    if headline.phase is Phase.OPTIMIZER:
        return f"{peak} in optimizer step{_write_update(headline)}"
    place = ", ".join(filter(None, [headline.node, write_source(headline.source)]))
    return f"{peak} in {headline.phase.value}{f' of {place}' if place else ''}"


def _write_update(headline: Headline) -> str:
    of_optimizer = f" of {headline.optimizer}" if headline.optimizer else ""
    names = headline.parameters
    if len(names) > 1:
        return f"{of_optimizer}, at {len(names)} parameters together"
    return f"{of_optimizer}, at parameter {names[0]}" if names else of_optimizer


def write_subject(subject: Subject) -> str:
    """What was analysed, in one line."""
    inputs = ", ".join(subject.inputs) or "no inputs"
    mode = " under ".join(filter(None, [subject.mode, subject.context]))
    parts = [subject.model, inputs, mode, subject.gpu or subject.device]
    if subject.autocast:
        parts.append(f"autocast {subject.autocast}")
    if subject.mode == "train":
        parts.append(f"optimizer {subject.optimizer or 'none'}")
        parts.append(f"loss {subject.loss or 'default'}")
    if subject.loop:
        parts.append(f"loop {subject.loop}")
    return escape_controls("; ".join(parts))


def _write_device(document: Document, width: int | None) -> str:
    rows = [
        (row.label, _write_range(row.least_bytes, row.most_bytes), row.compare_with)
        for row in document.device
    ]
    if not rows:
        return ""
    table = _write_small_table({"on the GPU": _TEXT, "most": _NUMBER, "compare with": _TEXT}, rows)
    if document.fit is None:
        return table
    return f"{table}\n\n{_wrap_note(write_fit(document.fit), width)}"


def write_fit(fit: Fit) -> str:
    """Whether the step fits the GPU, in one sentence."""
    gpu = f"{fit.gpu} ({format_bytes(fit.capacity_bytes)})"
    ran_out = fit.exhaustion
    if ran_out is None:
        times = f"{fit.retries} times" if fit.retries > 1 else "once"
        cached = f", after the allocator has given back its cache {times}" if fit.retries else ""
        return escape_controls(f"Fits {gpu}{cached}.")
    where = f"{_write_place(ran_out)}: {ran_out.cause}"
    if ran_out.is_certain:
        return escape_controls(f"Does not fit {gpu}, {where}.")
    least, most = map(format_bytes, CONTEXT_BYTES)
    return escape_controls(
        f"Fits {gpu} if the CUDA context takes {least}, not if it takes {most}; then, {where}."
    )


def _write_place(ran_out: Exhaustion) -> str:
    """In which step, and where in it."""
    if ran_out.phase is None:
        return f"moving {ran_out.storage or 'the model'} to the GPU"
    step = "" if ran_out.step is not None else "the first step's "
    if ran_out.phase is Phase.OPTIMIZER:
        return f"in {step}optimizer step{f', at {ran_out.storage}' if ran_out.storage else ''}"
    place = ", ".join(filter(None, [ran_out.node, write_source(ran_out.source)]))
    return f"in {step}{ran_out.phase.value}{f' of {place}' if place else ''}"


def _write_range(least_bytes: int, most_bytes: int) -> str:
    least, most = format_bytes(least_bytes), format_bytes(most_bytes)
    return least if least == most else f"{least} to {most}"


def _write_totals(document: Document) -> str:
    rows = [(total.label, format_bytes(total.nbytes)) for total in document.totals]
    rows.append(("forward", format_flops(document.forward_flops)))
    if document.subject.mode == "train":
        rows.append(("backward", format_flops(document.backward_flops)))
    columns = {"over the step": _TEXT, "total": _NUMBER}
    return _write_small_table(columns, rows)


def _write_breakdown(document: Document) -> str:
    rows = [
        (row.category.value, format_bytes(row.nbytes), f"{100 * row.share:.1f} %")
        for row in document.breakdown
    ]
    rows.append(("peak", format_bytes(document.headline.peak_bytes), "100.0 %"))
    return _write_small_table({"at the peak": _TEXT, "bytes": _NUMBER, "share": _NUMBER}, rows)


def _write_small_table(columns: dict[str, Column], rows: Sequence[Sequence[str]]) -> str:
    headers = tuple(columns)
    return write_table(columns, [headers], [dict(zip(headers, r, strict=True)) for r in rows])


def _write_live(document: Document, top: int, width: int | None) -> str:
    shown, rest = document.live[:top], document.live[top:]
    rows = [_list_live_cells(row) for row in shown]
    table = write_table(_LIVE_COLUMNS, _LIVE_LAYOUTS, rows, width)
    if rest:
        rest_bytes = sum(row.nbytes for row in rest)
        table += f"\n... and {len(rest)} more, {format_bytes(rest_bytes)}"
    return table


def _list_live_cells(row: LiveRow) -> dict[str, str]:
    return {
        "bytes": format_bytes(row.nbytes),
        "category": row.category.value,
        "alive at the peak": escape_controls(row.label),
        **_list_tensor_cells(row.shape, row.dtype),
        "saved by": _write_saved_by(row.saved_by),
        "source": escape_controls(write_source(row.source)),
    }


def _write_saved_by(names: Sequence[str]) -> str:
    if len(names) > 2:
        names = [names[0], f"{len(names) - 1} more"]
    return escape_controls(", ".join(names))


def _list_node_cells(row: NodeRow) -> dict[str, str]:
    return {
        "node": escape_controls(row.name),
        "target": escape_controls(row.target),
        **_list_tensor_cells(row.shape, row.dtype or ""),
        "output": _write_bytes(row.output_bytes),
        "saved": _write_bytes(row.saved_bytes),
        "transient": _write_bytes(row.transient_bytes),
        "forward": _write_flops(row.forward_flops),
        "backward": _write_flops(row.backward_flops),
        "source": escape_controls(write_source(row.source)),
    }


def _list_tensor_cells(shape: tuple[int, ...] | None, dtype: str) -> dict[str, str]:
    """Shape and dtype, and both as ``--input`` takes them."""
    if shape is None:
        return {"shape": "", "dtype": "", "tensor": ""}
    sizes = "x".join(map(str, shape)) or "scalar"
    dtype = escape_controls(dtype)
    return {"shape": sizes, "dtype": dtype, "tensor": f"{sizes}:{_SHORT_DTYPES.get(dtype, dtype)}"}


def _wrap_note(note: str, width: int | None) -> str:
    note = escape_controls(note)
    return note if width is None else "\n".join(textwrap.wrap(note, width))


def _write_bytes(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


def _write_flops(flops: int) -> str:
    return format_flops(flops) if flops else "-"


def write_source(source: SourceLocation | None) -> str:
    """A line of code as ``file.py:12``; empty for none."""
    return str(source) if source else ""
