"""fxmem against real steps of PyTorch, on modules that Hypothesis writes.

``FXMEM_EXAMPLES=5000`` runs more of them, with random seeds.
"""

from __future__ import annotations

import pytest
from generated.modules import Program, programs, runs
from hypothesis import assume, given
from trials import try_examples

from benchmarks.accuracy import peak_without_workspace
from benchmarks.cases import Spec
from benchmarks.measure import measure_flops, measure_saved, measure_tensors
from benchmarks.step import MODES, Mode
from fxmem.analysis import Analysis
from fxmem.fakes.fake_mode import make_fake_mode
from fxmem.fakes.swapping import swap_in_fakes
from fxmem.graph import Category
from fxmem.kernels.cpu import CPU
from fxmem.setup import Setup
from fxmem.training.loops import infer, plain
from fxmem.training.losses import resolve_loss
from fxmem.training.optimizers import resolve_optimizer
from fxmem.training.step import Recording, record_step
from fxmem.training.training import Step

GIVEN = (Category.PARAMETER, Category.BUFFER, Category.INPUT)
pytestmark = pytest.mark.filterwarnings("ignore")  # what programs do is theirs
STRICT = try_examples(40, are_slow=True)


@pytest.fixture(autouse=True, scope="module")
def _warm_up(one_thread: None) -> None:
    """Has torch loaded before the first test."""
    warm_up = Program((("nn.Linear(16, 16)", False),), (), "self.m0(x0)", (Spec((4, 16)),))
    check_numbers(warm_up, "train+adam")
    measure_flops(warm_up.case(), "train")


def record(program: Program, mode: Mode, *, symbolic_sizes: bool = True) -> Recording:
    case = program.case()
    model, inputs = case.model(), case.inputs()
    fake_mode = make_fake_mode()
    make_optimizer = resolve_optimizer("adam" if mode == "train+adam" else None)
    train = mode != "infer"
    with fake_mode, swap_in_fakes(model, fake_mode, *inputs, train=train) as (args, kwargs, _):
        loop = plain if train else infer
        step = Step(model, args, kwargs, train, resolve_loss(None), make_optimizer, loop)
        return record_step(step, CPU, symbolic_sizes=symbolic_sizes)


def analyse(recording: Recording) -> Analysis:
    return Analysis(Setup("generated", (), "train", "cpu", None, None, "fx"), recording.graph)


def check_numbers(program: Program, mode: Mode) -> None:
    recording = record(program, mode)
    analysis = analyse(recording)
    assert analysis.timeline.live_bytes() == recording.live_bytes
    assert sum(analysis.breakdown.values()) == analysis.peak_bytes
    assert record(program, mode, symbolic_sizes=False).graph == recording.graph

    real = measure_tensors(program.case(), mode, eager_adds=True)
    assert analysis.timeline.resident_bytes == real["resident_bytes"]
    assert peak_without_workspace(analysis) == real["peak_bytes"]


@STRICT
@given(programs())
def test_agrees_with_the_real_step(program: Program) -> None:
    assume(runs(program))
    for mode in MODES:
        check_numbers(program, mode)


@STRICT
@given(programs())
def test_saves_and_counts_what_autograd_does(program: Program) -> None:
    # A tensor that is kept frees another's address, by which the measurement knows storages.
    assume(runs(program) and "kept" not in program.source)
    analysis = analyse(record(program, "train"))
    real = measure_saved(program.case(), "train")["storages"]
    assert [(s.nbytes, s.dtype, s.category not in GIVEN) for s in analysis.saved] == [
        (s["nbytes"], s["dtype"], s["kind"] == "activation") for s in real
    ]
    flops = measure_flops(program.case(), "train")
    counted = {
        "forward_flops": analysis.forward_flops,
        "backward_flops": analysis.backward_flops,
    }
    assert counted == flops
