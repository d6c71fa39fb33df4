"""Each operation that is said to run in place does, with the same results and gradients.

``FXMEM_EXAMPLES=2000`` runs more examples, with random seeds.
"""

from __future__ import annotations

import pytest
from generated.modules import Program, programs, runs
from generated.steps import analyse, is_in_graph, is_promise_kept, uses_all_values
from hypothesis import assume, given
from leanest import build_module
from steps import are_equal, take_step
from trials import try_examples

import fxmem
from fxmem.applying import runtime
from fxmem.memory.timeline import build_timeline
from fxmem.planning.inplace.inplace_changes import apply_inplace, find_inplace
from fxmem.planning.model.index import build_index
from fxmem.planning.outcome import measure_plan
from fxmem.planning.plan import Plan

pytestmark = pytest.mark.filterwarnings("ignore")  # what programs do is theirs
STRICT = try_examples(25, are_slow=True)


def check_changes(program: Program, *, train: bool) -> None:
    case, mode = program.case(), "train" if train else "infer"
    args = case.inputs()[0]
    analysis = analyse(program, mode)
    changes = find_inplace(build_index(analysis.graph))
    for change in changes:
        lower = max(build_timeline(apply_inplace(analysis.graph, [change])).profile())
        assert analysis.peak_bytes - lower == change.saving_bytes
    if analysis.setup.frontend_reason or not is_in_graph(program):
        return
    graph = analysis.fx_graph
    plain = take_step(case.model(), args, train=train)
    for chosen in (*([change] for change in changes), changes):
        applied = build_module(case.model(), graph, (), chosen, mode=mode)
        assert are_equal(plain, take_step(applied, args, train=train)), chosen
    if not train and uses_all_values(analysis):
        plan = Plan("", 0, 0, inplace=changes, mode=mode)
        applied = build_module(case.model(), graph, (), changes, mode=mode)
        recorded = fxmem.analyze(applied, args, device="cpu", mode=mode).peak_bytes
        promised, _ = measure_plan(analysis, plan)
        assert is_promise_kept(promised, recorded)


@STRICT
@given(programs())
@pytest.mark.parametrize("train", [True, False])
def test_results_and_gradients_stay_the_same(train: bool, program: Program) -> None:
    assume(runs(program))
    with pytest.MonkeyPatch.context() as patch:
        # In training that is for the user's own code to do, and plans do not.
        patch.setattr(runtime, "_may_overwrite", lambda: True)
        check_changes(program, train=train)
