"""What the search finds next to a goal, against the best schedules over whole blocks."""

from __future__ import annotations

from functools import cache

import pytest

import fxmem
from benchmarks.planner_cases import CASES

MIB = 2**20


@cache
def analyze_resnet() -> fxmem.Analysis:
    case = next(case.case for case in CASES if case.case.name == "resnet")
    return fxmem.analyze(case.model(), *case.inputs(), device="cpu")


# rotor's schedules, run as nested checkpoints: peaks by the allocator's events, FLOPs as PyTorch
# counts them, with `python -m benchmarks.planner --only resnet`.
@pytest.mark.parametrize(("mib", "overhead_flops"), [(16.61, 0.3468), (14.49, 0.5690)])
def test_what_schedules_of_blocks_take_is_enough(mib: float, overhead_flops: float) -> None:
    plan = fxmem.plan(analyze_resnet(), budget=mib * MIB)
    assert plan.overhead_flops < overhead_flops


def test_what_schedules_of_blocks_cost_is_enough() -> None:
    plan = fxmem.plan(analyze_resnet(), max_overhead_flops=0.3468)
    assert plan.peak_bytes < 16.61 * MIB
