"""Regions as the plan tells of them: by name, by module, with what each is worth."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

from fxmem.errors import UsageError
from fxmem.graph import MemoryGraph, Phase
from fxmem.planning.model.index import StepIndex
from fxmem.planning.model.limits import Limits
from fxmem.planning.model.module_state import is_batch_norm
from fxmem.planning.model.recomputation import iterate_recomputations, plan_recomputations
from fxmem.planning.model.score import Scorer
from fxmem.planning.model.segments import SegmentRange
from fxmem.planning.plan import Limit, LimitKind, Plan, Segment

_HALF = 8
"""Of the digits of a fingerprint."""


def fingerprint_graph(graph: MemoryGraph) -> str:
    """What changes where the nodes of a model (its first half) or their shapes (its second) do.

    The loss is no part of it, nor are dtypes, which autocast decides.

    Args:
        graph: A step's memory graph.
    """
    nodes = [node for node in graph.nodes if node.phase is Phase.FORWARD]
    described = [(node.name, node.target, node.inputs) for node in nodes]
    parts = (described, [node.shape for node in nodes])
    return "".join(hashlib.sha256(repr(part).encode()).hexdigest()[:_HALF] for part in parts)


def check_fingerprint(plan: Plan, graph: MemoryGraph, command: str) -> None:
    """Checks that a plan was made for a step.

    Args:
        plan: The plan.
        graph: The step's memory graph.
        command: What makes another.

    Raises:
        UsageError: It was made for another model, other inputs, or other sizes of either.
    """
    found = fingerprint_graph(graph)
    if found == plan.fingerprint:
        return
    if found[:_HALF] == plan.fingerprint[:_HALF]:
        cause = "the plan was made for other sizes, of the inputs or of the model's layers"
    else:
        cause = "the plan was made for another model or other inputs"
    raise UsageError(cause, hint=f"make it anew with {command}")


def describe_segments(
    recorded: StepIndex,
    regions: Sequence[SegmentRange],
    costs_s: Sequence[float],
    *,
    with_savings: bool = True,
    names: Mapping[tuple[int, int], str] | None = None,
) -> tuple[Segment, ...]:
    """Regions as segments of a plan.

    Args:
        recorded: The step.
        regions: What is computed again.
        costs_s: Seconds of each operation, by its index.
        with_savings: Whether to work out what each is worth, by leaving it out.
        names: The modules that regions are calls of, by their nodes; None to find them.
    """
    savings = _measure_savings(recorded, regions) if with_savings else [0] * len(regions)
    segments = []
    for region, saving in zip(regions, savings, strict=True):
        runs = iterate_recomputations([*plan_recomputations(recorded, [region])])
        again = [index for run in runs for index in run.list_operations(recorded)]
        segments.append(_describe(recorded, region, saving, again, costs_s, names))
    return tuple(segments)


def _measure_savings(recorded: StepIndex, regions: Sequence[SegmentRange]) -> list[int]:
    """By how much the peak would rise without each."""
    scorer = Scorer(recorded, [0.0] * len(recorded.graph.operations))
    peak, _ = scorer.score(regions)
    return [
        scorer.score([*regions[:index], *regions[index + 1 :]])[0] - peak
        for index in range(len(regions))
    ]


def _describe(
    recorded: StepIndex,
    region: SegmentRange,
    saving_bytes: int,
    recomputed: Sequence[int],
    costs_s: Sequence[float],
    names: Mapping[tuple[int, int], str] | None,
) -> Segment:
    graph = recorded.graph
    nodes = graph.nodes[region.start : region.stop]
    operations = recorded.list_operations(region.start, region.stop)
    norms = (graph.nodes[o.node].fqn for o in operations if o.node is not None and is_batch_norm(o))
    states = (
        graph.storages[index].name
        for node in range(region.start, region.stop)
        for index in recorded.states[node]
    )
    return Segment(
        first=nodes[0].name,
        last=nodes[-1].name,
        nodes=len(nodes),
        fqn=find_module(recorded, region) if names is None else names[region.start, region.stop],
        source=nodes[0].source,
        saving_bytes=saving_bytes,
        recompute_s=sum(costs_s[index] for index in recomputed),
        recompute_flops=sum(graph.operations[index].flops for index in recomputed),
        random=any(recorded.draws[region.start : region.stop]),
        norms=tuple(dict.fromkeys(norms)),
        states=tuple(dict.fromkeys(states)),
        children=tuple(_describe(recorded, c, 0, (), costs_s, names) for c in region.children),
    )


def describe_limits(recorded: StepIndex, limits: Limits) -> tuple[Limit, ...]:
    """What no plan may do, by name.

    Args:
        recorded: The step.
        limits: Of the step.

    Returns:
        Each node once, in order.
    """
    reasons = {
        **{node: (LimitKind.BEGIN, reason) for node, reason in limits.starts.items()},
        **{node: (LimitKind.RECOMPUTE, reason) for node, reason in limits.fixed.items()},
    }
    nodes = recorded.graph.nodes
    return tuple(
        Limit(nodes[index].name, *reasons[index], nodes[index].fqn, nodes[index].source)
        for index in sorted(reasons)
    )


def describe_modules(recorded: StepIndex, reasons: Mapping[str, str]) -> tuple[Limit, ...]:
    """The modules that no plan computes again.

    Args:
        recorded: The step.
        reasons: Why, by name.
    """
    nodes = recorded.graph.nodes
    firsts = {call.fqn: call.start for call in reversed(recorded.graph.calls)}
    return tuple(
        Limit(fqn, LimitKind.MODULE, reason, fqn, nodes[firsts[fqn]].source)
        for fqn, reason in reasons.items()
    )


def find_module(recorded: StepIndex, region: SegmentRange) -> str:
    """The fqn of the innermost module, or container of some, that runs a region's nodes once.

    Returns:
        Empty where there is none.
    """
    nodes = recorded.graph.nodes
    inside = nodes[region.start : region.stop]
    parents = [
        fqn
        for fqn in _iterate_parents(inside[0].fqn)
        if all(node.fqn == fqn or node.fqn.startswith(f"{fqn}.") for node in inside)
    ]
    if not parents or _repeats([(n.fqn, n.target) for n in inside]):
        return ""
    others = [*nodes[: region.start], *nodes[region.stop :]]
    for fqn in parents:
        if not any(node.fqn == fqn or node.fqn.startswith(f"{fqn}.") for node in others):
            return fqn
    return ""


def _repeats(calls: Sequence[tuple[str, str]]) -> bool:
    """Whether calls are the same ones again and again: those of a module called several times."""
    size = len(calls)
    return any(
        size % length == 0 and calls[length:] == calls[:-length] for length in range(1, size)
    )


def _iterate_parents(fqn: str) -> Iterator[str]:
    while fqn:
        yield fqn
        fqn = fqn.rpartition(".")[0]
