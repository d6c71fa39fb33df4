"""A memory snapshot of a GPU, aligned with the predicted step, and how the two differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher
from typing import Any

from fxmem.comparison.changes import Growth
from fxmem.comparison.snapshot import Snapshot, TracedBlock, round_size
from fxmem.graph import Phase, SourceLocation
from fxmem.report.blocks import Block, Heading, Paragraph
from fxmem.report.json_report import read_record, refuse_damage
from fxmem.report.result import Result
from fxmem.report.tables import Bytes, Table
from fxmem.report.text import write_place, write_source, write_subject
from fxmem.setup import Setup
from fxmem.units import format_bytes

SCHEMA_VERSION = 1
_MOST_ALIGNED = 2000
"""Allocations of a step that are aligned: the largest."""
_MOST_SHARE = 0.9
_LEAST_SHARE = 0.5  # of a step's bytes, in a trace of it
_LEAST_LEAKED = 3  # blocks, in as many steps
_LEAST_BYTES = 1 << 16
_FORWARD = (Phase.FORWARD, Phase.LOSS)
_SHORT = 4  # allocations in which memory that is there for a moment is freed
_TRIED, _NEAR = 3, 12  # allocations before the peak, and events around each


@dataclass(frozen=True, slots=True)
class Predicted:
    """A block of the predicted step.

    Attributes:
        nbytes: Its size.
        start: The event of the timeline that allocates it; -1 for one that was there.
        stop: The event that frees it; None for none.
        label: Its name, or the operator whose scratch memory it is.
        phase: The phase in which it is allocated.
        source: The line of the node that does.
    """

    nbytes: int
    start: int
    stop: int | None
    label: str
    phase: Phase
    source: SourceLocation | None


@dataclass(frozen=True, slots=True)
class Difference:
    """Blocks of one size and line that are not as predicted.

    Attributes:
        kind: ``"leak"``, ``"held"``, ``"short"``, ``"new"``, ``"before"`` or ``"missing"``.
        nbytes: What they take together; negative where they are missing.
        count: How many there are.
        label: What they are in the prediction; empty for unknown.
        source: The line that made them, as the trace has it, else as the prediction has it.
    """

    kind: str
    nbytes: int
    count: int
    label: str
    source: SourceLocation | None

    @property
    def text(self) -> str:
        """The difference in words."""
        return _TEXTS[self.kind]


_TEXTS = {
    "leak": "made in one step after the other, never freed",
    "held": "still alive, predicted to be freed before",
    "short": "there for a moment, not predicted: a kernel's or a library's",
    "new": "alive, not predicted",
    "before": "alive since before the step, not predicted",
    "missing": "predicted, not alive",
}
_ORDER = ("leak", "new", "held", "short", "before", "as predicted")
"""Of blocks of one size, those that are named first."""


@dataclass(frozen=True, slots=True)
class Alignment(Result):
    """A snapshot beside a predicted step.

    Attributes:
        setup: The predicted step.
        names: Of the report and of the snapshot.
        predicted_bytes: The predicted peak, of sizes as asked for, like all sizes here.
        measured_bytes: The peak of the snapshot.
        predicted_slack_bytes: What the allocator was predicted to hold beyond its peak.
        measured_slack_bytes: What it held.
        share: Of the step's bytes those that are in the trace in the same order.
        place: The predicted allocation at which the snapshot has its peak; None for unknown.
        differences: What is alive there and was not predicted, or the other way round; the
            largest first. None where too little is in the trace to tell.
    """

    setup: Setup
    names: tuple[str, str]
    predicted_bytes: int
    measured_bytes: int
    predicted_slack_bytes: int
    measured_slack_bytes: int
    share: float
    place: Predicted | None
    differences: tuple[Difference, ...]

    def list_blocks(self, top: int = 10) -> list[Block]:
        measured, predicted = map(format_bytes, (self.measured_bytes, self.predicted_bytes))
        more = self.measured_bytes - self.predicted_bytes
        share = 100 * more / max(self.predicted_bytes, 1)
        line = f"Measured {measured}, predicted {predicted}: {Growth(more)} ({share:+.1f} %)"
        lines = [write_subject(self.setup), f"{self.names[1]}: {self._describe_share()}"]
        if self.place is not None:
            where = write_place(self.place.phase, self.place.label, self.place.source)
            lines.append(f"{self.names[1]}: peak in {where}")
        rows = [
            (Growth(each.nbytes), each.count, each.text, each.label, write_source(each.source))
            for each in self.differences[:top]
        ]
        rest = self.differences[top:]
        left = f"... and {len(rest)} more, {Growth(sum(each.nbytes for each in rest))}"
        sizes = [
            ("peak", Bytes(self.predicted_bytes), Bytes(self.measured_bytes)),
            ("held beyond it", Bytes(self.predicted_slack_bytes), Bytes(self.measured_slack_bytes)),
        ]
        return [
            Heading(line, lines),
            Table(["allocator", "predicted", "measured"], sizes, ["predicted", "measured"]),
            Table(
                ["bytes", "blocks", "at the measured peak", "of", "source"],
                rows,
                right=["bytes", "blocks"],
                names=["of", "source"],
                rest=left if rest else "",
            ),
            Paragraph([] if self.share >= _LEAST_SHARE else [_UNLIKE]),
        ]

    def _describe_share(self) -> str:
        return f"{100 * self.share:.0f} % of the step's bytes are allocated in the predicted order"

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        del values["setup"]
        return {"schema_version": SCHEMA_VERSION, **values}


_UNLIKE = (
    "The trace is not of the predicted step, or of inputs of another size: differences are told of"
    " steps that are alike."
)


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
    if share >= _LEAST_SHARE:
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
        Predicted(
            _find_size(each),
            -1,
            stops.get(each["index"]),
            each["label"],
            Phase.FORWARD,
            None,
        )
        for each in storages
        if each["born"] < 0
    ]
    for at, event in enumerate(events):
        if event["action"] != "alloc":
            continue
        operation, index, nbytes = operations[event["step"]], event["storage"], event["nbytes"]
        stop, label = stops.get(index), operation["name"].removesuffix(".default")
        if index is None:
            stop = next((each for each in scratch[event["step"], nbytes] if each > at), at + 1)
            scratch[event["step"], nbytes] = [
                each for each in scratch[event["step"], nbytes] if each != stop
            ]
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
            yield kind if kind in _TEXTS else "new", block
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
