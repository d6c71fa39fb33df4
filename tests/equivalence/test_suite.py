"""Plans of many models over three real steps: all bits the same, and the peak that was promised.

``python -m benchmarks.equivalence`` runs the same with more plans, and writes a page.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from benchmarks.cases import import_torchvision
from benchmarks.equivalence_cases import CASES, HARD
from benchmarks.equivalence_measure import examine

pytestmark = pytest.mark.usefixtures("one_thread")  # what kernels take for scratch is per thread

QUICK = (
    {case.name for case in HARD}
    | set(
        """
    vision_transformer timm_test_resnet hf/gpt2 hf/t5 hf/mixtral lstm tied_weights reused_module
    dict_output dataclass_loss checkpoint_non_reentrant custom_function inplace views
    """.split()
    )
    | {"unrolled bf16", "mlps_dropout bf16"}
)

DRAWN = {"spectral_norm_old": 2, "hf/mpt": 2}
"""Models on which plans at random find what plans of the search do not."""


@pytest.fixture(autouse=True)
def models_of_others() -> Iterator[None]:
    """Imports what they need, which is no garbage, and leaves their warnings to them."""
    import_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(case.name, marks=() if case.name in QUICK else pytest.mark.slow)
        for case in CASES
    ],
)
def test_plans_compute_the_same_in_the_memory_that_they_promise(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    worst = 0.0
    for outcome in examine(case, drawn=DRAWN.get(name, 0), time_limit_s=0.4):
        assert outcome.held
        assert [(held.difference, held.plan.segments) for held in outcome.differing] == []
        worst = max(worst, outcome.worst_error)
    assert worst <= 0.01
