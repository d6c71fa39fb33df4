"""Phases of jobs that resume, evaluate and save, against PyTorch's profiler."""

from __future__ import annotations

import pytest

from benchmarks.job_phases import compare_job


@pytest.mark.parametrize("name", ["plain", "trainer"])
def test_phases_take_what_they_really_take(name: str) -> None:
    measured, found = compare_job(name)
    assert measured["evaluation"] > measured["loading"] > 0
    # The trainer saves the state of the host's generator, which no operator makes.
    assert 0 <= measured.pop("saving") - found.pop("saving") <= 5056 + 128
    assert found == pytest.approx(measured, rel=1e-4)
