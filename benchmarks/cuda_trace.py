"""Compares a measured trace of the CUDA allocator with the events that fxmem predicts.

Also runs the measured events through the simulated allocator: where that reserves what PyTorch's
did, what is wrong is the recording and not the simulation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import takewhile

from tabulate import tabulate

from benchmarks.cuda_measure import Result
from fxmem.graph import MemoryGraph, Phase
from fxmem.memory.allocation import list_events, replay
from fxmem.memory.timeline import Action, Event

BEFORE = "before the second step"
PARTS = (BEFORE, "forward", "backward", "optimizer")
ROUNDED_BYTES = 512


@dataclass(frozen=True)
class Change:
    """An allocation, or a free where it is negative, and what ran at that moment."""

    nbytes: int
    by: str = ""


@dataclass(frozen=True)
class Difference:
    """An allocation that only one side has, or that the two have in different sizes."""

    part: str
    measured: Change | None
    predicted: Change | None


@dataclass(frozen=True)
class Replay:
    """The run of the simulated allocator on the measured events.

    Attributes:
        events: How many there are.
        differs_at: Index of the first after which it reserves another amount; None for none.
        reserved_bytes: The most it reserves.
        measured_bytes: The most PyTorch's reserved.
    """

    events: int
    differs_at: int | None
    reserved_bytes: int
    measured_bytes: int


def list_measured(trace: Result) -> dict[str, list[Change]]:
    """The changes of each part of a measured trace, with the operators of the second step."""
    marks, events = trace["marks"], trace["events"]
    starts = [0, marks["step 2"]]
    parts = {BEFORE: events[: marks["step 2"]]}
    for part in PARTS[1:]:
        if f"step 2 {part}" in marks:
            starts.append(marks[f"step 2 {part}"])
            parts[part] = events[starts[-2] : starts[-1]]
    changes = {part: _list_changes(mine, trace["lines"]) for part, mine in parts.items()}
    second = [change for part in PARTS[1:] for change in changes.get(part, ())]
    named = iter(name_operators(second, trace["operators"]))
    return {
        part: mine if part == BEFORE else [next(named) for _ in mine]
        for part, mine in changes.items()
    }


def _list_changes(events: Sequence[Sequence[object]], lines: Sequence[str]) -> list[Change]:
    changes = []
    for action, _, nbytes, line in events:
        assert isinstance(nbytes, int) and isinstance(line, int)
        if action in ("alloc", "free_completed"):
            changes.append(Change(nbytes if action == "alloc" else -nbytes, lines[line]))
    return changes


def name_operators(changes: Sequence[Change], operators: Sequence[Result]) -> list[Change]:
    """Gives each allocation the innermost operator of the profiled step.

    That step repeats the traced one, and its sizes are those of blocks: where requests, rounded,
    do not fall on them (a block with slack), a run of as many is taken to be the same.
    """
    ours = [at for at, change in enumerate(changes) if change.nbytes > 0]
    theirs = [one for one in operators if one["nbytes"] > 0]
    blocks = [-(-changes[at].nbytes // ROUNDED_BYTES) * ROUNDED_BYTES for at in ours]
    named = list(changes)
    matcher = SequenceMatcher(None, blocks, [one["nbytes"] for one in theirs], autojunk=False)
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag == "equal" or i_end - i == j_end - j:
            for at, one in zip(ours[i:i_end], theirs[j:j_end], strict=True):
                line = f" ({changes[at].by})" if changes[at].by else ""
                named[at] = Change(changes[at].nbytes, f"{(one['operators'] or ['?'])[-1]}{line}")
    return named


def list_predicted(graph: MemoryGraph) -> dict[str, list[Change]]:
    """The changes of each part as they are predicted."""
    events, first = list_events(graph)
    parts: dict[str, list[Change]] = {BEFORE: []}
    for at, event in enumerate(events):
        part = BEFORE if at < first else _name_part(event.phase)
        by = graph.operations[event.step].name if at >= first else ""
        if event.nbytes:  # nothing is asked of the allocator for an empty tensor
            parts.setdefault(part, []).append(Change(event.delta_bytes, by))
    return parts


def _name_part(phase: Phase) -> str:
    return "forward" if phase is Phase.LOSS else phase.value


def count_common(measured: Sequence[Change], predicted: Sequence[Change]) -> int:
    """For how many events, from the first on, both do the same."""
    pairs = zip(measured, predicted, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0].nbytes == pair[1].nbytes, pairs))


def list_differences(
    part: str, measured: Sequence[Change], predicted: Sequence[Change]
) -> Iterator[Difference]:
    """The allocations that differ, in order."""
    ours = [change for change in measured if change.nbytes > 0]
    theirs = [change for change in predicted if change.nbytes > 0]
    sizes = [change.nbytes for change in ours], [change.nbytes for change in theirs]
    for tag, i, i_end, j, j_end in SequenceMatcher(None, *sizes, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        for offset in range(max(i_end - i, j_end - j)):
            yield Difference(
                part,
                ours[i + offset] if i + offset < i_end else None,
                theirs[j + offset] if j + offset < j_end else None,
            )


def replay_measured(trace: Result) -> Replay:
    """Runs the measured allocations and frees through the simulated allocator."""
    events: list[Event] = []
    measured: list[int] = []
    reserved = 0
    live: dict[int, int] = {}
    for index, (action, address, nbytes, _) in enumerate(trace["events"]):
        if action in ("segment_alloc", "segment_map"):
            reserved += nbytes
        elif action in ("segment_free", "segment_unmap"):
            reserved -= nbytes
        elif action == "alloc":
            live[address] = index
            events.append(Event(Action.ALLOC, nbytes, index, index, Phase.FORWARD))
            measured.append(reserved)
        elif action == "free_completed" and address in live:
            events.append(Event(Action.FREE, nbytes, live.pop(address), index, Phase.FORWARD))
            measured.append(reserved)
    ours = replay(events).reserved_bytes
    differs = (at for at, pair in enumerate(zip(ours, measured, strict=True)) if pair[0] != pair[1])
    return Replay(len(events), next(differs, None), max(ours, default=0), max(measured, default=0))


def describe_trace(trace: Result, graph: MemoryGraph) -> str:
    """A table of parts, one of the allocations that differ, and what the allocator makes of it."""
    measured, predicted = list_measured(trace), list_predicted(graph)
    rows, found = [], Counter[Difference]()
    for part in PARTS:
        ours, theirs = measured.get(part, []), predicted.get(part, [])
        differences = list(list_differences(part, ours, theirs))
        rows.append((part, len(ours), len(theirs), count_common(ours, theirs), len(differences)))
        found.update(differences)
    headers = ("part", "events", "predicted", "the same at first", "allocations that differ")
    texts = [tabulate(rows, headers=headers, tablefmt="github")]
    if found:
        cells = [
            (count, one.part, *_show(one.measured), *_show(one.predicted))
            for one, count in found.items()
        ]
        columns = ("times", "part", "measured B", "by", "predicted B", "by")
        texts.append(tabulate(cells, headers=columns, tablefmt="github", disable_numparse=True))
    return "\n\n".join((*texts, describe_replay(replay_measured(trace)))) + "\n"


def describe_replay(result: Replay) -> str:
    """Tells whether the simulated allocator is right, given the measured events."""
    if result.differs_at is None:
        return (
            f"The simulated allocator reserves what PyTorch's did after each of {result.events} "
            "measured events: what differs is what was recorded."
        )
    return (
        f"The simulated allocator reserves {result.reserved_bytes} B at most for the "
        f"{result.events} measured events, PyTorch's {result.measured_bytes} B; they part at event "
        f"{result.differs_at}."
    )


def _show(change: Change | None) -> tuple[str, str]:
    return ("-", "") if change is None else (str(change.nbytes), change.by)
