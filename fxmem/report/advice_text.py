"""Advice as plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxmem.report.cells import escape_controls
from fxmem.report.document import Subject
from fxmem.report.text import write_subject
from fxmem.units import format_bytes

if TYPE_CHECKING:
    from fxmem.advice.record import Advice

_NONE = "Nothing else that was tried lowers the peak by 0.5 % or 1 MiB."


def render_advice(
    advice: Sequence[Advice],
    baseline_bytes: int,
    subject: Subject | None = None,
    *,
    width: int | None = None,
) -> str:
    """What else lowers a peak, most first.

    Args:
        advice: As :func:`fxmem.advise` returns it.
        baseline_bytes: The peak without any of it.
        subject: The step, where the text stands alone; None where it follows a plan's.
        width: Columns that the lines may take; None for no limit.

    Returns:
        Lines, each ended by a newline.
    """
    peak = format_bytes(baseline_bytes)
    title = f"What else lowers the peak of {peak}, each by itself and without a plan:"
    blocks = [_wrap(title if advice else _NONE, "", width), *(_write(a, width) for a in advice)]
    if subject is not None:
        blocks.insert(0, f"Peak {peak}\n{write_subject(subject)}")
    return "\n\n".join(blocks) + "\n"


def _write(advice: Advice, width: int | None) -> str:
    saving, peak = format_bytes(advice.saving_bytes), format_bytes(advice.peak_bytes)
    lines = (
        f"- {saving} off the peak, {peak} left: {advice.change}.",
        f"  Write: {advice.option}",
        f"  Cost: {advice.cost}",
    )
    return "\n".join(_wrap(escape_controls(line), "  ", width) for line in lines)


def _wrap(text: str, indent: str, width: int | None) -> str:
    if width is None:
        return text
    lines = textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)
    return "\n".join(lines)
