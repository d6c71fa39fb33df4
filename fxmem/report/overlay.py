"""A plan as it lies over the nodes of a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fxmem.planning.plan import Plan, Segment
from fxmem.report.document import NodeRow


@dataclass(frozen=True, slots=True)
class Overlay:
    """What a plan says of each node.

    Attributes:
        segments: The name of each segment and the indices of its nodes; one that lies within
            another comes after it.
        again: Indices of the nodes that backward computes again.
        notes: What could be called in place and let go of, by the index of the node where.
        baseline_peak_bytes: The peak without the plan.
        peak_bytes: The peak with it.
    """

    segments: tuple[tuple[str, range], ...]
    again: frozenset[int]
    notes: Mapping[int, tuple[str, ...]]
    baseline_peak_bytes: int
    peak_bytes: int


NO_OVERLAY = Overlay((), frozenset(), {}, 0, 0)
"""That of no plan."""


def lay_plan(plan: Plan, nodes: Sequence[NodeRow]) -> Overlay:
    """What a plan says of the nodes of a report.

    Args:
        plan: The plan, made for these nodes.
        nodes: Those of the report.
    """
    positions = {node.name: index for index, node in enumerate(nodes)}
    segments = tuple(_number_segments(plan.segments, positions))
    notes: dict[int, tuple[str, ...]] = {}
    for change in plan.inplace:
        _add(notes, positions[change.node], f"in place: {change.call}")
    for point in plan.dels:
        _add(notes, positions[point.after], f"then del {point.variable or point.value}")
    again = frozenset(node for _, inside in segments for node in inside)
    return Overlay(segments, again, notes, plan.baseline_peak_bytes, plan.peak_bytes)


def _number_segments(
    segments: Iterable[Segment], positions: Mapping[str, int], above: str = ""
) -> Iterator[tuple[str, range]]:
    for number, segment in enumerate(segments, 1):
        name = f"{above}.{number}" if above else str(number)
        yield name, range(positions[segment.first], positions[segment.last] + 1)
        yield from _number_segments(segment.children, positions, name)


def _add(notes: dict[int, tuple[str, ...]], node: int, note: str) -> None:
    notes[node] = (*notes.get(node, ()), note)
