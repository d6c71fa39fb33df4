"""The half of the CUDA benchmark that needs no GPU to be right."""

from __future__ import annotations

from benchmarks.cuda_cases import CUDA_CASES
from benchmarks.cuda_measure import _attribute


def test_cases_have_names_of_their_own() -> None:
    assert len({case.name for case in CUDA_CASES}) == len(CUDA_CASES)
    assert sum(case.traced for case in CUDA_CASES) >= 12


def test_memory_belongs_to_the_operators_that_run_around_it_in_its_thread() -> None:
    spans = [(0, 100, 1, "outer"), (10, 50, 1, "inner"), (60, 90, 1, "later"), (0, 30, 2, "other")]
    memory = [(5, 1, 1), (20, 1, 2), (20, 2, 3), (55, 1, 4), (70, 1, 5), (95, 1, 6), (40, 2, 7)]
    found = [event["operators"] for event in _attribute(sorted(spans), sorted(memory))]
    assert found == [
        ["outer"],
        ["outer", "inner"],
        ["other"],
        [],  # in the other thread, after its only operator
        ["outer"],
        ["outer", "later"],
        ["outer"],
    ]
