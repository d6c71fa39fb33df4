"""Each operation that is said to run in place does, with the same results and gradients.

``FXMEM_EXAMPLES=2000`` runs more examples, with random seeds.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
from generated_modules import Program, programs, runs
from hypothesis import HealthCheck, Phase, assume, given, settings
from steps import are_equal, take_step

from fxmem.analysis import Analysis
from fxmem.api import analyze
from fxmem.planning.applied import measure_plan
from fxmem.planning.facts import gather_facts
from fxmem.planning.inplace import apply_inplace, find_inplace
from fxmem.planning.plan import Plan
from fxmem.timeline import build_timeline
from fxmem.transform.checkpointing import build_module

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
    case, mode = program.case(), "train" if train else "infer"
    args = case.inputs()[0]
    analysis: Analysis = analyze(case.model(), args, device="cpu", mode=mode)
    changes = find_inplace(gather_facts(analysis.graph))
    for change in changes:
        lower = max(build_timeline(apply_inplace(analysis.graph, [change])).profile())
        assert analysis.peak_bytes - lower == change.saving_bytes
    # What is kept on the module is no part of the graph; fakes of inputs keep a changed shape.
    if analysis.setup.frontend_reason or any(
        word in program.source for word in ("kept", "unsqueeze_(", ".t_(")
    ):
        return
    graph = analysis.fx_graph
    plain = take_step(case.model(), args, train=train)
    for chosen in (*([change] for change in changes), changes):
        applied = build_module(case.model(), graph, (), chosen, mode=mode)
        assert are_equal(plain, take_step(applied, args, train=train)), chosen
    # The user's function holds dead values to its end, and the planned module does not.
    if all(save.unpacked is not None for save in analysis.graph.saves):
        plan = Plan("", 0, 0, inplace=changes, mode=mode)
        applied = build_module(case.model(), graph, (), changes, mode=mode)
        recorded = analyze(applied, args, device="cpu", mode=mode).peak_bytes
        promised, _ = measure_plan(analysis, plan)
        assert recorded <= promised <= recorded * 1.0001 + 64


@STRICT
@given(programs())
@pytest.mark.parametrize("train", [True, False])
def test_results_and_gradients_stay_the_same(train: bool, program: Program) -> None:
    assume(runs(program))
    check_changes(program, train=train)
