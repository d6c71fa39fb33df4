"""Limits of plans, plans that do not exist, and the messages that say so."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem import pareto
from fxmem import plan as plan_step
from fxmem.units import format_bytes

INPUT = "4096x64"
ONE_LIMIT = "a plan needs one limit (budget='8GiB', max_overhead=0.1 or max_overhead_flops=0.1)"
TENSOR_BYTES = 4 * 4096 * 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


@pytest.fixture(scope="module")
def analysis() -> fxmem.Analysis:
    return fxmem.analyze(Net(), (INPUT,), device="cpu")


@pytest.fixture(scope="module")
def front(analysis: fxmem.Analysis) -> tuple[fxmem.Plan, ...]:
    return pareto(analysis, points=100)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        *((limits, ONE_LIMIT) for limits in ({}, {"budget": 1, "max_overhead": 0.1})),
        *(
            ({limit: share}, f"an overhead cannot be {share!r} (0.1 for a tenth more)")
            for limit in ("max_overhead", "max_overhead_flops")
            for share in ("10%", -0.1, float("nan"), True)
        ),
    ],
)
def test_a_plan_needs_one_limit(
    analysis: fxmem.Analysis, limits: dict[str, Any], message: str
) -> None:
    with pytest.raises(fxmem.UsageError) as caught:
        plan_step(analysis, **limits)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "infer"}, "inference saves nothing that could be recomputed (mode='train')"),
        (
            {"loop": "plain(retain_graph=True)"},
            "retain_graph=True keeps the tensors that a plan would recompute"
            " (analyze it with another loop)",
        ),
        (
            None,
            "plans are made from an analysis, got Net (fxmem.analyze(model, ...) makes one)",
        ),
    ],
    ids=["inference", "retained", "model"],
)
def test_steps_without_a_plan_are_refused(options: Any, message: str) -> None:
    subject: Any = Net()
    if options is not None:
        subject = fxmem.analyze(subject, (INPUT,), device="cpu", **options)
    with pytest.raises(fxmem.UsageError) as caught:
        pareto(subject)
    assert str(caught.value) == message


def test_what_no_plan_keeps_names_the_leanest_and_what_it_holds(
    analysis: fxmem.Analysis, front: tuple[fxmem.Plan, ...]
) -> None:
    with pytest.raises(fxmem.InfeasibleError) as caught:
        plan_step(analysis, budget="1 MiB")
    assert caught.value.hint.startswith("a smaller batch")
    text = caught.value.cause
    leanest = format_bytes(front[-1].peak_bytes)
    assert text.startswith(f"no plan within 1.00 MiB exists; the leanest takes {leanest}, in ")
    where, _, held = text.partition(": ")
    assert re.search(r", in backward at [\w.]+ \(test_planner\.py:\d+\)$", where), where
    parts = dict(part.rsplit(" ", 2)[::2] for part in held.split(", "))
    assert {"activation", "input", "parameter", "gradient"} <= parts.keys()
    # Parameters are 6 x (64 x 64 + 64) numbers.
    assert f"parameter {format_bytes(6 * 4 * (64 * 64 + 64))}" in held
    assert f"input {format_bytes(TENSOR_BYTES)}" in held


def test_a_search_that_was_cut_short_says_so(
    analysis: fxmem.Analysis, front: tuple[fxmem.Plan, ...]
) -> None:
    with pytest.raises(fxmem.InfeasibleError, match=r"^no plan within \S+ MiB was found; the lea"):
        plan_step(analysis, budget=front[-1].peak_bytes - 1)
    with pytest.raises(fxmem.InfeasibleError) as caught:
        plan_step(analysis, budget=front[-1].peak_bytes - 1, time_limit_s=0.01)
    assert caught.value.hint == "with a longer time limit one may be found"


def test_a_budget_is_kept_at_the_least_cost(
    analysis: fxmem.Analysis, front: tuple[fxmem.Plan, ...]
) -> None:
    assert len(front) > 3
    for budget_bytes in (front[2].peak_bytes, front[-1].peak_bytes):
        plan = plan_step(analysis, budget=budget_bytes)
        assert plan.peak_bytes <= budget_bytes
        allowed = [p.overhead for p in front if p.peak_bytes <= budget_bytes]
        assert plan.overhead <= min(allowed) * 1.05
        assert plan.lower_bound_overhead is not None
        assert plan.lower_bound_overhead <= plan.overhead + 1e-9


def test_segments_add_time_beside_their_operations(front: tuple[fxmem.Plan, ...]) -> None:
    added = [s.recompute_s for plan in front for s in plan.segments if not s.children]
    assert min(added) > 50e-6  # python -m benchmarks.overhead --calls
    assert all(a.overhead < b.overhead for a, b in pairwise(front))
    steps_s = [sum(s.recompute_s for s in plan.segments) / plan.overhead for plan in front[1:]]
    assert steps_s == pytest.approx([steps_s[0]] * len(steps_s))
    flops = [sum(s.recompute_flops for s in p.segments) / p.overhead_flops for p in front[1:]]
    assert flops == pytest.approx([flops[0]] * len(flops))


def test_an_overhead_is_kept_in_the_least_memory(
    analysis: fxmem.Analysis, front: tuple[fxmem.Plan, ...]
) -> None:
    plan = plan_step(analysis, max_overhead=0.2)
    assert 0 < plan.overhead <= 0.2
    assert plan.peak_bytes <= min(p.peak_bytes for p in front if p.overhead <= 0.2)
    for nothing in (plan_step(analysis, max_overhead=0), plan_step(analysis, budget="1GiB")):
        assert (nothing.segments, nothing.overhead) == ((), 0)
        assert nothing.peak_bytes == nothing.baseline_peak_bytes == analysis.peak_bytes
    in_flops = plan_step(analysis, max_overhead_flops=0.2)
    assert in_flops.overhead_flops <= 0.2


def test_a_front_costs_more_for_less_memory(
    analysis: fxmem.Analysis, front: tuple[fxmem.Plan, ...]
) -> None:
    assert front[0].segments == ()
    for cheap, lean in pairwise(front):
        assert cheap.peak_bytes > lean.peak_bytes
        assert cheap.overhead < lean.overhead
    few = pareto(analysis, points=3)
    assert len(few) == 3
    assert (few[0], few[-1]) == (front[0], front[-1])


class Heavy(Net):
    """Has a table beside which all activations are next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(2**30, device="meta"))


def test_a_plan_that_saves_next_to_nothing_is_found_by_its_budget_alone() -> None:
    analysis = fxmem.analyze(Heavy(), INPUT, device="cpu")
    assert [plan.segments for plan in pareto(analysis)] == [()]
    assert plan_step(analysis, max_overhead=0.5).segments == ()
    least = plan_step(analysis, budget=analysis.peak_bytes - 2 * TENSOR_BYTES)
    assert least.segments and least.overhead > 0.02
