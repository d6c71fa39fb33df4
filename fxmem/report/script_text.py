"""The report on a script as plain text: its largest step, all of its steps, and the first."""

from __future__ import annotations

from fxmem.report.document import build_document
from fxmem.report.tables import Table, join_blocks, wrap
from fxmem.report.text import render_text, write_place, write_source
from fxmem.scripts.script_run import ScriptRun
from fxmem.units import format_bytes

_ALIKE = 0.01  # share of the peak by which steps may differ and count as one


def render_script(run: ScriptRun, *, top: int = 10, width: int | None = None) -> str:
    """Writes the report on the largest step, a row for each, and the report on the first.

    The first step is left out where its peak is that of the largest, or within 1 % of it.
    """
    largest, first = run.largest, run.steps[0]
    steps = []
    for step in run.steps:
        peak, figures = step.peak, (step.peak_bytes, step.reserved_bytes)
        place = write_place(peak.phase, peak.node.name if peak.node else None, peak.source)
        steps.append((", ".join(step.setup.inputs), *map(format_bytes, figures), place))
    reads = [
        (write_source(read.source), read.value, "a branch may hang on it" if read.decides else "")
        for read in run.reads
    ]
    blocks: list[str | Table] = [
        render_text(build_document(largest), top=top, width=width),
        Table(
            ["recorded", "peak", "reserved", "in"],
            steps,
            right=["peak", "reserved"],
            names=["in"],
            width=width,
        ),
        "\n".join(wrap(note, width) for note in run.notes),
    ]
    if reads:
        blocks.append(Table(["values read at", "taken as", ""], reads, width=width))
    if abs(first.peak_bytes - largest.peak_bytes) > _ALIKE * largest.peak_bytes:
        blocks.append(render_text(build_document(first), top=top, width=width))
    return join_blocks(blocks)
