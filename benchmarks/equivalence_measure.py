"""Three steps of a model and of its plans: whether all bits are the same, and the peak of each."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import fxmem
from benchmarks.cases import SEED, Case
from fxmem.errors import FxmemWarning, summarize_error
from fxmem.planning.model.recomputation import SegmentRange, iterate_segments, nest_spans
from fxmem.planning.model.simulate import simulate_segments
from fxmem.planning.plan import GRAPH, MODULES
from fxmem.planning.prepared_step import PlanningStep, describe_segments, prepare_step
from fxmem.planning.strategies.small_changes import vary_segments
from fxmem.verifying.comparing import Record, compare_records
from fxmem.verifying.running import Runner, StepOptions, StepTask, keep_state

OPTIMIZER = "adam"
STEPS = 3
SIZE_HINT = 8
"""About as many elements as searches of the suite's models find."""
_CHANGES = 12
"""That make a plan of nothing one at random."""


@dataclass(frozen=True)
class Held:
    """A plan held against the plain model.

    Attributes:
        plan: The plan.
        drawn: Whether it was drawn at random; else the search found it.
        difference: What is not equal, or the error; empty where all is.
        peak_bytes: Measured; None where the step fails.
    """

    plan: fxmem.Plan
    drawn: bool
    difference: str
    peak_bytes: int | None = None

    @property
    def error(self) -> float | None:
        """The distance of the promised peak from the measured one, over that."""
        return None if self.peak_bytes is None else self.plan.peak_bytes / self.peak_bytes - 1


@dataclass(frozen=True)
class Outcome:
    """All plans of a style for a model.

    Attributes:
        name: Of the model.
        style: Of the plans.
        nodes: Of the model.
        plain_peak_bytes: Measured.
        plain_error: How far what is predicted of it lies off, over it.
        held: Plans, cheapest first, then those drawn.
        note: What cannot be tried, and why.
    """

    name: str
    style: str
    nodes: int
    plain_peak_bytes: int
    plain_error: float
    held: tuple[Held, ...] = ()
    note: str = ""

    @property
    def worst_error(self) -> float:
        """The largest distance of a promised peak from the measured one, over that."""
        return max((abs(h.error) for h in self.held if h.error is not None), default=0.0)

    @property
    def differing(self) -> tuple[Held, ...]:
        """Plans with which something is not equal, or fails."""
        return tuple(h for h in self.held if h.difference)


