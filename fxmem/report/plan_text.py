"""Plans and advice as plain text: one plan, the table of trade-offs, and other savings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from fxmem.analysis import Setup
from fxmem.graph import Phase
from fxmem.memory.liveness import Peak
from fxmem.planning.plan import (
    GRAPH,
    CheckpointPrice,
    DelPoint,
    InplaceChange,
    Limit,
    LimitKind,
    Plan,
    Segment,
)
from fxmem.report.tables import Table, join_blocks, wrap
from fxmem.report.text import write_place, write_source, write_subject
from fxmem.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from fxmem.advice.finding import Finding

_ALLOWED = 0.1  # share of time that the example below the table of trade-offs allows
_REASONS = 5  # not to recompute nodes that are listed; nodes with others are counted
_NUMBERS = (
    *("nodes", "off the peak", "added time", "added FLOPs"),
    *("peak", "of the step's", "segments", "in place", "del"),
)
_NAMES = ("recomputed", "can run in place", "freed early", "after", "source")


def list_plan_blocks(
    plan: Plan, setup: Setup | None, peak: Peak | None = None, width: int | None = None
) -> list[str | Table]:
    """Lists the blocks of a plan's report; a plan from a file does not tell its step."""
    before, after = format_bytes(plan.baseline_peak_bytes), format_bytes(plan.peak_bytes)
    share = write_share(plan.peak_bytes / (plan.baseline_peak_bytes or 1))
    cost = ", nothing is recomputed"
    if plan.segments:
        time, flops = write_share(plan.overhead), write_share(plan.overhead_flops)
        cost = f" for {time} more time, {flops} more FLOPs"
    place = []
    if peak is not None:
        where = write_place(peak.phase, peak.node.name if peak.node else None, peak.source)
        if peak.phase is Phase.OPTIMIZER:
            where = "the optimizer step"
        place.append(f"The new peak is in {where}.")
    if plan.reserved_bytes > plan.peak_bytes:  # not on the CPU, where nothing is reserved
        place.append(f"The allocator reserves {format_bytes(plan.reserved_bytes)}.")
    subject = [] if setup is None else [write_subject(setup)]
    return [
        "\n".join([f"Peak {before} -> {after} ({share}){cost}", *subject]),
        wrap(" ".join(place), width),
        write_segments(plan, width),
        *_write_changes(plan, width),
        _write_limits(plan.limits, width),
        "\n".join(wrap(note, width) for note in _write_notes(plan)),
    ]


def render_price(price: CheckpointPrice, baseline_bytes: int, width: int | None = None) -> str:
    """Writes what the checkpoints of the model's library take, to be compared with the plans."""
    share = write_share(price.peak_bytes / (baseline_bytes or 1))
    time, flops = write_share(price.overhead), write_share(price.overhead_flops)
    return wrap(
        f"For comparison, model.{price.call}: {format_bytes(price.peak_bytes)} ({share}) for"
        f" {time} more time, {flops} more FLOPs.",
        width,
    )


def render_ways(
    ways: Sequence[tuple[str, Plan | CheckpointPrice]],
    setup: Setup | None,
    *,
    chosen: Plan | None = None,
    budget_bytes: int | None = None,
    width: int | None = None,
) -> str:
    """Writes ways to recompute on a rank, cheapest first: plans, and checkpoints that are none.

    Args:
        ways: Each with its name; the first recomputes nothing, or is a plan as well.
        setup: Of the step; None for a table that follows the chosen plan.
        chosen: The plan that keeps the limit.
        budget_bytes: The limit, where that is a peak.
        width: Columns of the text.
    """
    baseline_bytes = next(way.baseline_peak_bytes for _, way in ways if isinstance(way, Plan))
    headers = ["recomputed", "peak", "of the step's", "added time", "added FLOPs"]
    headers += ["fits"] if budget_bytes is not None else []
    rows = []
    for name, way in ways:
        shares = (way.peak_bytes / (baseline_bytes or 1), way.overhead, way.overhead_flops)
        row = [name, write_limit(way.peak_bytes), *map(write_share, shares)]
        if budget_bytes is not None:
            fits = "yes" if way.peak_bytes <= budget_bytes else "no"
            row.append("chosen" if way is chosen else fits)
        rows.append(row)
    title, advice = "", ""
    if setup is not None:
        least = format_bytes(min(way.peak_bytes for _, way in ways))
        title = f"Peak {format_bytes(baseline_bytes)}, with recomputation down to {least}"
        title = f"{title}\n{write_subject(setup)}"
        advice = (
            "Choose a row by its peak (--budget) or by its added time (--max-overhead); "
            "-o plan.json saves the plan."
        )
    if any(isinstance(way, CheckpointPrice) for _, way in ways):
        note = "By operator: torch.utils.checkpoint keeps attention and every second matrix product"
        advice = f"{note}, which a plan cannot express. {advice}".rstrip()
    return join_blocks([title, _write_rows(headers, rows, width), wrap(advice, width)])


