"""Steps that are more than their modules - hooks, closures, globals - against the real step."""

from __future__ import annotations

import pytest
from sample_nets.reaching import BUILDERS, WIDTH, forget_globals

from benchmarks.accuracy import analyse
from benchmarks.cases import Case, image
from benchmarks.measure import measure_allocator

pytestmark = pytest.mark.usefixtures("one_thread")


# A hook on a module whose input needs no gradient.
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", BUILDERS)
def test_the_allocator_peaks_where_it_does(name: str) -> None:
    case = Case(name, BUILDERS[name], (image(8, WIDTH),))
    analysis = analyse(case, "train")
    forget_globals()  # the profiler may tell the release of what was made before it
    real = measure_allocator(case, "train")
    assert analysis.timeline.resident_bytes == real["resident_bytes"]
    assert analysis.peak_bytes == pytest.approx(real["peak_bytes"], abs=128)  # scratch memory
