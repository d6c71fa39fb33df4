"""Steps with ranges under autocast, against the planned module's own step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from leanest import build_module
from running import Running
from torch import Tensor

import fxmem
from fxmem.memory.timeline import build_timeline
from fxmem.planning.model.index import build_index
from fxmem.planning.model.recomputation import SegmentRange
from fxmem.planning.model.simulate import simulate_segments
from fxmem.planning.prepared_step import describe_segments


def use_twice(model: Running, x: Tensor) -> Tensor:
    """A run finds none of the casts that forward's autocast keeps, and keeps its own to its end."""
    y = model.layer(x).tanh()
    y = (model.layer(y).tanh() + model.layer(y).exp()).sin()
    return torch.exp(y * 2)


def end_high(model: Running, x: Tensor) -> Tensor:
    """The casts that autocast keeps count to its end."""
    y = use_twice(model, x)
    return y.sum() + y.detach().repeat(64, 1).sum()


def freeze(model: Running, x: Tensor) -> Tensor:
    """Autocast keeps no cast of what takes no gradient."""
    return end_high(model, x)


def cast_by_hand(model: Running, x: Tensor) -> Tensor:
    """Autocast keeps no cast but its own."""
    y = x.bfloat16() @ model.layer.weight.bfloat16()
    y = torch.tanh(y).exp()
    return y.sum() + y.detach().repeat(64, 1).sum()


BOTH = (SegmentRange(1, 3), SegmentRange(3, 9))


@pytest.mark.parametrize(
    "run, ranges",
    [
        (use_twice, ()),
        (use_twice, BOTH),
        (use_twice, (SegmentRange(1, 9, (SegmentRange(1, 5), SegmentRange(5, 7))),)),
        (use_twice, (SegmentRange(1, 8, (SegmentRange(3, 8, (SegmentRange(5, 7),)),)),)),
        (end_high, BOTH),
        (freeze, BOTH),
        (cast_by_hand, ()),
        (cast_by_hand, (SegmentRange(1, 6),)),
    ],
)
def test_the_planned_step_takes_what_was_computed(
    run: Callable[[Running, Tensor], object], ranges: tuple[SegmentRange, ...]
) -> None:
    model = Running(run, 64)
    model.layer.requires_grad_(run is not freeze)
    inputs = (torch.zeros(8, 64, requires_grad=True),)
    analysis = fxmem.analyze(model, inputs, device="cpu", autocast="bf16")
    step = build_index(analysis.graph)
    segments = describe_segments(step, ranges)
    planned = build_module(model, analysis.fx_graph, segments)
    recorded = fxmem.analyze(planned, inputs, device="cpu", autocast="bf16")
    live_bytes = build_timeline(recorded.graph).profile()
    assert max(simulate_segments(step, ranges).live_bytes) == max(live_bytes)
