"""Loops of other shapes than the canonical one, against the CPU allocator's own events.

The first step, which makes the optimizer's state, and the second.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import fxmem

STEPS = ("the first step", "the second step")


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 32)
    )


def run_loop(
    micro_batches: int, *, set_to_none: bool, deletes: bool, autocast: bool, target: bool
) -> None:
    """Two steps as a user writes them, each marked."""
    model, x = make_model(), torch.randn(128, 64)
    wanted = torch.randn(128, 32) if target else None
    optimizer = torch.optim.Adam(model.parameters())
    output: Any = None
    loss: Any = None
    for name in STEPS:
        optimizer.zero_grad(set_to_none=set_to_none)
        with record_function(name):
            for _ in range(micro_batches):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    output = model(x)
                    loss = compute_loss(output, wanted, autocast)
                loss.backward()
            optimizer.step()
        if deletes:
            del output, loss


def compute_loss(output: Tensor, wanted: Tensor | None, autocast: bool) -> Tensor:
    if wanted is not None:
        return nn.functional.mse_loss(output, wanted)
    return output.float().sum() if autocast else output.sum()


def measure(**settings: Any) -> list[int]:
    """The peaks of both steps."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run_loop(**settings)
    events = prof.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted(
        ((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"),
        key=lambda event: event[0],
    )
    return [find_peak(memory, next(e for e in events if e.name() == name)) for name in STEPS]


def find_peak(memory: list[tuple[int, int]], mark: Any) -> int:
    """The most that is live within a mark."""
    start, end = mark.start_ns(), mark.start_ns() + mark.duration_ns()
    peak = live = sum(nbytes for at, nbytes in memory if at < start)
    for at, nbytes in memory:
        if start <= at <= end:
            live += nbytes
            peak = max(peak, live)
    return peak


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
    "autocast, a named loss": (
        {"autocast": True, "target": True},
        {"autocast": "bf16", "loss": "mse"},
    ),
    "autocast": ({"autocast": True}, {"autocast": "bf16", "loss": sum_in_float}),
}
PLAIN = {
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
    assert [first_step.peak_bytes, analysis.peak_bytes] == measure(**{**PLAIN, **loop})
