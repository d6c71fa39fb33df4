"""The calls of modules as segments, for plans that leave the model's code as it is.

A module is computed again in all of its calls or in none: what decides at run time is its
``forward``, which does not know which of the calls it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fxmem.graph import RESIDENT, ModuleCall
from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.limits import Limits
from fxmem.planning.model.segments import SegmentRange, Span

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class ModuleChoice:
    """A module that may be computed again.

    Attributes:
        fqn: Its name in the model.
        spans: The nodes of each of its calls, first and after the last, in order.
    """

    fqn: str
    spans: tuple[Span, ...]


def list_modules(
    step: StepIndex, limits: Limits
) -> tuple[tuple[ModuleChoice, ...], Mapping[str, str]]:
    """The modules that may be computed again, and why the others may not.

    Of modules that run the same nodes, it is the outermost.

    Args:
        step: The step.
        limits: What may not be computed again.

    Returns:
        Modules by where their first call begins, outer before inner; reasons by name.
    """
    calls: dict[str, list[ModuleCall]] = {}
    for call in step.graph.calls:
        calls.setdefault(call.fqn, []).append(call)
    leaving = _list_leaving(step)
    spans: dict[str, list[Span]] = {}
    reasons: dict[str, str] = {}
    for fqn in sorted(calls, key=lambda name: name.count(".")):
        ran = [call for call in calls[fqn] if call.stop > call.start]
        reason = next(filter(None, (_find_obstacle(step, limits, c, leaving) for c in ran)), "")
        if reason:
            reasons[fqn] = reason
        elif ran:
            spans[fqn] = [(call.start, call.stop) for call in ran]
    # Two may share some of their calls and not all.
    taken: set[Span] = set()
    apart = []
    for choice in _choose_outermost(spans):
        if taken.isdisjoint(choice.spans):
            apart.append(choice)
            taken.update(choice.spans)
    return _sort_choices(apart), reasons


def list_calls(step: StepIndex, limits: Limits) -> tuple[ModuleChoice, ...]:
    """Lists the modules with the calls that a rewritten graph may recompute, in order.

    Of modules that run the same nodes, it is the outermost.
    """
    calls: dict[str, set[Span]] = {}
    for call in step.graph.calls:
        if limits.allows(SegmentRange(call.start, call.stop)):
            calls.setdefault(call.fqn, set()).add((call.start, call.stop))
    return _sort_choices(_choose_outermost(calls))


def _choose_outermost(calls: Mapping[str, Iterable[Span]]) -> list[ModuleChoice]:
    """Modules, outer ones first; of those with the same spans the outermost."""
    choices: dict[tuple[Span, ...], ModuleChoice] = {}
    for fqn in sorted(calls, key=lambda name: name.count(".")):
        spans = tuple(sorted(calls[fqn]))
        choices.setdefault(spans, ModuleChoice(fqn, spans))
    return [*choices.values()]


def _sort_choices(choices: Iterable[ModuleChoice]) -> tuple[ModuleChoice, ...]:
    return tuple(sorted(choices, key=lambda c: (c.spans[0][0], -c.spans[0][1])))


def group_modules(choices: Sequence[ModuleChoice]) -> Mapping[str, list[int]]:
    """Positions of modules by their names without numbers.

    Args:
        choices: The modules.

    >>> choices = [ModuleChoice(name, ()) for name in ("h.0", "h.0.mlp", "h.1", "h.1.mlp")]
    >>> group_modules(choices)
    {'h.*': [0, 2], 'h.*.mlp': [1, 3]}
    """
    groups: dict[str, list[int]] = {}
    for at, choice in enumerate(choices):
        groups.setdefault(_NUMBER.sub("*", choice.fqn), []).append(at)
    return groups


def name_spans(choices: Iterable[ModuleChoice]) -> dict[Span, str]:
    """The module whose call each span is.

    Args:
        choices: From :func:`list_modules`.
    """
    return {span: choice.fqn for choice in choices for span in choice.spans}


def _list_leaving(step: StepIndex) -> dict[int, int]:
    """By what forward made, the last operation of forward in which the user's code has it."""
    leaving = {}
    end = step.end_operation[step.nodes - 1] if step.nodes else 0
    for made in step.made:
        let_go = step.graph.let_go[made.index] if step.graph.let_go else made.born
        last = let_go
        if last is None:  # to the end of the step, or never in the user's hands
            last = end if made.is_output else made.born
        leaving[made.index] = last
    return leaving


def _find_obstacle(
    step: StepIndex, limits: Limits, call: ModuleCall, leaving: Mapping[int, int]
) -> str:
    """Why a call may not be computed again; empty where it may."""
    nodes = step.graph.nodes
    if call.obstacle:
        return call.obstacle
    for node in range(call.start, call.stop):
        if node in limits.fixed:
            return f"{nodes[node].name} {limits.fixed[node]}"
        changed = _list_changed(step, node)
        if changed:
            return f"{nodes[node].name} changes {changed[0]} in place"
    if call.start in limits.starts:
        return limits.starts[call.start]
    taken = _list_taken(step, call) - {*call.inputs}
    if taken:
        name = step.graph.storages[min(taken)].name
        return f"it uses {name}, which is computed before it and is none of its arguments"
    last = step.end_operation[call.stop - 1] - 1
    made = step.list_activations(step.first_operation[call.start], last + 1)
    for storage in made:
        if storage.index not in call.results and leaving[storage.index] > last:
            name = step.graph.storages[storage.index].name
            return f"what it makes is held elsewhere than in its result: {name}"
    return ""


def _list_changed(step: StepIndex, node: int) -> list[str]:
    """What a node changes that was there before the step, but for what a checkpoint looks after."""
    storages, known = step.graph.storages, {*step.statistics[node], *step.states[node]}
    writes = (i for o in step.list_operations(node, node + 1) for i in o.writes)
    return [storages[i].name for i in writes if storages[i].born == RESIDENT and i not in known]


def _list_taken(step: StepIndex, call: ModuleCall) -> set[int]:
    """What a call reads of what forward made before it."""
    first, storages = step.first_operation[call.start], step.graph.storages
    return {
        index
        for operation in step.list_operations(call.start, call.stop)
        for index in operation.reads
        if RESIDENT < storages[index].born < first
    }
