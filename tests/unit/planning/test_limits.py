"""Nodes that may not be recomputed, or begin a segment: each rule, and its exceptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from running import Running
from torch import Tensor
from torch.nn import functional as F

import fxmem
from fxmem.planning.model.index import StepIndex, build_index
from fxmem.planning.model.limits import Limits, find_limits
from fxmem.planning.model.recomputation import SegmentRange


def find(run: Callable[[Running, Tensor], object], **options: object) -> tuple[StepIndex, Limits]:
    options = {"device": "cpu", **options}
    graph = fxmem.analyze(Running(run), ("4x8",), **options).graph  # type: ignore[arg-type]
    step = build_index(graph)
    return step, find_limits(step)


def name(step: StepIndex, reasons: Mapping[int, str]) -> dict[str, str]:
    return {step.graph.nodes[index].name: why for index, why in reasons.items()}


def draw(model: Running, x: Tensor) -> Tensor:
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
    return model.layer(x) * noise


def change_input(model: Running, x: Tensor) -> Tensor:
    y = model.layer(x * 2)
    x.add_(1)
    return y * x


def change_parameter(model: Running, x: Tensor) -> Tensor:
    y = model.layer(x)
    with torch.no_grad():
        model.layer.bias.mul_(0.5)
    return torch.tanh(y)


def change_buffer(model: Running, x: Tensor) -> Tensor:
    y = torch.exp(model.layer(x) + model.steps)
    model.steps.add_(1)
    return torch.sigmoid(y)


def follow_slope(model: Running, x: Tensor) -> Tensor:
    """A checkpoint would recompute in forward what ``torch.autograd.grad`` takes out there."""
    z = model.layer(x).detach().requires_grad_()
    energy = model.layer(z).square().sum()
    (slope,) = torch.autograd.grad(energy, z, create_graph=True)
    return torch.tanh(x - slope)


_LATE_FILL = "writes to a tensor after saving it; an early-stopped recomputation would miss it"
_EARLY = "forward runs its backward, which would compute it again before it is over"


@pytest.mark.parametrize(
    "run, reasons",
    [
        (draw, {"rand": "draws from a generator of its own, whose state is not restored"}),
        (
            change_input,
            {"mul": "reads x, which add_ changes in place", "add_": "changes x in place"},
        ),
        (
            change_parameter,
            {
                "layer": "reads layer.bias, which mul_ changes in place",
                "mul_": "changes layer.bias in place",
            },
        ),
        (change_buffer, {"add": "reads steps, which add_ changes in place"}),
        (
            lambda model, x: model.layer(x)[x.sum(1) > 0],
            {"getitem": "its sizes or values depend on the data"},
        ),
        (lambda model, x: model.norm(model.norm(model.layer(x))), {}),
        (
            lambda model, x: model.norm(model.layer(x) - model.norm.running_mean),
            {"sub": "reads norm.running_mean, which norm changes in place"},
        ),
        (lambda model, x: F.dropout(model.layer(x)), {}),
        (lambda m, x: F.rrelu(m.norm(m.layer(x)), training=True), {"rrelu": _LATE_FILL}),
        (lambda model, x: model.recurrent(x)[0], {}),  # which works in place
        (follow_slope, {"layer_1": _EARLY, "square": _EARLY, "sum": _EARLY}),
    ],
    ids="generator input parameter buffer data norm statistics dropout noise GRU slope".split(),
)
def test_what_is_never_computed_again(
    run: Callable[[Running, Tensor], object], reasons: dict[str, str]
) -> None:
    step, limits = find(run, size_hint=3)
    assert name(step, limits.fixed) == reasons


def test_no_segment_takes_what_is_changed_in_place_later() -> None:
    def run(model: Running, x: Tensor) -> Tensor:
        y = model.layer(x)
        z = torch.tanh(y)
        w = torch.sin(x)
        return y.view(-1).mul_(2).view(4, 8) * z * w

    step, limits = find(run)
    assert name(step, limits.fixed) == {}
    # From after the layer up to the change itself, whatever they read of it.
    assert name(step, limits.starts) == dict.fromkeys(
        ("tanh", "sin", "view", "mul_"), "mul_ changes its input in place"
    )


def test_no_segment_takes_what_the_loss_changes() -> None:
    def run(model: Running, x: Tensor) -> object:
        y = model.layer(x)
        return {"y": y, "z": torch.exp(y * 2)}

    step, limits = find(run, loss=lambda out: out["y"].sub_(1).sum() + out["z"].sum())
    assert name(step, limits.starts) == dict.fromkeys(
        ("mul", "exp"), "loss.sub_ changes its input in place"
    )


@pytest.mark.parametrize(
    "segment, allowed",
    [
        (SegmentRange(1, 3), True),
        (SegmentRange(2, 4), False),
        (SegmentRange(3, 5), False),
        (SegmentRange(2, 2), False),
        (SegmentRange(0, 3, (SegmentRange(0, 2), SegmentRange(2, 3))), True),
        (SegmentRange(1, 3, (SegmentRange(1, 1),)), False),
        (SegmentRange(4, 8), True),
        (SegmentRange(4, 8, (SegmentRange(6, 8),)), False),
    ],
    ids=["free", "fixed", "start", "empty", "nested", "nested empty", "around", "nested start"],
)
def test_a_segment_is_allowed_where_nothing_in_it_is_fixed(
    segment: SegmentRange, allowed: bool
) -> None:
    limits = Limits(fixed={3: "for some reason"}, starts={3: "for another", 6: "changed"})
    assert limits.allows(segment) is allowed
