"""Steps with bitsandbytes' packed weights and states, against the profiler's events."""

from __future__ import annotations

import os

import pytest

from benchmarks.quantized import run_apart

pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize(
    "name", ["Linear4bit, nf4, double quantization", "Linear8bitLt, threshold 6", "Lion8bit"]
)
def test_a_step_takes_what_is_measured(name: str) -> None:
    assert run_apart("predict", name) == run_apart("measure", name)


@pytest.mark.skipif(not os.environ.get("FXMEM_PACKAGES"), reason="FXMEM_PACKAGES names no folder")
@pytest.mark.parametrize(
    "name", ["torchao, AdamW8bit", "torchao, NF4", "HQQ, 3 bits", "quanto, int4"]
)
def test_a_step_with_other_packages(name: str) -> None:
    assert run_apart("predict", name) == run_apart("measure", name)