def list_front_blocks(
    plans: Sequence[Plan], setup: Setup | None, width: int | None = None
) -> list[str | Table]:
    """Lists the blocks of the report of a step's trade-offs."""
    baseline_bytes = plans[0].baseline_peak_bytes
    least = format_bytes(min(plan.peak_bytes for plan in plans))
    headers = ["peak", "of the step's", "added time", "added FLOPs", "segments", "in place", "del"]
    rows = []
    for plan in plans:
        shares = (plan.peak_bytes / (baseline_bytes or 1), plan.overhead, plan.overhead_flops)
        segments = str(len([*_iterate_segments(plan.segments)]))
        changes = (str(len(plan.inplace) or ""), str(len(plan.dels) or ""))
        rows.append((write_limit(plan.peak_bytes), *map(write_share, shares), segments, *changes))
    advice = "No plan with a lower peak was found."
    if len(plans) > 1:
        chosen = [plan for plan in plans[1:] if plan.overhead <= _ALLOWED] or plans[1:2]
        size = write_limit(chosen[-1].peak_bytes).replace(" ", "")
        advice = (
            f"Choose a row by its peak (--budget {size}) or by its added time "
            f"(--max-overhead {_ALLOWED}); -o plan.json saves the plan."
        )
    title = f"Peak {format_bytes(baseline_bytes)}; {_count(len(plans), 'plan')}, down to {least}"
    subject = [] if setup is None else [write_subject(setup)]
    return [
        "\n".join([title, *subject]),
        _write_rows(headers, rows, width),
        _write_limits(plans[0].limits, width),
        wrap(advice, width),
    ]


def render_advice(
    advice: Sequence[Finding],
    baseline_bytes: int,
    setup: Setup | None = None,
    *,
    width: int | None = None,
) -> str:
    """Writes what else lowers a peak, most first; with the step where the text stands alone."""
    peak = format_bytes(baseline_bytes)
    title = "No other change that was tried lowers the peak by 0.5 % or 1 MiB."
    if advice:
        title = f"Other ways to lower the peak of {peak}, each by itself and without a plan:"
    blocks = [] if setup is None else [f"Peak {peak}\n{write_subject(setup)}"]
    blocks.append(wrap(title, width))
    for each in advice:
        saving, left = format_bytes(each.saving_bytes), format_bytes(each.peak_bytes)
        place = f" ({write_source(each.source)})" if each.source else ""
        title = f"{each.code} {saving} off the peak, {left} left: {each.change}{place}."
        lines = (title, f"  Write: {each.option}", f"  Cost: {each.cost}")
        blocks.append("\n".join(wrap(line, width, indent="  ") for line in lines))
    if advice:
        blocks.append(f"fxmem explain {advice[0].code} shows the code before and after.")
    return join_blocks(blocks)


def write_segments(plan: Plan, width: int | None) -> str | Table:
    """Writes a table of what is recomputed; a segment within another is below that."""
    seconds = sum(segment.recompute_s for segment in plan.segments)
    flops = sum(segment.recompute_flops for segment in plan.segments)
    # The plan has the sums as shares of the step; each segment has its part of them.
    time_scale = plan.overhead / seconds if seconds else 0.0
    flops_scale = plan.overhead_flops / flops if flops else 0.0
    # Plans of a front do not have the saving of each segment.
    has_savings = any(segment.saving_bytes for segment in plan.segments)

    headers = ["recomputed", "nodes", "off the peak", "added time", "added FLOPs", "source"]
    rows = []
    for segment, depth in _iterate_segments(plan.segments):
        name = segment.fqn or " .. ".join(dict.fromkeys((segment.first, segment.last)))
        saving = _write_saving(segment) if has_savings else ""
        time = write_share(segment.recompute_s * time_scale)
        costs = (saving, time, write_share(segment.recompute_flops * flops_scale))
        costs = ("", "", "") if depth else costs
        source = write_source(segment.source)
        rows.append(("- " * depth + name, str(segment.nodes), *costs, source))
    return _write_rows(headers, rows, width, ["added FLOPs"])


