"""The blocks of reports on plans and advice: one plan, the trade-offs, and other savings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from fxmem.graph import Phase
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
from fxmem.planning.suggestions import list_suggestions
from fxmem.report.blocks import Block, Heading, Paragraph
from fxmem.report.tables import Bytes, Cell, Table
from fxmem.report.text import (
    write_count,
    write_peak_place,
    write_share,
    write_source,
    write_subject,
)
from fxmem.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from fxmem.finding import Finding
    from fxmem.setup import Setup

_ALLOWED = 0.1  # share of time that the example below the table of trade-offs allows
_REASONS = 5  # not to recompute nodes that are listed; nodes with others are counted
_COSTS = ("peak", "of the step's", "added time", "added FLOPs")
_NUMBERS = (*_COSTS, "nodes", "off the peak", "segments", "in place", "del")
_NAMES = ("recomputed", "can run in place", "freed early", "after", "source")


def list_plan_blocks(plan: Plan) -> list[Block]:
    """Lists the blocks of a plan's report; a plan from a file does not tell its step."""
    before, after = format_bytes(plan.baseline_peak_bytes), format_bytes(plan.peak_bytes)
    share = write_share(plan.peak_bytes / (plan.baseline_peak_bytes or 1))
    cost = ", nothing is recomputed"
    if plan.segments:
        time, flops = write_share(plan.overhead), write_share(plan.overhead_flops)
        cost = f" for {time} more time, {flops} more FLOPs"
    analysis = plan.analysis
    planned = None if analysis is None else plan.find_step(analysis)
    subject = [] if analysis is None else [write_subject(analysis.setup)]
    place = list[str]()
    if planned is not None:
        is_last = planned.peak.phase is Phase.OPTIMIZER
        where = "the optimizer step" if is_last else write_peak_place(planned.peak)
        place.append(f"The new peak is in {where}.")
    if plan.reserved_bytes > plan.peak_bytes:  # not on the CPU, where nothing is reserved
        place.append(f"The allocator reserves {format_bytes(plan.reserved_bytes)}.")
    inplace = [(c.node, c.call, _write_saving(c), write_source(c.source)) for c in plan.inplace]
    dels = [
        (point.value, point.variable, point.after, _write_saving(point), write_source(point.source))
        for point in plan.dels
    ]
    has_code = analysis is not None and not analysis.setup.mesh
    return [
        Heading(f"Peak {before} -> {after} ({share}){cost}", subject),
        Paragraph([" ".join(place)]),
        _list_segments(plan),
        _make_table(["can run in place", "call", "off the peak", "source"], inplace),
        _make_table(["freed early", "variable", "after", "off the peak", "source"], dels),
        Paragraph([*_write_limits(plan.limits)]),
        Paragraph([*_write_notes(plan)]),
        *([list_suggestions(plan, analysis.nodes)] if analysis and has_code else []),
    ]


def write_price(price: CheckpointPrice, baseline_bytes: int) -> Paragraph:
    """Writes what the checkpoints of the model's library take, to be compared with the plans."""
    share, time, flops = _list_costs(price, baseline_bytes)[1:]
    return Paragraph(
        [
            f"For comparison, model.{price.call}: {format_bytes(price.peak_bytes)} ({share}) for"
            f" {time} more time, {flops} more FLOPs."
        ]
    )


def _list_costs(way: Plan | CheckpointPrice, baseline_bytes: int) -> tuple[Cell, str, str, str]:
    shares = (way.peak_bytes / (baseline_bytes or 1), way.overhead, way.overhead_flops)
    peak, time, flops = map(write_share, shares)
    return LimitBytes(way.peak_bytes), peak, time, flops


