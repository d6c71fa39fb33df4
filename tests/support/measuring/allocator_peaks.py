"""The peak that is predicted of a step on the CPU, against the allocator's own events."""

from __future__ import annotations

import fxmem
from benchmarks.cases import Case
from benchmarks.measure import measure_allocator
from benchmarks.step import Mode

NUMBERS_BYTES = 16
"""Python numbers on their way into operators, and what the real step reads to decide."""


def check_peak(case: Case, mode: Mode) -> None:
    """Measures a step of a case and predicts it."""
    args, kwargs = case.inputs()
    measured = measure_allocator(case, mode)["peak_bytes"]
    predicted = fxmem.analyze(case.model(), args, kwargs, mode=mode, device="cpu").peak_bytes
    assert abs(predicted - measured) <= NUMBERS_BYTES
