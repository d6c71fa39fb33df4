"""Ways to run a stage: those of a repeated block are found once, and placed at each copy."""

from __future__ import annotations

import pytest
from planned_models import PLANNED
from torch import Tensor, nn

import fxmem
from fxmem.planning.model.index import StepIndex, build_index
from fxmem.planning.model.limits import Limits, find_limits
from fxmem.planning.model.segments import SegmentRange
from fxmem.planning.strategies.chains import option_fronts as sweeps
from fxmem.planning.strategies.chains.option_fronts import (
    StageShape,
    describe_shape,
    list_shape_options,
    list_stage_options,
)
from fxmem.planning.strategies.chains.stages import find_blocks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).sigmoid().sin()


class Tower(nn.Module):
    """A layer and seven blocks, of which the last four work on twice the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = block(x.repeat(2, 1) if index == 3 else x)
        return x


def cut(model: nn.Module, spec: str) -> tuple[StepIndex, Limits, list[tuple[int, int]]]:
    facts = build_index(fxmem.analyze(model, (spec,), device="cpu").graph)
    limits = find_limits(facts)
    starts = find_blocks(facts, limits, 1)
    return facts, limits, [*zip(starts, [*starts[1:], facts.nodes], strict=True)]


def count_sweeps(monkeypatch: pytest.MonkeyPatch) -> list[StageShape]:
    swept: list[StageShape] = []

    def sweep(shape: StageShape) -> tuple[tuple[SegmentRange, ...], ...]:
        swept.append(shape)
        return list_shape_options(shape)

    monkeypatch.setattr(sweeps, "list_shape_options", sweep)
    return swept


def test_blocks_of_one_shape_are_swept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    facts, limits, bounds = cut(Tower(), "8x16")
    swept = count_sweeps(monkeypatch)
    costs = [1.0] * len(facts.graph.operations)
    ways = list_stage_options(facts, limits, costs, bounds)
    names = [facts.graph.nodes[start].name for start, _ in bounds]
    blocks = [f"blocks.{index}.layer" for index in range(7)]
    assert names == ["stem", *blocks[:3], "repeat", *blocks[3:]]
    # Of the stem, two blocks, a third whose output nothing saves, the repetition, three blocks,
    # and the last, whose output is the model's. A block is four nodes: layer, sigmoid, sin, add.
    assert len(swept) == 6
    assert len(ways[1]) > 1
    assert ways[2] == tuple(
        tuple(SegmentRange(r.start + 4, r.stop + 4) for r in way) for way in ways[1]
    )


@pytest.mark.parametrize("name", PLANNED)
def test_sharing_changes_nothing(name: str) -> None:
    make, spec = PLANNED[name]
    facts, limits, bounds = cut(make(), spec)
    costs = [float(operation.index % 5) for operation in facts.graph.operations]
    shared = list_stage_options(facts, limits, costs, bounds)
    assert shared == [list_stage_options(facts, limits, costs, [bound])[0] for bound in bounds]


def test_a_block_that_costs_more_or_may_less_is_another() -> None:
    facts, limits, bounds = cut(Tower(), "8x16")
    costs = [1.0] * len(facts.graph.operations)
    block = describe_shape(facts, limits, costs, *bounds[1])
    assert describe_shape(facts, limits, costs, *bounds[2]) == block
    for barred in (Limits({bounds[2][0] + 1: "why"}, {}), Limits({}, {bounds[2][0] + 1: "why"})):
        assert describe_shape(facts, barred, costs, *bounds[2]) != block
    costs[facts.first_operation[bounds[2][0]]] = 2.0
    assert describe_shape(facts, limits, costs, *bounds[2]) != block
