"""Steps cut into stages: where they may begin, what crosses, how each may run."""

from __future__ import annotations

import pytest
from planned_models import PLANNED
from torch import Tensor, nn

import fxmem
from fxmem.planning.model.index import StepIndex, build_index
from fxmem.planning.model.limits import find_limits
from fxmem.planning.model.recomputation import SegmentRange, iterate_segments
from fxmem.planning.strategies.chain import Kept, Recomputed
from fxmem.planning.strategies.stages import (
    cut_step,
    find_blocks,
    find_boundaries,
    list_options,
    measure_frontiers,
)

KIB = 1024


class Skip(nn.Module):
    """Sizes in KiB on 64 rows: a 16, b 64, c 16, d 16; a is added to c."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 256), nn.Linear(256, 64)])

    def forward(self, x: Tensor) -> Tensor:
        a = self.blocks[0](x)
        c = self.blocks[2](self.blocks[1](a))
        return (a + c).tanh()


@pytest.fixture(scope="module")
def facts() -> StepIndex:
    graph = fxmem.analyze(Skip(), ("64x64",), device="cpu").graph
    assert [n.name for n in graph.nodes][:-1] == [
        *("x", "blocks.0", "blocks.1", "blocks.2", "add", "tanh")
    ]
    return build_index(graph)


def test_what_crosses_a_position_is_made_before_it_and_used_after(facts: StepIndex) -> None:
    # Before x, the layers, the sum, tanh, the end; the result of all is held anyway.
    assert measure_frontiers(facts) == [size * KIB for size in (0, 0, 16, 16 + 64, 16 + 16, 16, 0)]


def test_stages_begin_where_least_crosses(facts: StepIndex) -> None:
    limits = find_limits(facts)
    # 16 before blocks.1 and tanh; 80 and 32 cross the others, and not the least near them.
    assert find_boundaries(facts, limits, 48) == [1, 2, 5]
    assert find_boundaries(facts, limits, most=1) == [1]


def test_blocks_are_modules_that_are_counted(facts: StepIndex) -> None:
    assert find_blocks(facts, find_limits(facts), 1) == [1, 2, 3, 4]


@pytest.mark.parametrize("name", PLANNED)
def test_stages_begin_and_run_where_segments_may(name: str) -> None:
    make, spec = PLANNED[name]
    step = build_index(fxmem.analyze(make(), (spec,), device="cpu").graph)
    limits, costs = find_limits(step), [1.0] * len(step.graph.operations)
    placeholders = sum(node.op == "placeholder" for node in step.graph.nodes)
    cuts = [find_boundaries(step, limits, most) for most in (3, 8, 48)]
    assert [len(cut) <= most for cut, most in zip(cuts, (3, 8, 48), strict=True)] == [True] * 3
    for cut in (*cuts, *(find_blocks(step, limits, level) for level in (1, 2))):
        assert cut == sorted(set(cut))
        assert cut[0] == placeholders
        assert not set(cut) & limits.starts.keys()
        assert cut[-1] < step.nodes
    staged = cut_step(step, limits, costs, cuts[1])
    assert staged.bounds == tuple(zip(cuts[1], [*cuts[1][1:], step.nodes], strict=True))
    stages = zip(staged.bounds, staged.options, staged.chain.stages, strict=True)
    for (start, stop), options, stage in stages:
        assert options[0] == () and stage.options[0].cost == 0  # the first way keeps all
        assert len(options) == len(stage.options)
        assert set(options) <= {*list_options(step, limits, costs, start, stop)}
        for segment in iterate_segments(s for option in options for s in option):
            assert start <= segment.start < segment.stop <= stop
            assert limits.allows(segment)


def test_a_schedule_is_regions_around_what_it_checkpoints(facts: StepIndex) -> None:
    limits = find_limits(facts)
    costs = [1.0] * len(facts.graph.operations)
    staged = cut_step(facts, limits, costs, [1, 2, 4])
    keep = (Kept(0, 0), Kept(1, 0), Kept(2, 0))
    assert staged.list_segments(keep) == ()
    both = (Recomputed(0, 2, (Kept(0, 0), Kept(1, 0))), Kept(2, 0))
    assert staged.list_segments(both) == (SegmentRange(1, 4),)
    nested = (
        Recomputed(0, 2, (Recomputed(0, 1, (Kept(0, 0),)), Kept(1, 0))),
        Recomputed(2, 3, (Kept(2, 0),)),
    )
    assert staged.list_segments(nested) == (
        SegmentRange(1, 4, (SegmentRange(1, 2),)),
        SegmentRange(4, 6),
    )
