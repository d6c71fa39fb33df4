"""Published traces of GPUs, aligned with the predicted steps."""

from __future__ import annotations

import pytest

from benchmarks.published.cases import Case, load_all
from benchmarks.published.sources.assignment2_systems import analyze
from benchmarks.published.traces import FOLDER
from fxmem.comparison.aligning import align_snapshot
from fxmem.comparison.snapshot import read_snapshot
from tests.support.snapshots import read_trace, write

CASES = [c for c in load_all() if str(c.config.get("trace", "")).startswith("wedsonlin")]


@pytest.mark.parametrize(
    "case", [c for c in CASES if "1024" not in c.id and "256 train" not in c.id], ids=str
)
def test_a_published_trace_is_as_predicted(case: Case) -> None:
    snapshot = read_snapshot(write(read_trace(FOLDER / f"{case.config['trace']}.json.gz")))
    found = align_snapshot(analyze(case).to_dict(), snapshot, ("report", "trace"))
    assert found.share == 1 and found.differences == ()
    assert abs(found.measured_bytes - found.predicted_bytes) < 4096  # of smaller blocks