def list_way_blocks(
    ways: Sequence[tuple[str, Plan | CheckpointPrice]],
    setup: Setup | None,
    *,
    chosen: Plan | None = None,
    budget_bytes: int | None = None,
) -> list[Block]:
    """Lists ways to recompute on a rank, cheapest first: plans, and checkpoints that are none.

    Args:
        ways: Each with its name; the first recomputes nothing, or is a plan as well.
        setup: Of the step; None for a table that follows the chosen plan.
        chosen: The plan that keeps the limit.
        budget_bytes: The limit, where that is a peak.
    """
    baseline_bytes = next(way.baseline_peak_bytes for _, way in ways if isinstance(way, Plan))
    rows = []
    for name, way in ways:
        fits = ""
        if budget_bytes is not None:
            fits = "yes" if way.peak_bytes <= budget_bytes else "no"
            fits = "chosen" if way is chosen else fits
        rows.append([name, *_list_costs(way, baseline_bytes), fits])
    blocks: list[Block] = [_make_table(["recomputed", *_COSTS, "fits"], rows)]
    advice = ""
    if setup is not None:
        least = format_bytes(min(way.peak_bytes for _, way in ways))
        title = f"Peak {format_bytes(baseline_bytes)}, with recomputation down to {least}"
        blocks.insert(0, Heading(title, [write_subject(setup)]))
        advice = (
            "Choose a row by its peak (--budget) or by its added time (--max-overhead); "
            "-o plan.json saves the plan."
        )
    if any(isinstance(way, CheckpointPrice) for _, way in ways):
        note = "By operator: torch.utils.checkpoint keeps attention and every second matrix product"
        advice = f"{note}, which a plan cannot express. {advice}".rstrip()
    return [*blocks, Paragraph([advice])]


def list_front_blocks(plans: Sequence[Plan]) -> list[Block]:
    """Lists the blocks of the report of a step's trade-offs."""
    baseline_bytes = plans[0].baseline_peak_bytes
    least = format_bytes(min(plan.peak_bytes for plan in plans))
    rows: list[Sequence[Cell]] = []
    for plan in plans:
        segments = len([*_iterate_segments(plan.segments)])
        changes = (len(plan.inplace) or "", len(plan.dels) or "")
        rows.append((*_list_costs(plan, baseline_bytes), segments, *changes))
    advice = "No plan with a lower peak was found."
    if len(plans) > 1:
        chosen = [plan for plan in plans[1:] if plan.overhead <= _ALLOWED] or plans[1:2]
        size = str(LimitBytes(chosen[-1].peak_bytes)).replace(" ", "")
        advice = (
            f"Choose a row by its peak (--budget {size}) or by its added time "
            f"(--max-overhead {_ALLOWED}); -o plan.json saves the plan."
        )
    analysis = plans[0].analysis
    title = f"Peak {format_bytes(baseline_bytes)}; {write_count(len(plans), 'plan')}, down to"
    return [
        Heading(f"{title} {least}", [write_subject(analysis.setup)] if analysis else []),
        _make_table([*_COSTS, "segments", "in place", "del"], rows),
        Paragraph([*_write_limits(plans[0].limits)]),
        Paragraph([advice]),
    ]


def list_advice_blocks(
    advice: Sequence[Finding], baseline_bytes: int, setup: Setup | None = None
) -> list[Block]:
    """Lists what else lowers a peak, most first; with the step where the text stands alone."""
    peak = format_bytes(baseline_bytes)
    title = "No other change that was tried lowers the peak by 0.5 % or 1 MiB."
    if advice:
        title = f"Other ways to lower the peak of {peak}, each by itself and without a plan:"
    blocks: list[Block] = []
    if setup is not None:
        blocks.append(Heading(f"Peak {peak}", [write_subject(setup)]))
    blocks.append(Paragraph([title]))
    for each in advice:
        saving, left = format_bytes(each.saving_bytes), format_bytes(each.peak_bytes)
        place = f" ({write_source(each.source)})" if each.source else ""
        title = f"{each.code} {saving} off the peak, {left} left: {each.change}{place}."
        lines = (title, f"  Write: {each.option}", f"  Cost: {each.cost}")
        blocks.append(Paragraph(lines, indent="  "))
    if advice:
        note = f"fxmem explain {advice[0].code} shows the code before and after."
        blocks.append(Paragraph([note]))
    return blocks