class Baseline:
    """The plain model's steps, which those of plans are held against."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        autocast: torch.dtype | None = None,
    ) -> None:
        self._inputs = (args, kwargs)
        self._autocast = autocast
        self._runner = self._make_runner(model)
        with keep_state(self._runner.model):
            self.records = _take_steps(self._runner)
            self.peak_bytes = self._runner.measure()

    def _make_runner(self, model: nn.Module) -> Runner:
        options = StepOptions(steps=STEPS, seed=SEED, optimizer=OPTIMIZER, autocast=self._autocast)
        return Runner(StepTask(self._inputs, torch.device("cpu"), options), model)

    def hold(self, plan: fxmem.Plan, *, drawn: bool = False) -> Held:
        """Takes the same steps with a plan."""
        ours = self._runner
        try:
            planned: Any = fxmem.apply(ours.model, plan)
            theirs = self._make_runner(planned)
            theirs.target = ours.target
            with keep_state(ours.model, theirs.model), warnings.catch_warnings():
                warnings.simplefilter("error", FxmemWarning)
                records = _take_steps(theirs)
                ran = STEPS if plan.style == MODULES else planned.plan_calls
                peak_bytes = theirs.measure()
        except Exception as error:  # one plan that fails is a row, not the end
            return Held(plan, drawn, f"{type(error).__name__}: {summarize_error(error)}")
        difference = next(filter(None, map(_compare, self.records, records)), "")
        if ran < STEPS:
            difference = f"the plan ran in {ran} of {STEPS} steps"
        return Held(plan, drawn, difference, peak_bytes)


def _take_steps(runner: Runner) -> list[Record]:
    """Some steps one after the other."""
    runner.prepare()
    records = []
    for _ in range(STEPS):
        runner.run()
        records.append(runner.record)
    return records


def _compare(ours: Record, theirs: Record) -> str:
    for difference in compare_records(1, ours, theirs):
        return f"{difference.kind.value} {difference.name} {difference.cause}"
    return ""


def draw_plan(step: PlanningStep, seed: int) -> fxmem.Plan | None:
    """A plan at random; None where chance finds none that computes anything again."""
    rng = random.Random(seed)
    facts = step.index
    if step.base.style == MODULES:
        chosen = [choice for choice in step.modules if rng.random() < 0.4]
        regions = nest_spans(span for choice in chosen for span in choice.spans)
        names = {span: module.fqn for module in step.modules for span in module.spans}
    else:
        first = sum(node.op == "placeholder" for node in facts.graph.nodes)
        regions, names = (), None
        for _ in range(_CHANGES if first < facts.nodes else 0):
            positions = range(first, facts.nodes)
            regions = vary_segments(rng, [regions], 0, positions, facts, step.limits)
        regions = tuple(r for r in regions if not _is_idle(step, r))
    if not regions:
        return None
    simulation = simulate_segments(facts, regions)
    return replace(
        step.base,
        peak_bytes=max(simulation.live_bytes),
        overhead=sum(step.costs_s[index] for index in simulation.recomputed) / step.step_s,
        segments=describe_segments(facts, regions, names),
    )


def _is_idle(step: PlanningStep, region: SegmentRange) -> bool:
    """Tells whether backward needs nothing of some part of a region: no search finds such."""
    saves = step.index.saves_by_node
    return not all(
        any(save.unpacked is not None for node in range(r.start, r.stop) for save in saves[node])
        for r in iterate_segments([region])
    )


def list_plans(
    analysis: fxmem.Analysis, style: str, points: int, drawn: int, time_limit_s: float
) -> Iterator[tuple[fxmem.Plan, bool]]:
    """Plans that the search finds, and some drawn at random.

    Args:
        analysis: Of the step.
        style: Of the plans.
        points: How many found ones there are at most, from the loosest to the tightest.
        drawn: How many drawn ones there are at most; more where fewer were found.
        time_limit_s: Of the search.
    """
    found = fxmem.pareto(analysis, style=style, points=points, time_limit_s=time_limit_s)
    yield from ((plan, False) for plan in found)
    step = prepare_step(analysis, style)
    seen = {plan.segments for plan in found}
    wanted = drawn + points - len(found)
    for seed in range(4 * wanted):
        plan = draw_plan(step, seed)
        if plan is not None and plan.segments not in seen and wanted:
            seen.add(plan.segments)
            wanted -= 1
            yield plan, True


def examine(
    case: Case,
    *,
    points: int = 5,
    drawn: int = 2,
    time_limit_s: float = 2.0,
    styles: Sequence[str] = (GRAPH, MODULES),
) -> Iterator[Outcome]:
    """A model with all its plans, style by style.

    Args:
        case: The model and its inputs.
        points: As for :func:`list_plans`.
        drawn: Likewise.
        time_limit_s: Likewise.
        styles: Those of the plans; of a model without a graph, whole modules only.

    Raises:
        FxmemError: The model cannot be analysed.
    """
    model = case.model().train()
    args, kwargs = case.inputs()
    options = {"optimizer": OPTIMIZER, "size_hint": SIZE_HINT, "autocast": case.autocast}
    analysis = fxmem.analyze(model, args, kwargs, device="cpu", **options)
    baseline = Baseline(model, args, kwargs, case.autocast)
    plain_error = analysis.peak_bytes / baseline.peak_bytes - 1
    reason = "" if analysis.frontend == "fx" else str(analysis.setup.frontend_reason)
    for style in styles if analysis.frontend == "fx" else (MODULES,):
        plans = list_plans(analysis, style, points, drawn, time_limit_s)
        held = tuple(baseline.hold(plan, drawn=is_drawn) for plan, is_drawn in plans)
        yield Outcome(
            case.name, style, len(analysis.nodes), baseline.peak_bytes, plain_error, held, reason
        )
