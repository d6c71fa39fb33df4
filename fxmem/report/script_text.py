"""The report on a script as plain text: its largest step, all of its steps, and the first."""

from __future__ import annotations

from fxmem.report.document import build_document
from fxmem.report.tables import Table, join_blocks, wrap
from fxmem.report.text import list_blocks, write_place
from fxmem.scripts.script_run import ScriptRun
from fxmem.units import format_bytes

_PARTIAL = "The script was interrupted: these are the steps that it had ended."
_ALIKE = 0.01  # share of the peak by which steps may differ and count as one


def render_script(run: ScriptRun, *, top: int = 10, width: int | None = None) -> str:
    """Writes the report on the largest step, a row for each, and the report on the first.

    The first step is left out where its peak is that of the largest, or within 1 % of it.
    """
    return join_blocks(list_script_blocks(run, top, width))


def list_script_blocks(
    run: ScriptRun, top: int = 10, width: int | None = None
) -> list[str | Table]:
    """Lists the blocks of the report on a script."""
    largest, first, steps = run.largest, run.steps[0], []
    for step in run.steps:
        peak, figures = step.peak, (step.peak_bytes, step.reserved_bytes)
        place = write_place(peak.phase, peak.node.name if peak.node else None, peak.source)
        steps.append((", ".join(step.setup.inputs), *map(format_bytes, figures), place))
    headers = ["recorded", "peak", "reserved", "in"]
    reads = [
        (
            " in ".join(map(str, filter(None, (read.source, read.library)))),
            read.value,
            "a branch may hang on it" if read.decides else "",
        )
        for read in run.reads
    ]
    differs = abs(first.peak_bytes - largest.peak_bytes) > _ALIKE * largest.peak_bytes
    return [
        *list_blocks(build_document(largest), top, width=width),
        Table(headers, steps, right=["peak", "reserved"], names=["in"], width=width),
        Table(["values read at", "taken as", ""], reads, width=width),
        "\n".join(wrap(note, width) for note in (*run.notes, *[_PARTIAL] * run.partial)),
        *(list_blocks(build_document(first), top, width=width) if differs else ()),
    ]
