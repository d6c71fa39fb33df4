"""Steps with ranges, against the planned module's own step: what single rules are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from running import Running
from torch import Tensor
from torch.nn import functional as F

import fxmem
from fxmem.applying.applying import build_module
from fxmem.memory.timeline import build_timeline
from fxmem.planning.model.index import build_index
from fxmem.planning.model.segments import SegmentRange
from fxmem.planning.model.simulate import simulate_segments
from fxmem.planning.step import describe_segments


def return_early(model: Running, x: Tensor) -> list[Tensor]:
    """A segment holds to the end of its run the tensors that it returns to the caller."""
    early = x * 2
    y = torch.relu(early)
    return [model.norm(x).exp().sin(), early, y]


def nest_dropout(model: Running, x: Tensor) -> Tensor:
    """A run makes the checkpoints within it again, with states of the generator of their own."""
    y = torch.tanh(model.layer(x))
    y = torch.tanh(F.dropout(torch.exp(y)))
    y = F.dropout(torch.exp(y))
    return torch.sigmoid(torch.sin(y)).sum()


def sort_rows(model: Running, x: Tensor) -> Tensor:
    """Indices that a sort saves for values that nobody uses are not held by that."""
    y = torch.tanh(model.layer(x.repeat(16, 1))).double().tanh().float()
    return y.gather(-1, y.argsort(-1))


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


NESTED = SegmentRange(2, 8, (SegmentRange(3, 5), SegmentRange(5, 7)))
BF16 = {"autocast": "bf16"}
BOTH = (SegmentRange(1, 3), SegmentRange(3, 9))


@pytest.mark.parametrize(
    "run, ranges, options",
    [
        (return_early, (SegmentRange(1, 5),), {}),
        (sort_rows, (SegmentRange(4, 9),), {}),
        (nest_dropout, (SegmentRange(1, 9, (SegmentRange(2, 6), SegmentRange(6, 8))),), {}),
        (nest_dropout, (SegmentRange(1, 9, (NESTED,)),), {}),
        (use_twice, (), BF16),
        (use_twice, BOTH, BF16),
        (use_twice, (SegmentRange(1, 9, (SegmentRange(1, 5), SegmentRange(5, 7))),), BF16),
        (use_twice, (SegmentRange(1, 8, (SegmentRange(3, 8, (SegmentRange(5, 7),)),)),), BF16),
        (end_high, BOTH, BF16),
        (freeze, BOTH, BF16),
        (cast_by_hand, (), BF16),
        (cast_by_hand, (SegmentRange(1, 6),), BF16),
    ],
)
def test_the_planned_step_takes_what_was_computed(
    run: Callable[[Running, Tensor], object], ranges: tuple[SegmentRange, ...], options: Any
) -> None:
    model = Running(run, 64)
    model.layer.requires_grad_(run is not freeze)
    inputs = (torch.zeros(8, 64, requires_grad=True),)
    analysis = fxmem.analyze(model, inputs, device="cpu", **options)
    step = build_index(analysis.graph)
    segments = describe_segments(step, ranges, [0.0] * len(analysis.graph.operations))
    planned = build_module(model, analysis.fx_graph, segments)
    recorded = fxmem.analyze(planned, inputs, device="cpu", **options)
    live_bytes = build_timeline(recorded.graph).profile()
    assert simulate_segments(step, ranges).peak_bytes == max(live_bytes)
