"""A report as plain text, for a terminal or a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tabulate import tabulate

from fxmem.graph import Phase, SourceLocation
from fxmem.report.cells import escape_controls, fit_columns, measure_width
from fxmem.report.document import Document, Headline, LiveRow, NodeRow, Subject
from fxmem.units import format_bytes, format_flops

DEFAULT_WIDTH = 120


def render_text(
    document: Document, *, top: int = 10, nodes: bool = False, width: int = DEFAULT_WIDTH
) -> str:
    """The report, its first line the answer.

    Args:
        document: What to say.
        top: How many of the storages alive at the peak to list; the rest are one row.
        nodes: Whether to add a table with one row for each node.
        width: Columns that a line may take; long names are shortened in the middle.

    Returns:
        Lines, each ended by a newline.
    """
    blocks = [
        "\n".join([_write_headline(document.headline), *_write_subject(document.subject)]),
        _write_totals(document),
        _write_breakdown(document),
        _write_live(document, top, width),
    ]
    if nodes:
        blocks.append(_write_nodes(document.nodes, width))
    if document.notes:
        blocks.append("\n".join(document.notes))
    lines = "\n\n".join(blocks).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _write_headline(headline: Headline) -> str:
    peak = f"Peak {format_bytes(headline.peak_bytes)}"
    if headline.phase is Phase.OPTIMIZER:
        return f"{peak} in optimizer step"
    place = ", ".join(filter(None, [headline.node, _write_source(headline.source)]))
    of_place = f" of {escape_controls(place)}" if place else ""
    return f"{peak} in {headline.phase.value}{of_place}"


def _write_subject(subject: Subject) -> Iterable[str]:
    inputs = ", ".join(subject.inputs) or "no inputs"
    parts = [subject.model, inputs, subject.mode, subject.device]
    if subject.mode == "train":
        parts.append(f"optimizer {subject.optimizer or 'none'}")
        parts.append(f"loss {subject.loss or 'default'}")
    yield escape_controls("; ".join(parts))
    reason = f", not fx: {subject.frontend_reason}" if subject.frontend_reason else ""
    yield escape_controls(f"traced by {subject.frontend}{reason}")


def _write_totals(document: Document) -> str:
    rows = [(total.label, format_bytes(total.nbytes)) for total in document.totals]
    rows.append(("forward", format_flops(document.forward_flops)))
    if document.subject.mode == "train":
        rows.append(("backward", format_flops(document.backward_flops)))
    return _align([["over the step", "total"], *rows], right=[1])


def _write_breakdown(document: Document) -> str:
    rows = [
        (row.category.value, format_bytes(row.nbytes), f"{100 * row.share:.1f} %")
        for row in document.breakdown
    ]
    total = ("peak", format_bytes(document.headline.peak_bytes), "100.0 %")
    return _align([["at the peak", "bytes", "share"], *rows, total], right=[1, 2])


def _write_live(document: Document, top: int, width: int) -> str:
    header = ["bytes", "category", "alive at the peak", "shape", "dtype", "saved by", "source"]
    shown, rest = document.live[:top], document.live[top:]
    rows = [header, *map(_list_live_cells, shown)]
    table = _align(fit_columns(rows, flexible=[2, 3, 5, 6], width=width), right=[0])
    if rest:
        rest_bytes = sum(row.nbytes for row in rest)
        table += f"\n... and {len(rest)} more, {format_bytes(rest_bytes)}"
    return table


def _list_live_cells(row: LiveRow) -> list[str]:
    return [
        format_bytes(row.nbytes),
        row.category.value,
        escape_controls(row.name),
        _write_shape(row.shape),
        escape_controls(row.dtype),
        _write_saved_by(row.saved_by),
        escape_controls(_write_source(row.source)),
    ]


def _write_saved_by(names: Sequence[str]) -> str:
    if len(names) > 2:
        names = [names[0], f"{len(names) - 1} more"]
    return escape_controls(", ".join(names))


def _write_nodes(nodes: Sequence[NodeRow], width: int) -> str:
    header = ["node", "target", "shape", "dtype", "output", "saved", "transient"]
    header += ["forward", "backward", "source"]
    rows = [header, *map(_list_node_cells, nodes)]
    return _align(fit_columns(rows, flexible=[0, 1, 2, 9], width=width), right=[4, 5, 6, 7, 8])


def _list_node_cells(row: NodeRow) -> list[str]:
    return [
        escape_controls(row.name),
        escape_controls(row.target),
        _write_shape(row.shape),
        escape_controls(row.dtype or ""),
        *(_write_bytes(n) for n in (row.output_bytes, row.saved_bytes, row.transient_bytes)),
        *(_write_flops(n) for n in (row.forward_flops, row.backward_flops)),
        escape_controls(_write_source(row.source)),
    ]


def _write_bytes(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


def _write_flops(flops: int) -> str:
    return format_flops(flops) if flops else "-"


def _write_shape(shape: tuple[int, ...] | None) -> str:
    return "" if shape is None else "x".join(map(str, shape)) or "scalar"


def _write_source(source: SourceLocation | None) -> str:
    return str(source) if source else ""


def _align(rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    header, *body = rows
    alignments = ["right" if column in right else "left" for column in range(len(header))]
    # As rows of their own: tabulate widens the columns of what it is told are headers.
    rules = ["-" * max(map(measure_width, column)) for column in zip(*rows, strict=True)]
    return tabulate(
        [header, rules, *body],
        tablefmt="plain",
        colalign=alignments,
        disable_numparse=True,  # it would rewrite a layer that is called "1e3"
    )
