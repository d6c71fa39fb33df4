"""The peak of each rank of a pipeline, against the CPU allocator's own events in real processes."""

from __future__ import annotations

from benchmarks.pipelines import Case, measure_ranks, predict_ranks

CASES = (
    Case("GPipe", 2, 2, 4),
    Case("1F1B", 2, 2, 4, passes_two=True, return_outputs=False),
    Case("Interleaved1F1B", 2, 4, 4),
    Case("ZBVZeroBubble", 2, 4, 4),
    Case("DualPipeV", 2, 4, 8, passes_two=True),
)


def test_ranks() -> None:
    """To the byte, in one pair of processes."""
    assert [predict_ranks(case) for case in CASES] == measure_ranks(CASES)
