"""Published traces of the allocator, held against predicted allocations and frees, one by one.

    python -m benchmarks.published.traces [--only TEXT]

A trace, tests/data/cuda/published/traces/NAME.json.gz, has every allocation and free of the window
that was recorded, in order: bytes (negative: freed), the operator, the one that called it, the
autograd function, and the line. A case that has one names it in its configuration as ``trace``;
beside that ``trace_differences`` is how many allocations differ, ``trace_window`` the first and the
last event that are compared, ``trace_without`` operators whose allocations are left out before. Its
module has a function ``list_changes(case)`` besides ``predict(case)``.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tabulate import tabulate

from benchmarks.cuda_trace import Change, Difference, count_common, list_differences
from benchmarks.published.cases import DATA, Case, load_all
from fxmem.graph import MemoryGraph
from fxmem.memory.allocation import list_events

FOLDER = DATA / "traces"
Event = list[Any]


@dataclass(frozen=True)
class Comparison:
    """A trace beside its prediction.

    Attributes:
        measured: Events of the trace.
        predicted: Events that are predicted.
        common: For how many, from the first on, both do the same.
        allocations: How many allocations the trace has.
        differences: Allocations that only one side has, or in different sizes, in order.
    """

    measured: int
    predicted: int
    common: int
    allocations: int
    differences: tuple[Difference, ...]


def load_trace(case: Case) -> list[Change]:
    """The changes of a case's trace; empty tensors ask the allocator for nothing."""
    with gzip.open(FOLDER / f"{case.config['trace']}.json.gz", "rt") as file:
        events = [event for event in json.load(file)["events"] if event[0]]
    events = list(_leave_out(events, case.config.get("trace_without", ())))
    start, stop = case.config.get("trace_window", (0, len(events)))
    return [Change(event[0], _name(event)) for event in events[start:stop]]


def _leave_out(events: Iterable[Event], operators: Collection[str]) -> Iterator[Event]:
    """The events without those of operators that free what they take before anything else does."""
    held: list[int] = []
    for event in events:
        if len(event) > 1 and event[2] in operators:
            held.append(event[0])
        elif held and event[0] == -held[-1]:
            held.pop()
        else:
            yield event


def _name(event: Event) -> str:
    if len(event) == 1:
        return ""
    _, operator, outer, autograd = event[:4]
    caller = f" in {outer}" if outer != operator else ""
    return f"{operator}{caller}" + (f" of {autograd}" if autograd else "")


def list_predicted(graph: MemoryGraph, *, first: bool = False) -> list[Change]:
    """The changes of a step as they are predicted.

    Args:
        graph: The step.
        first: Whether those of the first step are meant.
    """
    events, begin = list_events(graph)
    if first:
        start = begin - len(graph.warmup) + graph.first_operations[0].start
        return [Change(event.delta_bytes) for event in events[start:begin] if event.nbytes]
    operations = graph.operations
    return [Change(e.delta_bytes, operations[e.step].name) for e in events[begin:] if e.nbytes]


def compare(measured: Sequence[Change], predicted: Sequence[Change]) -> Comparison:
    """Holds two sequences of changes against each other.

    Frees between the same two allocations may come in any order: the allocator ends up the same.
    """
    return Comparison(
        len(measured),
        len(predicted),
        count_common(_sort_frees(measured), _sort_frees(predicted)),
        sum(change.nbytes > 0 for change in measured),
        tuple(list_differences("", measured, predicted)),
    )


def _sort_frees(changes: Sequence[Change]) -> list[Change]:
    found: list[Change] = []
    for is_free, run in groupby(changes, key=lambda change: change.nbytes < 0):
        ours = list(run)
        found += sorted(ours, key=lambda change: change.nbytes) if is_free else ours
    return found


def compare_case(case: Case) -> Comparison:
    """Holds a case's trace against the prediction of its module's ``list_changes(case)``."""
    module = importlib.import_module(f"benchmarks.published.sources.{case.source}")
    return compare(load_trace(case), module.list_changes(case))


def compare_all(only: str = "") -> list[tuple[Case, Comparison]]:
    """Holds all traces against their predictions.

    Args:
        only: A text that the source or the id of a case must have.
    """
    return [
        (case, compare_case(case))
        for case in load_all()
        if "trace" in case.config and only in str(case)
    ]


def write_traces(compared: Sequence[tuple[Case, Comparison]]) -> str:
    """A table of the traces, and one of the allocations that differ."""
    cells = [
        [
            case.repository,
            case.id,
            case.torch,
            f"{one.measured:,}",
            f"{one.predicted:,}",
            f"{one.common:,}",
            f"{len(one.differences):,} of {one.allocations:,}",
        ]
        for case, one in compared
    ]
    headers = [
        *("publication", "case", "torch", "events", "predicted", "equal from the first on"),
        "allocations that differ",
    ]
    found = Counter((case.id, one) for case, each in compared for one in each.differences)
    differing = [
        [str(count), name, *_show(one.measured), *_show(one.predicted)]
        for (name, one), count in found.items()
    ]
    tables = [tabulate(cells, headers, tablefmt="github", disable_numparse=True)]
    if differing:
        columns = ["times", "case", "measured B", "by", "predicted B", "by"]
        tables.append(tabulate(differing, columns, tablefmt="github", disable_numparse=True))
    return "\n\n".join(map(str, tables))


def _show(change: Change | None) -> tuple[str, str]:
    return ("-", "") if change is None else (f"{change.nbytes:,}", change.by)


def main() -> None:
    """Compares all traces, and prints what differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose source and id have this text")
    arguments = parser.parse_args()
    print(write_traces(compare_all(arguments.only)))


if __name__ == "__main__":
    main()
