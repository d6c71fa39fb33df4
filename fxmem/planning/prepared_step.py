"""An analysed step prepared for planning, and its segments and limits as a plan reports them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fxmem.analysis import Analysis
from fxmem.errors import UsageError
from fxmem.graph import Phase
from fxmem.memory.allocator.settings import AllocatorSettings
from fxmem.planning.model.costs import find_roofline, price_operations, price_run
from fxmem.planning.model.index import StepIndex, build_index, is_batch_norm
from fxmem.planning.model.limits import Limits, ModuleChoice, find_limits, list_calls, list_modules
from fxmem.planning.model.recomputation import SegmentRange, Span, iterate_runs, plan_runs
from fxmem.planning.outcome import repeat_flops, take_last_micro_batch
from fxmem.planning.plan import (
    GRAPH,
    MODULES,
    STYLES,
    Limit,
    LimitKind,
    Plan,
    Segment,
    fingerprint_graph,
)

_MAY_DRAW = ("Dropout", "Transformer", "MultiheadAttention", "LSTM", "GRU", "RNN")
"""Parts of the names of PyTorch's modules with dropout."""
_TIE = 1e-3
"""The weight of time where FLOPs are minimised: it orders operations without FLOPs."""


@dataclass(frozen=True, slots=True)
class PlanningStep:
    """An analysed step, prepared for planning; of several micro-batches, the last.

    Seconds and FLOPs are summed over all micro-batches.
    """

    index: StepIndex  # the step as plans see it
    limits: Limits  # the nodes that may not be recomputed
    costs_s: tuple[float, ...]  # seconds of each operation by the roofline; ``step_s`` of them all
    step_s: float
    run_s: float  # of each run of a segment, beside its operations
    step_flops: int
    requested: StepIndex  # ``index``, with sizes as they are asked for
    settings: AllocatorSettings | None  # the allocator's; None where none caches
    modules: tuple[ModuleChoice, ...]  # the modules that can be recomputed as a whole
    base: Plan  # the plan that changes nothing, with all that is the same in the others

    def list_costs(self, by_flops: bool) -> tuple[float, ...]:
        """Lists the cost of each operation: its share of the step's time or FLOPs."""
        step_s, step_flops = self.step_s or 1.0, self.step_flops
        if not by_flops or not step_flops:
            return tuple(cost / step_s for cost in self.costs_s)
        return tuple(
            operation.flops / step_flops + _TIE * cost / step_s
            for operation, cost in zip(self.index.graph.operations, self.costs_s, strict=True)
        )

    def price_segments(self, segments: Iterable[SegmentRange]) -> tuple[float, int]:
        """Prices what segments compute again, in seconds and FLOPs."""
        runs = [*iterate_runs(plan_runs(self.index, segments))]
        again = [operation for run in runs for operation in run.list_operations(self.index)]
        seconds = sum(self.costs_s[index] for index in again) + len(runs) * self.run_s
        return seconds, sum(self.index.graph.operations[index].flops for index in again)

    def price_run(self, by_flops: bool) -> float:
        """Prices a run of a segment beside its operations, in the unit of their costs."""
        return self.run_s / (self.step_s or 1.0) * (_TIE if by_flops and self.step_flops else 1.0)


def prepare_step(analysis: Analysis, style: str | None = None) -> PlanningStep:
    """Prepares an analysed step for plans of a style, as :func:`fxmem.plan` takes it.

    Raises:
        UsageError: This is not the analysis of one training step whose graph backward frees, or
            there is no such style for it.
    """
    style = _resolve_style(analysis, style)
    part, times = take_last_micro_batch(analysis), analysis.setup.loop.accumulate
    index, requested = (
        build_index(repeat_flops(graph, times), keeps_frames=style == MODULES)
        for graph in (part.allocated_graph, part.graph)
    )
    limits = find_limits(index)
    if style == MODULES:
        modules, obstacles = list_modules(index, limits)
        firsts = {call.fqn: call.start for call in reversed(index.graph.calls)}
        reported = [
            Limit(fqn, LimitKind.MODULE, reason, fqn, index.graph.nodes[firsts[fqn]].source)
            for fqn, reason in obstacles.items()
        ]
    else:
        modules, nodes = list_calls(index, limits), index.graph.nodes
        reasons = {
            **{at: (LimitKind.BEGIN, reason) for at, reason in limits.starts.items()},
            **{at: (LimitKind.RECOMPUTE, reason) for at, reason in limits.fixed.items()},
        }
        reported = [
            Limit(nodes[at].name, *reasons[at], nodes[at].fqn, nodes[at].source)
            for at in sorted(reasons)
        ]
    costs_s, run_s, step_flops = price_step(analysis)
    return PlanningStep(
        index=index,
        limits=limits,
        costs_s=costs_s,
        step_s=sum(costs_s),
        run_s=run_s,
        step_flops=step_flops,
        requested=requested,
        settings=analysis.settings,
        modules=modules,
        base=Plan(
            fingerprint=fingerprint_graph(index.graph),
            baseline_peak_bytes=analysis.peak_bytes,
            peak_bytes=analysis.peak_bytes,
            limits=tuple(reported),
            style=style,
            size_hint=analysis.setup.size_hint,
            fx_graph=analysis.fx_graph if style == GRAPH else None,
            analysis=analysis,
        ),
    )


