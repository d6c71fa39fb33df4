"""Plans as plain text: one plan, and the table of all trade-offs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from fxmem.graph import Phase
from fxmem.memory.liveness import Peak
from fxmem.planning.plan import (
    GRAPH,
    DelPoint,
    InplaceChange,
    Limit,
    LimitKind,
    Plan,
    Segment,
)
from fxmem.report.cells import escape_controls
from fxmem.report.document import Subject
from fxmem.report.plan_tables import (
    write_dels,
    write_front,
    write_inplace,
    write_limit,
    write_segments,
    write_share,
)
from fxmem.report.text import write_source, write_subject
from fxmem.units import format_bytes

_ALLOWED = 0.1
"""The share of time that the example below the table of trade-offs allows."""
_REASONS = 5
"""How many reasons not to compute nodes again are told; the rest are counted."""


def render_plan(
    plan: Plan, subject: Subject, *, peak: Peak | None = None, width: int | None = None
) -> str:
    """A plan, its first line the answer.

    Args:
        plan: What to tell of.
        subject: The step that it was made for.
        peak: Where the step has its peak with the plan; None where that is not known.
        width: Columns that the lines of tables and notes may take; None for no limit.

    Returns:
        Lines, each ended by a newline.
    """
    blocks = [
        f"{_write_headline(plan)}\n{write_subject(subject)}",
        _wrap(" ".join(filter(None, [_write_place(peak), _write_reserved(plan)])), width),
        write_segments(plan, width),
        write_inplace(plan.inplace, width),
        write_dels(plan.dels, width),
        _write_limits(plan.limits, width),
        "\n".join(_wrap(note, width) for note in _write_notes(plan)),
    ]
    return _join(blocks)


def render_front(plans: Sequence[Plan], subject: Subject, *, width: int | None = None) -> str:
    """The trade-offs of a step, cheapest first, and how to take one.

    Args:
        plans: As :func:`fxmem.pareto` returns them.
        subject: The step that they were made for.
        width: Columns that the lines may take; None for no limit.

    Returns:
        Lines, each ended by a newline.
    """
    baseline_bytes = plans[0].baseline_peak_bytes
    count = f"{len(plans)} plan{'s' if len(plans) > 1 else ''}"
    least = format_bytes(min(plan.peak_bytes for plan in plans))
    blocks = [
        f"Peak {format_bytes(baseline_bytes)}; {count}, down to {least}\n{write_subject(subject)}",
        write_front(plans, width),
        _write_limits(plans[0].limits, width),
        _wrap(_write_advice(plans), width),
    ]
    return _join(blocks)


def _join(blocks: Iterable[str]) -> str:
    lines = "\n\n".join(filter(None, blocks)).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _wrap(text: str, width: int | None) -> str:
    return text if width is None else "\n".join(textwrap.wrap(text, width))


def _write_headline(plan: Plan) -> str:
    before, after = format_bytes(plan.baseline_peak_bytes), format_bytes(plan.peak_bytes)
    share = write_share(plan.peak_bytes / (plan.baseline_peak_bytes or 1))
    text = f"Peak {before} -> {after} ({share})"
    if not plan.segments:
        return f"{text}, nothing is computed again"
    time, flops = write_share(plan.overhead), write_share(plan.overhead_flops)
    return f"{text} for {time} more time, {flops} more FLOPs"


def _write_place(peak: Peak | None) -> str:
    if peak is None:
        return ""
    if peak.phase is Phase.OPTIMIZER:
        return "The peak then lies in the optimizer's step."
    node = "" if peak.node is None else peak.node.name
    place = ", ".join(filter(None, [node, write_source(peak.source)]))
    return escape_controls(
        f"The peak then lies in {peak.phase.value}{f' of {place}' if place else ''}."
    )


def _write_reserved(plan: Plan) -> str:
    if plan.reserved_bytes <= plan.peak_bytes:  # as on the CPU, where nothing is reserved
        return ""
    return f"The allocator reserves {format_bytes(plan.reserved_bytes)}."


def _write_limits(limits: Sequence[Limit], width: int | None) -> str:
    """What is never computed again, by reason, and how many nodes no segment begins with."""
    fixed = [limit for limit in limits if limit.kind is not LimitKind.BEGIN]
    lines = []
    if fixed:
        noun = "module" if fixed[0].kind is LimitKind.MODULE else "node"
        count = f"1 {noun} is" if len(fixed) == 1 else f"{len(fixed)} {noun}s are"
        lines.append(f"{count} never computed again:")
    by_reason: dict[str, list[Limit]] = {}
    for limit in fixed:
        by_reason.setdefault(limit.reason, []).append(limit)
    for reason, group in [*by_reason.items()][:_REASONS]:
        place = ", ".join(filter(None, [group[0].node, write_source(group[0].source)]))
        more = f", and {len(group) - 1} more" if len(group) > 1 else ""
        lines.append(_wrap(escape_controls(f"- {place}{more}: {reason}"), width))
    rest = sum(len(group) for group in [*by_reason.values()][_REASONS:])
    if rest:
        lines.append(f"- {rest} more for other reasons")
    starts = len(limits) - len(fixed)
    if starts:
        count = "1 node" if starts == 1 else f"{starts} nodes"
        text = f"No segment begins at {count}: what it would take is changed in place later."
        lines.append(_wrap(text, width))
    return "\n".join(lines)


def _write_notes(plan: Plan) -> Iterator[str]:
    parts: list[Segment | InplaceChange | DelPoint] = [*plan.segments, *plan.inplace, *plan.dels]
    if any(part.saving_bytes for part in parts):
        yield (
            "Off the peak is by how much the peak would rise without that row alone: rows do not "
            "add up."
        )
    if plan.inplace or plan.dels:
        # Where no graph takes the place of the user's own code, only the user can change that.
        if plan.style == GRAPH:
            yield (
                "Of what is computed in place or let go of, it is what your own code would save "
                "by that row alone."
            )
        else:
            yield (
                "What could be computed in place or let go of is for your own code, and no part of "
                "the new peak."
            )
    if plan.lower_bound_overhead and plan.gap is not None:
        bound, gap = write_share(plan.lower_bound_overhead), write_share(plan.gap)
        yield f"No plan with this peak adds less than {bound} of time: this one, {gap} above that."


def _write_advice(plans: Sequence[Plan]) -> str:
    if len(plans) == 1:
        return "No plan was found that takes less."
    chosen = [plan for plan in plans[1:] if plan.overhead <= _ALLOWED] or plans[1:2]
    size = write_limit(chosen[-1].peak_bytes).replace(" ", "")
    return (
        f"Take a row by its peak, as --budget {size}, or by time, as --max-overhead {_ALLOWED}; "
        "-o plan.json writes it."
    )
