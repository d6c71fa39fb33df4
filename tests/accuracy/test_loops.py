"""Loops of other shapes than the canonical one, against the CPU allocator's own events.

The first step, which makes the optimizer's state, and the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from measuring.profiled import measure_peaks
from torch import Tensor, nn
from torch.profiler import record_function

import fxmem

STEPS = ("the first step", "the second step")


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 32)
    )


def run_loop(
    micro_batches: int,
    *,
    set_to_none: bool,
    deletes: bool,
    autocast: bool,
    target: bool,
    zeroes_late: bool = False,
    clips: bool = False,
    retains: bool = False,
) -> None:
    """Two steps as a user writes them, each marked."""
    model, x = make_model(), torch.randn(128, 64)
    wanted = torch.randn(128, 32) if target else None
    optimizer = torch.optim.Adam(model.parameters())
    output: Any = None
    loss: Any = None
    for name in STEPS:
        if not zeroes_late:
            optimizer.zero_grad(set_to_none=set_to_none)
        with record_function(name):
            for batch in range(micro_batches):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    output = model(x)
                    loss = compute_loss(output, wanted, autocast)
                if zeroes_late and batch == 0:
                    optimizer.zero_grad(set_to_none=set_to_none)
                loss.backward(retain_graph=retains)
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        if deletes:
            del output, loss


def compute_loss(output: Tensor, wanted: Tensor | None, autocast: bool) -> Tensor:
    if wanted is not None:
        return nn.functional.mse_loss(output, wanted)
    return output.float().sum() if autocast else output.sum()


def sum_output(output: Tensor) -> Tensor:
    return output.sum()


def sum_in_float(output: Tensor) -> Tensor:
    return output.float().sum()


LOOPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "two micro-batches": ({"micro_batches": 2}, {"accumulate": 2}),
    "three micro-batches": ({"micro_batches": 3}, {"accumulate": 3}),
    "zeroed gradients": ({"set_to_none": False}, {"set_to_none": False}),
    "outputs held": ({"deletes": False}, {"hold_outputs": True}),
    "outputs held, two micro-batches": (
        {"deletes": False, "micro_batches": 2},
        {"hold_outputs": True, "accumulate": 2},
    ),
    "zeroed before backward": (
        {"zeroes_late": True},
        {"loop": "plain(zero_grad='before backward')"},
    ),
    "zeroed in place before backward, two micro-batches": (
        {"zeroes_late": True, "set_to_none": False, "micro_batches": 2},
        {"loop": "plain(zero_grad='before backward', accumulate=2)", "set_to_none": False},
    ),
    "clipped": ({"clips": True}, {"loop": "plain(clip_grad=True)"}),
    "graph retained": ({"retains": True}, {"loop": "plain(retain_graph=True)"}),
    "graph retained, two micro-batches": (
        {"retains": True, "micro_batches": 2},
        {"loop": "plain(retain_graph=True)", "accumulate": 2},
    ),
    "autocast, a named loss": (
        {"autocast": True, "target": True},
        {"autocast": "bf16", "loss": "mse"},
    ),
    "autocast": ({"autocast": True}, {"autocast": "bf16", "loss": sum_in_float}),
}
PLAIN: dict[str, Any] = {
    "micro_batches": 1,
    "set_to_none": True,
    "deletes": True,
    "autocast": False,
    "target": False,
}


@pytest.mark.parametrize("name", LOOPS)
def test_the_peak_is_that_of_the_loop(name: str) -> None:
    loop, settings = LOOPS[name]
    analysis = fxmem.analyze(
        make_model(),
        ("128x64",),
        device="cpu",
        optimizer="adam",
        **{"loss": sum_output, **settings},
    )
    first_step = analysis.first_step
    assert first_step is not None
    measured = measure_peaks(lambda: run_loop(**{**PLAIN, **loop}), STEPS)
    assert [first_step.peak_bytes, analysis.peak_bytes] == measured


def train_with_average(training: Any) -> None:
    """A loop of a user's own, with an average of the weights."""
    model, optimizer = training.model, training.optimizer
    average = [parameter.detach().clone() for parameter in model.parameters()]
    for batch in training.batches():
        optimizer.zero_grad()
        output = model(*batch.args)
        loss = nn.functional.mse_loss(output, torch.zeros_like(output))
        loss.backward()
        optimizer.step()
        torch._foreach_lerp_(average, [*model.parameters()], 0.1)


def run_with_average() -> None:
    model, x = make_model(), torch.randn(128, 64)

    def yield_batches() -> Iterator[Any]:
        for name in STEPS:
            with record_function(name):
                yield SimpleNamespace(args=(x,))

    optimizer = torch.optim.Adam(model.parameters())
    train_with_average(SimpleNamespace(model=model, optimizer=optimizer, batches=yield_batches))


def test_a_loop_of_the_callers_own_is_recorded() -> None:
    analysis = fxmem.analyze(
        make_model(), "128x64", device="cpu", optimizer="adam", loop=train_with_average
    )
    assert analysis.peak_bytes == measure_peaks(run_with_average, STEPS)[1]
    assert str(analysis.setup.loop) == "train_with_average"
    losses = [node.source for node in analysis.nodes if node.name == "loss.mse_loss"]
    assert losses[0] is not None and losses[0].function == "train_with_average"
    assert "_foreach_lerp_" in analysis.graph.operations[-1].name


@pytest.mark.parametrize("style", ["graph", "modules"])
@pytest.mark.parametrize(
    "loop",
    ["huggingface", "lightning", "plain(outputs='next step')", "lightning(set_to_none=False)"],
)
def test_a_plan_is_for_the_loop_of_its_analysis(loop: str, style: str) -> None:
    layers = [nn.Linear(64, 64), nn.Tanh(), nn.GELU()]
    model = nn.Sequential(*[nn.Sequential(*layers) for _ in range(6)])
    options: dict[str, Any] = {"device": "cpu", "optimizer": "adam", "loss": "mse", "loop": loop}
    analysis = fxmem.analyze(model, ("4096x64",), **options)
    plan = fxmem.plan(analysis, max_overhead_flops=0.5, style=style, time_limit_s=1)
    assert plan.peak_bytes < analysis.peak_bytes
    planned = fxmem.apply(model, plan)
    assert fxmem.analyze(planned, ("4096x64",), **options).peak_bytes == plan.peak_bytes