def _resolve_style(analysis: Analysis, style: str | None) -> str:
    """Checks that plans can be made for a step, and of which style."""
    check_analysis(analysis)
    if analysis.setup.mesh is not None:
        raise UsageError(
            "a plan for one rank of many processes is found by recording the rank",
            hint="fxmem.plan(analysis, budget=...) or fxmem.pareto(analysis)",
        )
    style = style or (GRAPH if analysis.frontend == "fx" else MODULES)
    if style not in STYLES:
        raise UsageError(f"unknown style {style!r}", hint=" or ".join(STYLES))
    if style == GRAPH and analysis.frontend != "fx":
        raise UsageError(
            f"this model's graph cannot be rewritten: {analysis.setup.frontend_reason}",
            hint="style='modules'",
        )
    if analysis.setup.mode != "train":
        raise UsageError("inference saves nothing that could be recomputed", hint="mode='train'")
    if analysis.setup.loop.retain_graph:
        raise UsageError(
            "retain_graph=True keeps the tensors that a plan would recompute",
            hint="analyze it with another loop",
        )
    return style


def price_step(analysis: Analysis) -> tuple[tuple[float, ...], float, int]:
    """Prices a step; of several micro-batches, all.

    Returns:
        Seconds of each operation, seconds of each run of a segment beside its operations, and the
        step's FLOPs.
    """
    times = analysis.setup.loop.accumulate
    graph = take_last_micro_batch(analysis).graph
    roofline = find_roofline(analysis.setup.device, analysis.gpu)
    costs_s = tuple(
        cost if operation.phase is Phase.OPTIMIZER else times * cost
        for cost, operation in zip(price_operations(graph, roofline), graph.operations, strict=True)
    )
    run_s = times * price_run(roofline, times * len(costs_s), sum(costs_s))
    return costs_s, run_s, sum(o.flops for o in repeat_flops(graph, times).operations)


def price_change(analysis: Analysis, changed: Analysis, runs: int = 0) -> tuple[float, float]:
    """Prices the recorded step with checkpoints: added time and FLOPs, as shares of the step's.

    ``runs`` of a plan's segments are priced besides.
    """
    costs_s, run_s, flops = price_step(analysis)
    changed_s, _, changed_flops = price_step(changed)
    seconds = sum(changed_s) + runs * run_s
    return seconds / (sum(costs_s) or 1.0) - 1, changed_flops / (flops or 1) - 1


def check_analysis(analysis: object) -> None:
    """Checks that plans are asked of an analysis, and not of a model."""
    if not isinstance(analysis, Analysis):
        raise UsageError(
            f"plans are made from an analysis, got {type(analysis).__name__}",
            hint="fxmem.analyze(model, ...) makes one",
        )
    if analysis.setup.compile == "compiled":
        raise UsageError(
            "a plan is of eager mode, and this step is compiled",
            hint="analyze with compile=False; or fxmem.memory_budgets(analysis), --compile",
        )
    if analysis.setup.mode == "generate":
        raise UsageError(
            "a plan is for a step, and this is a generation", hint="mode='train', or 'infer'"
        )
    if analysis.setup.schedule:
        raise UsageError(
            "a plan is for a model, and this is a rank of a pipeline",
            hint="fxmem.analyze(stage, inputs) for the model of a stage",
        )
    if analysis.setup.window:
        raise UsageError(
            "a plan is for a model, and this is a step of a script",
            hint="fxmem.analyze(model, inputs) for the script's model",
        )


def describe_segments(
    index: StepIndex, segments: Iterable[SegmentRange], names: Mapping[Span, str] | None = None
) -> tuple[Segment, ...]:
    """Describes ranges of a step's nodes as :func:`fxmem.apply` takes them.

    ``names`` are modules by the nodes of their calls; by default those that are called once.
    """
    if names is None:
        calls = sorted(index.graph.calls, key=lambda call: call.fqn.count("."))
        times = Counter(call.fqn for call in calls if call.stop > call.start)
        names = {(call.start, call.stop): call.fqn for call in calls if times[call.fqn] == 1}
    return tuple(_describe(index, segment, names) for segment in segments)


def _describe(index: StepIndex, segment: SegmentRange, names: Mapping[Span, str]) -> Segment:
    graph = index.graph
    nodes = graph.nodes[segment.start : segment.stop]
    operations = index.list_operations(segment.start, segment.stop)
    norms = (graph.nodes[o.node].fqn for o in operations if o.node is not None and is_batch_norm(o))
    states = (graph.storages[i].name for n in nodes for i in index.states[n.index])
    # A module of PyTorch may have its share of dropout set later, and an operator of the user's own
    # may draw without saying so.
    may_draw = any(name in node.target for node in nodes for name in _MAY_DRAW) or any(
        operation.effect or not operation.name.startswith("aten.") for operation in operations
    )
    end = index.end_operation[segment.stop - 1]
    return Segment(
        first=nodes[0].name,
        last=nodes[-1].name,
        nodes=len(nodes),
        fqn=names.get((segment.start, segment.stop), ""),
        source=nodes[0].source,
        random=may_draw,
        runs_whole=not segment.children and any(r.stop == end for r in plan_runs(index, [segment])),
        norms=tuple(dict.fromkeys(norms)),
        states=tuple(dict.fromkeys(states)),
        children=tuple(_describe(index, child, names) for child in segment.children),
    )
