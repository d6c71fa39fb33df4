"""The alignment of a snapshot with a predicted step: matches in order, and what differs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from fxmem.comparison.alignment import LEAST_SHARE, TEXTS, Alignment, Difference, Predicted
from fxmem.comparison.snapshot import Snapshot, TracedBlock, round_size
from fxmem.graph import Phase, SourceLocation
from fxmem.report.json_report import read_record, refuse_damage
from fxmem.setup import Setup

_MOST_ALIGNED = 2000
"""Allocations of a step that are aligned: the largest."""
_MOST_SHARE = 0.9
_LEAST_LEAKED = 3  # blocks, in as many steps
_LEAST_BYTES = 1 << 16
_FROM_BEFORE = (Phase.FORWARD, None)  # phase and line of what was there
_FORWARD = (Phase.FORWARD, Phase.LOSS)
_SHORT = 4  # allocations in which memory that is there for a moment is freed
_TRIED, _NEAR = 3, 12  # allocations before the peak, and events around each
_ORDER = ("leak", "new", "held", "short", "before", "as predicted")
"""Of blocks of one size, those that are named first."""


def align_snapshot(
    report: Mapping[str, Any], snapshot: Snapshot, names: tuple[str, str]
) -> Alignment:
    """Aligns the trace of a snapshot with a predicted step.

    The largest allocations around the peak are matched with those of the step, in order and by
    size. What is alive at the peak is compared with what is predicted to be alive at that place.

    Args:
        report: The values of a report (``Analysis.to_dict()``).
        snapshot: The snapshot.
        names: Of the report and of the snapshot.

    Raises:
        UsageError: The report is damaged.
    """
    with refuse_damage():
        setup, step = read_record(Setup, report), _list_predicted(report)
        # A trace has sizes as asked for, without the rest of a block that is not split.
        live = [report["storages"][at] for at in report["peak"]["live"]]
        slack = sum(each["nbytes"] - _find_size(each) for each in live)
        peak_bytes, reserved_bytes = report["peak_bytes"] - slack, report["reserved_bytes"]
    made = [each for each in step if each.start >= 0]
    least = sorted((each.nbytes for each in made), reverse=True)[:_MOST_ALIGNED]
    least_bytes = max([*least[-1:], _LEAST_BYTES])
    large = [each for each in made if each.nbytes >= least_bytes]
    matches, share = _match(large, snapshot, least_bytes, by_line=True)
    has_lines = share >= _MOST_SHARE
    if not has_lines:  # as where files have changed, or the trace has none
        by_size = _match(large, snapshot, least_bytes, by_line=False)
        matches, share = by_size if by_size[1] > share else (matches, share)
    place, differences = None, list[Difference]()
    if share >= LEAST_SHARE:
        place = _find_place(snapshot, step, matches, least_bytes)
    if place is not None:
        found = _list_differences(snapshot, step, matches, place, least_bytes, has_lines)
        differences = _group(found, matches)
    return Alignment(
        setup=setup,
        names=names,
        predicted_bytes=peak_bytes,
        measured_bytes=snapshot.peak_bytes,
        predicted_slack_bytes=max(reserved_bytes - peak_bytes, 0),
        measured_slack_bytes=snapshot.reserved_bytes - snapshot.peak_bytes,
        share=share,
        place=place,
        differences=tuple(differences),
    )


def _list_predicted(report: Mapping[str, Any]) -> list[Predicted]:
    """Lists the blocks of a step, scratch memory of kernels among them, in order of allocation."""
    nodes, storages, operations = report["nodes"], report["storages"], report["operations"]
    events = report["timeline"]["events"]
    stops: dict[Any, int] = {}
    scratch: dict[tuple[int, int], list[int]] = defaultdict(list)
    for at, event in enumerate(events):
        if event["action"] != "alloc" and event["storage"] is not None:
            stops[event["storage"]] = at
        elif event["action"] != "alloc":
            scratch[event["step"], abs(event["nbytes"])].append(at)
    found = [
        Predicted(_find_size(each), -1, stops.get(each["index"]), each["label"], *_FROM_BEFORE)
        for each in storages
        if each["born"] < 0
    ]
    for at, event in enumerate(events):
        if event["action"] != "alloc":
            continue
        operation, index, nbytes = operations[event["step"]], event["storage"], event["nbytes"]
        stop, label = stops.get(index), operation["name"].removesuffix(".default")
        if index is None:
            stop = scratch[event["step"], nbytes].pop(0)
        else:
            label, nbytes = storages[index]["label"], _find_size(storages[index])
        node = operation["node"]
        line = None if node is None else nodes[node]["source"]
        source = None if line is None else SourceLocation(**line)
        found.append(Predicted(nbytes, at, stop, label, Phase(operation["phase"]), source))
    return found


def _find_size(storage: Mapping[str, Any]) -> int:
    return round_size(storage["nbytes"] - storage["slack_bytes"])


Matches = dict[int, tuple[int, Predicted]]
"""By the number of an allocation of the trace, the step that it is in and its counterpart."""


def _match(
    large: Sequence[Predicted], snapshot: Snapshot, least_bytes: int, *, by_line: bool
) -> tuple[Matches, float]:
    """Matches large allocations around the peak with those of a step that repeats.

    Returns:
        The matches, and the share of the bytes of one step that has some.
    """
    traced = [block for block in snapshot.allocations if block.nbytes >= least_bytes]
    middle = sum(block.start <= snapshot.peak_at for block in traced)
    window = traced[max(middle - len(large), 0) : middle + len(large)]
    tiled = [*large] * 3
    lines = [by_line and each.phase in _FORWARD and each.source for each in tiled]
    keys = [(each.nbytes, str(line or "")) for each, line in zip(tiled, lines, strict=True)]
    traced_keys = [(each.nbytes, str((by_line and each.source) or "")) for each in window]
    matcher = SequenceMatcher(None, keys, traced_keys, autojunk=False)
    matches: Matches = {}
    for first, second, length in matcher.get_matching_blocks():
        for offset in range(length):
            at = first + offset
            matches[window[second + offset].start] = at // max(len(large), 1), tiled[at]
    best = Counter[int]()
    for number, each in matches.values():
        best[number] += each.nbytes
    total = sum(each.nbytes for each in large)
    return matches, max(best.values(), default=0) / max(total, 1)


def _list_alive(step: Sequence[Predicted], at: int, least_bytes: int) -> list[Predicted]:
    """Lists the predicted blocks that are alive after an event."""
    return [
        each
        for each in step
        if each.start <= at and (each.stop is None or each.stop > at) and each.nbytes >= least_bytes
    ]


def _find_place(
    snapshot: Snapshot, step: Sequence[Predicted], matches: Matches, least_bytes: int
) -> Predicted | None:
    """Finds the predicted allocation at which the snapshot has its peak.

    Of those near the counterparts of the last allocations before the peak, the one at which the
    fewest bytes differ.
    """
    live = Counter(
        b.nbytes for b in snapshot.list_live(snapshot.peak_at) if b.nbytes >= least_bytes
    )
    near = sorted(at for at in matches if at <= snapshot.peak_at)[-_TRIED:]
    events = {matches[at][1].start + shift for at in near for shift in range(-_NEAR, _NEAR + 1)}

    def measure(each: Predicted) -> int:
        alive = Counter(other.nbytes for other in _list_alive(step, each.start, least_bytes))
        return sum(abs(live[size] - alive[size]) * size for size in live | alive)

    tried = [each for each in step if each.start in events]
    return min(tried, key=measure, default=None)


def _list_differences(
    snapshot: Snapshot,
    step: Sequence[Predicted],
    matches: Matches,
    place: Predicted,
    least_bytes: int,
    has_lines: bool,
) -> Iterator[tuple[str, TracedBlock | Predicted]]:
    """Lists the blocks of which the snapshot has more at its peak than predicted, or fewer.

    Blocks of one size stand for each other: of more than predicted, those are named that a match
    or the trace tells something of.
    """
    live = [b for b in snapshot.list_live(snapshot.peak_at) if b.nbytes >= least_bytes]
    expected: dict[int, list[Predicted]] = defaultdict(list)
    for each in _list_alive(step, place.start, least_bytes):
        expected[each.nbytes].append(each)
    last = max(number for at, (number, _) in matches.items() if at <= snapshot.peak_at)
    began = min(at for at, (number, _) in matches.items() if number == last)
    made = sum(each.start >= 0 for each in step)
    leaked = {
        block for group in _list_leaks([b for b in live if b.source], made) for block in group
    }
    lines = {str(each.source) for each in step if each.source}

    def find_kind(block: TracedBlock) -> str:
        counterpart = matches[block.start][1] if block.start in matches else None
        if block in leaked:
            return "leak"
        if counterpart is None and block.stop and block.stop - block.start <= _SHORT:
            return "short"
        if has_lines and block.source is not None and str(block.source) not in lines:
            return "new"
        if counterpart is not None and block.start >= began:
            is_over = counterpart.stop is not None and counterpart.stop <= place.start
            return "held" if is_over and has_lines else "as predicted"
        return "before" if block.start < began else "new"

    by_size: dict[int, list[TracedBlock]] = defaultdict(list)
    for block in live:
        by_size[block.nbytes].append(block)
    for nbytes in {*by_size, *expected}:
        blocks, others = by_size[nbytes], expected[nbytes]
        more = len(blocks) - len(others)
        kinds = sorted(((find_kind(b), b) for b in blocks), key=lambda kb: _ORDER.index(kb[0]))
        for kind, block in kinds[: max(more, 0)]:
            yield kind if kind in TEXTS else "new", block
        if more < 0:
            there = {id(matches[b.start][1]) for b in blocks if b.start in matches}
            absent = sorted(others, key=lambda each: (id(each) in there, each.start < 0))
            yield from (("missing", each) for each in absent[:-more])


def _group(
    found: Iterable[tuple[str, TracedBlock | Predicted]], matches: Matches
) -> list[Difference]:
    """Groups blocks of one kind, size and line, those that take the most first."""
    groups: dict[Any, list[TracedBlock | Predicted]] = defaultdict(list)
    for kind, block in found:
        groups[kind, block.nbytes, str(block.source or "")].append(block)
    differences = []
    for (kind, nbytes, _), blocks in groups.items():
        first, sign = blocks[0], -1 if kind == "missing" else 1
        label = first.label if isinstance(first, Predicted) else ""
        if kind == "held" and first.start in matches:
            label = matches[first.start][1].label
        total = sign * nbytes * len(blocks)
        differences.append(Difference(kind, total, len(blocks), label, first.source))
    return sorted(differences, key=lambda each: -abs(each.nbytes))


def _list_leaks(
    blocks: Sequence[TracedBlock], step_allocations: int
) -> Iterator[list[TracedBlock]]:
    """Lists blocks of one size and line that were made again and again, and never freed.

    They are as far apart as steps, so that what one step makes for all others is none.
    """
    groups: dict[Any, list[TracedBlock]] = defaultdict(list)
    for block in blocks:
        if block.stop is None and block.start >= 0:
            groups[block.nbytes, block.source].append(block)
    for group in groups.values():
        if len({block.start // max(step_allocations, 1) for block in group}) >= _LEAST_LEAKED:
            yield group
