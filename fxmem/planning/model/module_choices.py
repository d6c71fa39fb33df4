"""Calls of modules as segments, for plans that leave the model's code as it is.

A module is recomputed in all of its calls or in none: what decides at run time is its
``forward``, which does not know which of the calls it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fxmem.graph import RESIDENT, ModuleCall
from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.limits import Limits
from fxmem.planning.model.segment_ranges import SegmentRange, Span


@dataclass(frozen=True, slots=True)
class ModuleChoice:
    """A module that may be recomputed, with the nodes of each of its calls in order."""

    fqn: str
    spans: tuple[Span, ...]


def list_modules(
    step: StepIndex, limits: Limits
) -> tuple[tuple[ModuleChoice, ...], Mapping[str, str]]:
    """Lists the modules that may be recomputed, and the reasons against the others, by name.

    Of modules that run the same nodes, the outermost is listed, and of modules that share some of
    their calls one. They are in the order of their first calls, outer before inner.
    """
    calls: dict[str, list[ModuleCall]] = {}
    for call in step.graph.calls:
        calls.setdefault(call.fqn, []).append(call)
    end = step.end_operation[step.nodes - 1] if step.nodes else 0
    last_held = {}  # by storage, the last operation of forward in which the user's code has it
    for made in step.made:
        last = step.graph.let_go[made.index] if step.graph.let_go else made.born
        if last is None:  # to the end of the step, or never in the user's hands
            last = end if made.is_output else made.born
        last_held[made.index] = last
    spans: dict[str, list[Span]] = {}
    reasons: dict[str, str] = {}
    for fqn in sorted(calls, key=lambda name: name.count(".")):
        ran = [call for call in calls[fqn] if call.stop > call.start]
        found = (
            reason for call in ran for reason in _find_obstacles(step, limits, call, last_held)
        )
        reason = next(found, "")
        if reason:
            reasons[fqn] = reason
        elif ran:
            spans[fqn] = [(call.start, call.stop) for call in ran]
    taken: set[Span] = set()
    apart = {}
    for fqn, own in spans.items():
        if taken.isdisjoint(own):
            apart[fqn] = own
            taken.update(own)
    return _choose_outermost(apart), reasons


def list_calls(step: StepIndex, limits: Limits) -> tuple[ModuleChoice, ...]:
    """Lists the modules with the calls that a rewritten graph may recompute, in order.

    Of modules that run the same nodes, the outermost is listed.
    """
    calls: dict[str, set[Span]] = {}
    for call in step.graph.calls:
        if limits.allows(SegmentRange(call.start, call.stop)):
            calls.setdefault(call.fqn, set()).add((call.start, call.stop))
    return _choose_outermost(calls)


def _choose_outermost(calls: Mapping[str, Iterable[Span]]) -> tuple[ModuleChoice, ...]:
    """Chooses of modules with the same spans the outermost, in the order of their first calls."""
    choices: dict[tuple[Span, ...], ModuleChoice] = {}
    for fqn in sorted(calls, key=lambda name: name.count(".")):
        spans = tuple(sorted(calls[fqn]))
        choices.setdefault(spans, ModuleChoice(fqn, spans))
    return tuple(sorted(choices.values(), key=lambda c: (c.spans[0][0], -c.spans[0][1])))


def name_spans(choices: Iterable[ModuleChoice]) -> dict[Span, str]:
    """Names the module whose call each span is."""
    return {span: choice.fqn for choice in choices for span in choice.spans}


def _find_obstacles(
    step: StepIndex, limits: Limits, call: ModuleCall, last_held: Mapping[int, int]
) -> Iterator[str]:
    """Finds reasons not to recompute a call, the first of which a plan reports."""
    nodes, storages = step.graph.nodes, step.graph.storages
    if call.obstacle:
        yield call.obstacle
    for node in range(call.start, call.stop):
        if node in limits.fixed:
            yield f"{nodes[node].name} {limits.fixed[node]}"
    if call.start in limits.starts:
        yield limits.starts[call.start]
    first, last = step.first_operation[call.start], step.end_operation[call.stop - 1] - 1
    read = {i for o in step.list_operations(call.start, call.stop) for i in o.reads}
    for index in sorted(read.difference(call.inputs)):
        if RESIDENT < storages[index].born < first:
            name = storages[index].name
            yield f"it uses {name}, which is computed before it and is none of its arguments"
    for made in step.list_activations(first, last + 1):
        if made.index not in call.results and last_held[made.index] > last:
            yield f"what it makes is held elsewhere than in its result: {storages[made.index].name}"
