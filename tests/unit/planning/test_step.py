"""Segments and limits as a plan reports them, and the fingerprint of the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from running import Running
from torch import Tensor, nn

import fxmem
from fxmem.planning.model.index import StepIndex, build_index
from fxmem.planning.model.recomputation import SegmentRange
from fxmem.planning.plan import fingerprint_graph
from fxmem.planning.prepared_step import describe_segments, prepare_step


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout())

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class Net(nn.Module):
    """Two blocks; the last layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(self.last(x))


@pytest.fixture(scope="module")
def step() -> StepIndex:
    graph = fxmem.analyze(Net(), ("4x8",), device="cpu").graph
    blocks = [f"blocks.{i}.{n}" for i in (0, 1) for n in "norm inner.0 inner.1 tanh add".split()]
    last = ["last.0", "last.1", "last.0_1", "last.1_1"]
    assert [node.name for node in graph.nodes[:-1]] == ["x", *blocks, *last]
    return build_index(graph)


@pytest.mark.parametrize(
    "start, stop, fqn",
    [
        (1, 6, "blocks.0"),
        (1, 2, "blocks.0.norm"),
        (2, 4, "blocks.0.inner"),
        (1, 5, ""),  # all but the sum
        (1, 11, ""),  # all that a container holds, which is not called
        (0, 6, ""),  # the input besides
        (4, 5, ""),  # a function
        (11, 13, ""),  # one of two calls
        (11, 15, ""),  # both calls
    ],
)
def test_a_segment_is_a_module_where_it_is_all_that_the_module_runs(
    step: StepIndex, start: int, stop: int, fqn: str
) -> None:
    assert [s.fqn for s in describe_segments(step, [SegmentRange(start, stop)])] == [fqn]


def test_segments_tell_of_what_needs_care(step: StepIndex) -> None:
    ranges = (SegmentRange(1, 6, (SegmentRange(1, 3), SegmentRange(3, 5))), SegmentRange(11, 13))
    first, second = describe_segments(step, ranges)
    assert (first.first, first.last, first.nodes) == ("blocks.0.norm", "blocks.0.add", 5)
    assert first.fqn == "blocks.0"
    assert first.random
    assert first.norms == ("blocks.0.norm",)
    assert [child.norms for child in first.children] == [("blocks.0.norm",), ()]
    assert [child.random for child in first.children] == [False, True]
    # A linear layer saves its input, and runs no more; tanh saves its result.
    assert [child.runs_whole for child in first.children] == [False, True]
    assert first.source is not None
    assert first.source.function == "forward"
    assert (second.random, second.norms, second.children) == (False, (), ())


@pytest.mark.parametrize(
    ("run", "random"),
    [
        (lambda m, x: m.drop(m.layer(x)), True),  # whose share may be set later
        (lambda m, x: m.layer(x) + torch.rand(()), True),
        (lambda m, x: m.layer(x), False),
    ],
)
def test_segments_that_may_draw(run: Any, random: bool) -> None:
    index = build_index(fxmem.analyze(Running(run), ("4x8",), device="cpu").graph)
    (segment,) = describe_segments(index, [SegmentRange(1, index.nodes)])
    assert segment.random is random


def test_a_fingerprint_is_of_the_graph_and_its_shapes() -> None:
    def digest(model: nn.Module, spec: str = "4x8", **options: Any) -> str:
        return fingerprint_graph(fxmem.analyze(model, spec, **options).graph)

    known = digest(Net())
    for options in ({"device": "cpu"}, {"optimizer": "adam"}, {"dtype": "bf16"}):
        assert known == digest(Net(), **options)  # autocast would change dtypes too
    longer = Net()
    longer.blocks.append(Block())
    assert known not in (digest(Net(), "5x8"), digest(longer))


def change(model: Running, x: Tensor) -> Tensor:
    """Changes its input in place, and a value that it has used."""
    y = model.layer(x * 2)
    z = y.exp() + y.mul_(2)
    return z + x.add_(1)


def test_limits_are_reported_by_name_each_node_once() -> None:
    reported = prepare_step(fxmem.analyze(Running(change), ("4x8",), device="cpu")).base.limits
    assert [(limit.node, limit.kind.name) for limit in reported] == [
        *(("mul", "RECOMPUTE"), ("exp", "BEGIN"), ("mul_", "BEGIN"), ("add_", "RECOMPUTE"))
    ]
    assert all(limit.source and limit.source.function == "change" for limit in reported)