def write_limit(nbytes: int) -> str:
    """Writes bytes as text that is not below them: a row's peak is a budget that it keeps.

    >>> write_limit(1024**2 + 1), write_limit(3 * 1024**2)
    ('1.01 MiB', '3.00 MiB')
    """
    text = format_bytes(nbytes)
    value, _, unit = text.partition(" ")
    return text if parse_bytes(text) >= nbytes else f"{float(value) + 0.01:.2f} {unit}"


def write_share(share: float) -> str:
    """Writes a share in percent.

    >>> write_share(0.1234), write_share(0.0002), write_share(0)
    ('12.3 %', '<0.1 %', '0.0 %')
    """
    text = f"{100 * share:.1f} %"
    return "<0.1 %" if share > 0 and text == "0.0 %" else text


def _write_changes(plan: Plan, width: int | None) -> Iterator[str | Table]:
    """Writes tables of what can run in place and what is freed early."""
    inplace = [(c.node, c.call, _write_saving(c), write_source(c.source)) for c in plan.inplace]
    yield _write_rows(["can run in place", "call", "off the peak", "source"], inplace, width)
    dels = [
        (point.value, point.variable, point.after, _write_saving(point), write_source(point.source))
        for point in plan.dels
    ]
    yield _write_rows(["freed early", "variable", "after", "off the peak", "source"], dels, width)


def _write_limits(limits: Sequence[Limit], width: int | None) -> str:
    """Writes what is never recomputed, by reason, and how many nodes no segment begins with."""
    fixed = [limit for limit in limits if limit.kind is not LimitKind.BEGIN]
    lines = []
    if fixed:
        noun = "module" if fixed[0].kind is LimitKind.MODULE else "node"
        verb = "is" if len(fixed) == 1 else "are"
        lines.append(f"{_count(len(fixed), noun)} {verb} never recomputed:")
    by_reason: dict[str, list[Limit]] = {}
    for limit in fixed:
        by_reason.setdefault(limit.reason, []).append(limit)
    for reason, group in [*by_reason.items()][:_REASONS]:
        place = ", ".join(filter(None, [group[0].node, write_source(group[0].source)]))
        more = f", and {len(group) - 1} more" if len(group) > 1 else ""
        lines.append(f"- {place}{more}: {reason}")
    rest = sum(len(group) for group in [*by_reason.values()][_REASONS:])
    if rest:
        lines.append(f"- {rest} more for other reasons")
    starts = len(limits) - len(fixed)
    if starts:
        inputs = "whose input is" if starts == 1 else "whose inputs are"
        lines.append(
            f"No segment starts at {_count(starts, 'node')} {inputs} modified in place later."
        )
    return "\n".join(wrap(line, width) for line in lines)


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"


def _write_notes(plan: Plan) -> Iterator[str]:
    rows: list[Segment | InplaceChange | DelPoint] = [*plan.segments, *plan.inplace, *plan.dels]
    if any(row.saving_bytes for row in rows):
        yield (
            '"Off the peak" is how much the peak would rise without that row alone; rows do not '
            "add up."
        )
    if plan.inplace or plan.dels:
        # Where no graph takes the place of the user's own code, only the user can change that.
        note = "For in-place and freed-early rows, that is the saving in your own code."
        if plan.style != GRAPH:
            note = (
                "In-place and freed-early rows are changes to make in your own code; the new peak "
                "does not include them."
            )
        elif plan.inplace and not plan.applied_inplace:
            note = f"{note[:-1]}; the new peak does not include the in-place ones."
        yield note
    if plan.lower_bound_overhead and plan.gap is not None:
        bound, gap = write_share(plan.lower_bound_overhead), write_share(plan.gap)
        yield f"Any plan with this peak adds at least {bound} time; this one adds {gap} more."


def _write_rows(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None,
    optional: Sequence[str] = (),
) -> str | Table:
    return Table(headers, rows, _NUMBERS, _NAMES, optional, width) if rows else ""


def _write_saving(change: Segment | InplaceChange | DelPoint) -> str:
    return format_bytes(change.saving_bytes) if change.saving_bytes else "-"


def _iterate_segments(segments: Iterable[Segment], depth: int = 0) -> Iterator[tuple[Segment, int]]:
    for segment in segments:
        yield segment, depth
        yield from _iterate_segments(segment.children, depth + 1)
