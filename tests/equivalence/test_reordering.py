"""Plans of inferences in which branches run earlier: measured, and equal to the bit."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from branched_nets import Inception, Resolutions, TwoBranches
from edited_runs import measure_call
from steps import are_equal, take_step
from torch import nn

import benchmarks.libraries  # noqa: F401  (it says how libraries of models are imported)
import fxmem
from benchmarks.cases import import_torchvision
from examples.unet import UNet

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 0.01


def vision(name: str, **options: object) -> nn.Module:
    return getattr(import_torchvision().models, name)(**options)  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], bool]] = {
    "two branches": (TwoBranches, (1, 3, 64, 64), True),
    "inception": (Inception, (1, 3, 64, 64), True),
    "resolutions": (Resolutions, (1, 3, 64, 64), False),
    "unet": (partial(UNet, depth=3, width=16), (1, 3, 64, 64), False),
    "googlenet": (partial(vision, "googlenet", init_weights=False), (1, 3, 96, 96), False),
    "resnet50": (partial(vision, "resnet50"), (2, 3, 96, 96), True),
    "inception_v3": (partial(vision, "inception_v3", init_weights=False), (1, 3, 128, 128), False),
    "swin_t": (partial(vision, "swin_t"), (1, 3, 224, 224), True),
}
"""What each is called with, and whether another order takes less."""
QUICK = ("two branches", "inception", "resolutions", "unet")


def build(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model = MODELS[name][0]()
    return model, (torch.randn(MODELS[name][1]),)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_the_measured_peak_is_what_is_said(name: str) -> None:
    model, args = build(name)
    analysis = fxmem.analyze(model, args, device="cpu", mode="infer")
    plan = fxmem.plan(analysis)
    assert bool(plan.reorders) == MODELS[name][2]
    assert all(move.peak_bytes >= plan.peak_bytes for move in plan.reorders)
    plain = take_step(build(name)[0], args, train=False)
    applied = fxmem.apply(model, plan)
    measured = measure_call(applied, applied, args, train=False)
    assert measured == pytest.approx(plan.peak_bytes, rel=TOLERANCE)
    assert are_equal(plain, take_step(fxmem.apply(build(name)[0], plan), args, train=False))


def test_what_waits_for_the_larger_branch_is_off_the_peak() -> None:
    model, args = build("two branches")
    plan = fxmem.plan(fxmem.analyze(model, args, device="cpu", mode="infer"))
    (move,) = plan.reorders
    assert (move.first, move.last, move.nodes, move.before) == ("widen", "shrink", 2, "narrow")
    assert move.source is not None and move.before_source is not None
    assert move.source.line == move.before_source.line + 1
    # The peak lies at shrink, and narrow's result of 32x64x64 float32 is not there any more.
    assert move.saving_bytes == plan.baseline_peak_bytes - plan.peak_bytes == 32 * 64 * 64 * 4
    assert move.peak_bytes == plan.peak_bytes


@pytest.mark.parametrize(
    "pass_on",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copied", "pickled"],
)
def test_copies_run_in_the_new_order(pass_on: Callable[[nn.Module], nn.Module]) -> None:
    model, args = build("two branches")
    plan = fxmem.plan(fxmem.analyze(model, args, device="cpu", mode="infer"))
    read = fxmem.Plan.from_json(plan.to_json())
    passed = pass_on(fxmem.apply(model, read, args))
    assert measure_call(passed, passed, args, train=False) == pytest.approx(
        plan.peak_bytes, rel=TOLERANCE
    )
    assert are_equal(take_step(model, args, train=False), take_step(passed, args, train=False))


def test_other_sizes_run_in_the_new_order() -> None:
    model, args = build("two branches")
    plan = fxmem.plan(fxmem.analyze(model, args, device="cpu", mode="infer"))
    applied = fxmem.apply(model, plan)
    others = (torch.randn(3, 3, 48, 32),)
    plain = measure_call(model, model, others, train=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that the plan is not for them
        assert are_equal(
            take_step(model, others, train=False), take_step(applied, others, train=False)
        )
    saved = plain - measure_call(applied, applied, others, train=False)
    assert saved == pytest.approx(3 * 32 * 48 * 32 * 4, rel=TOLERANCE)
