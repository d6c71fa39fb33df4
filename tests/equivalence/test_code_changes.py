"""Changes in the code of real models: the peak falls as promised, and the numbers stay.

Each change is made twice: in the model's own code, which holds its values as it did, and in the
graph that :func:`fxmem.apply` runs, which lets go of each after its last use. Both are measured
by the events of the CPU's allocator.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from edited_runs import can_be_written, measure_call, run_in_place, write_deletion
from steps import are_equal, take_step
from torch import nn

import benchmarks.libraries  # noqa: F401  (it says how libraries of models are imported)
import fxmem
from benchmarks.cases import import_torchvision
from benchmarks.planner_cases import GPT2
from examples.unet import UNet
from fxmem.analysis import Analysis
from fxmem.planning.dels.deletion import find_deletions
from fxmem.planning.inplace.overwriting import find_inplace
from fxmem.planning.model.index import build_index
from fxmem.planning.outcome import measure_plan
from fxmem.planning.plan import InplaceChange, Plan

pytestmark = pytest.mark.usefixtures("one_thread")

BIGGEST, DRAWN = 5, 3
TOLERANCE = 0.01


@dataclass(frozen=True)
class Real:
    """A model of a library, and what it takes."""

    build: Callable[[], nn.Module]
    make_inputs: Callable[[], tuple[Any, ...]]
    mode: str

    @property
    def train(self) -> bool:
        return self.mode == "train"

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def inputs(self) -> tuple[Any, ...]:
        torch.manual_seed(1)
        return self.make_inputs()

    def analyse(self, model: nn.Module) -> Analysis:
        result: Analysis = fxmem.analyze(model, self.inputs(), device="cpu", mode=self.mode)
        return result


def vision(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return getattr(import_torchvision().models, name)()  # type: ignore[no-any-return]

    return build


def build_unet() -> nn.Module:
    return UNet(depth=3, width=16)


def build_plain_resnet() -> nn.Module:
    """With activations that are not in place."""
    model = vision("resnet18")()
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return model


def build_gpt2() -> nn.Module:
    """GPT-2 small, of two layers."""
    import_torchvision()  # transformers looks for it
    import transformers

    config = transformers.GPT2Config(**{**GPT2, "n_layer": 2, "vocab_size": 1000})
    config.use_cache = False
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def image(batch: int, side: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(batch, 3, side, side),)


def tokens(batch: int, length: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randint(0, 1000, (batch, length)),)


MODELS = {
    "unet": Real(build_unet, image(2, 128), "infer"),
    "unet, trained": Real(build_unet, image(2, 128), "train"),
    "plain resnet, trained": Real(build_plain_resnet, image(4, 128), "train"),
    "gpt2": Real(build_gpt2, tokens(2, 64), "infer"),
    "gpt2, trained": Real(build_gpt2, tokens(2, 64), "train"),
    "resnet50": Real(vision("resnet50"), image(2, 96), "infer"),
    "densenet121": Real(vision("densenet121"), image(1, 96), "infer"),
    "convnext_tiny": Real(vision("convnext_tiny"), image(1, 96), "infer"),
    "swin_t": Real(vision("swin_t"), image(1, 224), "infer"),
}
QUICK = ("unet", "gpt2")
each_model = pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)


def choose(found: tuple[Any, ...]) -> tuple[Any, ...]:
    """Those that save most, and some others."""
    rest = found[BIGGEST:]
    drawn = random.Random(0).sample(rest, min(DRAWN, len(rest)))
    return (*found[:BIGGEST], *drawn)


def make_plan(analysis: Analysis, *changes: InplaceChange) -> Plan:
    """Nothing but these changes."""
    fx_graph = analysis.fx_graph if analysis.frontend == "fx" else None
    bare = Plan("", analysis.peak_bytes, 0, mode=analysis.setup.mode, fx_graph=fx_graph)
    return replace(bare, inplace=changes)


@each_model
def test_each_change_in_the_code_saves_what_is_said(name: str) -> None:
    real = MODELS[name]
    model, args = real.model(), real.inputs()
    analysis = real.analyse(model)
    facts = build_index(analysis.graph)
    before = measure_call(model, model, args, train=real.train)
    assert before == pytest.approx(analysis.peak_bytes, rel=TOLERANCE)
    plain = take_step(real.model(), args, train=real.train)

    def check(run: Callable[..., Any], saving_bytes: int, what: object) -> None:
        after = measure_call(model, run, real.inputs(), train=real.train)
        assert before - after == pytest.approx(saving_bytes, abs=TOLERANCE * before), what

    for change in choose(find_inplace(facts)):
        check(run_in_place(model, change), change.saving_bytes, change)
        changed = real.model()
        wrapped = _Wrapped(changed, run_in_place(changed, change))
        assert are_equal(plain, take_step(wrapped, args, train=real.train)), change
    for point in choose(find_deletions(facts)):
        if can_be_written(analysis.nodes, point):
            with write_deletion(analysis.nodes, point):
                check(model, point.saving_bytes, point)
                assert are_equal(plain, take_step(real.model(), args, train=real.train)), point


class _Wrapped(nn.Module):
    """A model that is called another way."""

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.run = run

    def forward(self, *args: Any) -> Any:
        return self.run(*args)


@each_model
def test_each_change_in_the_graph_takes_what_is_said(name: str) -> None:
    real = MODELS[name]
    if real.train:
        pytest.skip("only plans of inference run in place")
    model, args = real.model(), real.inputs()
    analysis = real.analyse(model)
    if analysis.frontend != "fx":
        pytest.skip("no graph expresses it")
    found = find_inplace(build_index(analysis.graph))
    plain = take_step(real.model(), args, train=real.train)
    plans = [make_plan(analysis), *(make_plan(analysis, change) for change in choose(found))]
    for plan in (*plans, make_plan(analysis, *found)):
        peak_bytes, _ = measure_plan(analysis, plan)
        applied = fxmem.apply(model, plan)
        measured = measure_call(applied, applied, args, train=real.train)
        assert measured == pytest.approx(peak_bytes, rel=TOLERANCE), plan.inplace
        assert measured <= analysis.peak_bytes * (1 + TOLERANCE)
        fresh = fxmem.apply(real.model(), plan)
        assert are_equal(plain, take_step(fresh, args, train=real.train)), plan.inplace


@pytest.mark.parametrize(
    "name",
    [
        "unet",
        pytest.param("plain resnet, trained", marks=pytest.mark.slow),
        pytest.param("unet, trained", marks=pytest.mark.slow),
        pytest.param("swin_t", marks=pytest.mark.slow),
    ],
)
def test_whole_plans_take_what_is_said(name: str) -> None:
    real = MODELS[name]
    model, args = real.model(), real.inputs()
    analysis = real.analyse(model)
    limit = {"max_overhead": 0.2, "time_limit_s": 2.0} if real.train else {}
    plan = fxmem.plan(analysis, **limit)
    assert plan.mode == real.mode
    assert plan.segments if real.train else plan.inplace
    assert plan.peak_bytes == measure_plan(analysis, plan)[0] < analysis.peak_bytes
    plain = take_step(real.model(), args, train=real.train)
    applied = fxmem.apply(model, plan)
    measured = measure_call(applied, applied, args, train=real.train)
    assert measured == pytest.approx(plan.peak_bytes, rel=TOLERANCE)
    fresh = fxmem.apply(real.model(), plan)
    assert are_equal(plain, take_step(fresh, args, train=real.train))
