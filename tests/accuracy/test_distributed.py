"""Predicted memory of each rank, against real processes of gloo groups.

More cases are in ``python -m benchmarks.distributed``.
"""

from __future__ import annotations

import pytest

from benchmarks.distributed import (
    RankMeasurement,
    compare_allocations,
    measure_cases,
    predict_rank,
)
from benchmarks.distributed_cases import CASES
from fxmem.versions.release import is_release

NAMES = ["ddp, views"]
if is_release((2, 8)):  # FSDP2 asks the CPU for streams that earlier ones lack
    NAMES += ["fsdp, last reduction", "fsdp1, own parameters"]
    NAMES += ["tp, Llama", "fsdp and tp, checkpoints"]
SELECTED = {case.name: case for case in CASES if case.name in NAMES}
MOST_OTHER_BYTES = 1024
"""The ranks of meshes, and indices of buckets whose end the profiler did not see."""

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def measured() -> dict[str, list[RankMeasurement]]:
    return measure_cases([*SELECTED.values()])


@pytest.mark.parametrize("name", NAMES)
def test_ranks_allocate_what_is_predicted(
    name: str, measured: dict[str, list[RankMeasurement]]
) -> None:
    ranks = measured[name]
    for rank in (0, len(ranks) - 1):
        analysis = predict_rank(SELECTED[name], rank)
        real, resident_bytes = ranks[rank], analysis.timeline.resident_bytes
        assert analysis.peak_bytes - resident_bytes == real.peak_bytes - real.resident_bytes
        assert resident_bytes == pytest.approx(real.resident_bytes, abs=MOST_OTHER_BYTES)
        assert compare_allocations(analysis, real) == ""
