"""What the search finds next to a goal, against the best schedules over whole blocks."""

from __future__ import annotations

import pytest

import fxmem
from benchmarks.planner_cases import CASES


# rotor's schedules, run as nested checkpoints: peaks by the allocator's events, FLOPs as PyTorch
# counts them, with `python -m benchmarks.planner --only resnet`.
@pytest.mark.parametrize(("mib", "overhead_flops"), [(16.61, 0.3468), (14.49, 0.5690)])
def test_what_schedules_of_blocks_take_is_enough(mib: float, overhead_flops: float) -> None:
    case = next(case.case for case in CASES if case.case.name == "resnet")
    analysis = fxmem.analyze(case.model(), *case.inputs(), device="cpu")
    assert fxmem.plan(analysis, budget=f"{mib}MiB").overhead_flops < overhead_flops
