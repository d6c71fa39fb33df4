"""Each operation that is said to run in place does, with the same results and gradients.

``FXMEM_EXAMPLES=2000`` runs more examples, with random seeds.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
import torch
from generated_modules import Program, programs, runs
from hypothesis import HealthCheck, Phase, assume, given, settings
from in_place_runs import edit_model, take_step

from fxmem.analysis import Analysis
from fxmem.api import analyze
from fxmem.planning.facts import gather_facts
from fxmem.planning.inplace import apply_inplace, find_inplace
from fxmem.timeline import build_timeline

EXAMPLES = int(os.environ.get("FXMEM_EXAMPLES", "0"))
STRICT = settings(
    max_examples=EXAMPLES or 25,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if EXAMPLES else [])],
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What the generated programs do is theirs: PyTorch warns of some of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def check_changes(program: Program, *, train: bool) -> None:
    case = program.case()
    model, (args, _) = case.model(), case.inputs()
    analysis: Analysis = analyze(model, args, device="cpu", mode="train" if train else "infer")
    changes = find_inplace(gather_facts(analysis.graph))
    for change in changes:
        lower = max(build_timeline(apply_inplace(analysis.graph, [change])).profile())
        assert analysis.peak_bytes - lower == change.saving_bytes
    if analysis.setup.frontend_reason:
        return
    expected = take_step(edit_model(model, analysis.fx_graph, []), args, train=train)
    for chosen in (*([change] for change in changes), list(changes)):
        edited = edit_model(model, analysis.fx_graph, chosen)
        found = take_step(edited, args, train=train)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@STRICT
@given(programs())
@pytest.mark.parametrize("train", [True, False])
def test_results_and_gradients_stay_the_same(train: bool, program: Program) -> None:
    assume(runs(program))
    check_changes(program, train=train)