def _list_segments(plan: Plan) -> Table:
    """Lists what is recomputed; a segment within another is below that."""
    seconds = sum(segment.recompute_s for segment in plan.segments)
    flops = sum(segment.recompute_flops for segment in plan.segments)
    # The plan has the sums as shares of the step; each segment has its part of them.
    time_scale = plan.overhead / seconds if seconds else 0.0
    flops_scale = plan.overhead_flops / flops if flops else 0.0
    # Plans of a front do not have the saving of each segment.
    has_savings = any(segment.saving_bytes for segment in plan.segments)

    headers = ["recomputed", "nodes", "off the peak", "added time", "added FLOPs", "source"]
    rows: list[Sequence[Cell]] = []
    for segment, depth in _iterate_segments(plan.segments):
        name = segment.fqn or " .. ".join(dict.fromkeys((segment.first, segment.last)))
        saving = _write_saving(segment) if has_savings else ""
        time = write_share(segment.recompute_s * time_scale)
        costs = (saving, time, write_share(segment.recompute_flops * flops_scale))
        costs = ("", "", "") if depth else costs
        rows.append(("- " * depth + name, segment.nodes, *costs, write_source(segment.source)))
    return _make_table(headers, rows, ["added FLOPs"])


class LimitBytes(Bytes):
    """A size whose text is not below it: the peak of a row is a budget that the row keeps.

    >>> str(LimitBytes(1024**2 + 1)), str(LimitBytes(3 * 1024**2))
    ('1.01 MiB', '3.00 MiB')
    """

    def __str__(self) -> str:
        text = format_bytes(self)
        value, _, unit = text.partition(" ")
        return text if parse_bytes(text) >= self else f"{float(value) + 0.01:.2f} {unit}"


def _write_limits(limits: Sequence[Limit]) -> Iterator[str]:
    """Writes what is never recomputed, by reason, and how many nodes no segment begins with."""
    fixed = [limit for limit in limits if limit.kind is not LimitKind.BEGIN]
    if fixed:
        noun = "module" if fixed[0].kind is LimitKind.MODULE else "node"
        verb = "is" if len(fixed) == 1 else "are"
        yield f"{write_count(len(fixed), noun)} {verb} never recomputed:"
    by_reason: dict[str, list[Limit]] = {}
    for limit in fixed:
        by_reason.setdefault(limit.reason, []).append(limit)
    for reason, group in [*by_reason.items()][:_REASONS]:
        place = ", ".join(filter(None, [group[0].node, write_source(group[0].source)]))
        more = f", and {len(group) - 1} more" if len(group) > 1 else ""
        yield f"- {place}{more}: {reason}"
    rest = sum(len(group) for group in [*by_reason.values()][_REASONS:])
    if rest:
        yield f"- {rest} more for other reasons"
    starts = len(limits) - len(fixed)
    if starts:
        inputs = "whose input is" if starts == 1 else "whose inputs are"
        count = write_count(starts, "node")
        yield f"No segment starts at {count} {inputs} modified in place later."


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


def _make_table(
    headers: Sequence[str], rows: Sequence[Sequence[Cell]], optional: Sequence[str] = ()
) -> Table:
    return Table(headers, rows, _NUMBERS, _NAMES, optional)


def _write_saving(change: Segment | InplaceChange | DelPoint) -> Cell:
    return Bytes(change.saving_bytes) if change.saving_bytes else "-"


def _iterate_segments(segments: Iterable[Segment], depth: int = 0) -> Iterator[tuple[Segment, int]]:
    for segment in segments:
        yield segment, depth
        yield from _iterate_segments(segment.children, depth + 1)
