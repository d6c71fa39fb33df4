"""Generations, call by call, against PyTorch's profiler."""

from __future__ import annotations

import pytest

from benchmarks.generation import compare_case


@pytest.mark.parametrize("name", ["GPT-2", "Llama, three beams"])
def test_each_call_takes_what_it_really_takes(name: str) -> None:
    measured, found = compare_case(name)
    assert len(found) == 48
    assert found == measured
