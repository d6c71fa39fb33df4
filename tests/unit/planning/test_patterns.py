"""Plans that run copies of a stage alike: which there are, on stages made by hand."""

from __future__ import annotations

from fxmem.planning.model.segments import SegmentRange
from fxmem.planning.strategies.chain import Chain, Stage, StageOption
from fxmem.planning.strategies.patterns import propose_patterns
from fxmem.planning.strategies.stages import StagedStep, StageRange

KEPT, SOME, WHOLE = "", "a", "ab"
"""Ways to run a block of two nodes: nothing again, the first node, both."""


def stage_blocks(count: int) -> StagedStep:
    """A stage of one node, then blocks of two, of which the first can be computed again."""
    cheap, dear = StageOption(8), StageOption(4, cost=1.0)
    ranges = [StageRange(0, 1, ((),))]
    ranges += [
        StageRange(at, at + 2, ((), (SegmentRange(at, at + 1),))) for at in range(1, 2 * count, 2)
    ]
    stages = [Stage(0, 0, 1.0, (cheap,)), *[Stage(4, 4, 3.0, (cheap, dear))] * count]
    return StagedStep(tuple(ranges), Chain(tuple(stages)), 0)


def read_ways(regions: tuple[SegmentRange, ...], count: int) -> list[str]:
    """How a plan runs each block."""
    ways = dict.fromkeys(range(1, 2 * count, 2), KEPT)
    for region in regions:
        ways[region.start] = WHOLE if region.stop - region.start == 2 else SOME
    return [*ways.values()]


def test_copies_are_divided_among_two_ways() -> None:
    staged = stage_blocks(16)
    divided = [
        read_ways(regions, 16)
        for regions in propose_patterns(staged)
        if all(region.stop - region.start <= 2 and region.start for region in regions)
    ]
    assert [KEPT] * 16 in divided
    assert [SOME] * 16 in divided
    for later, earlier in ((KEPT, SOME), (KEPT, WHOLE), (SOME, WHOLE)):
        for copies in range(2, 16, 2):
            assert [earlier] * copies + [later] * (16 - copies) in divided
    assert len(divided) == 2 + 3 * 7


def test_the_stage_that_is_repeated_most_is_divided() -> None:
    """Where nothing is repeated often, stages run alike or in groups and that is all."""
    few = [*propose_patterns(stage_blocks(7))]
    assert len([*propose_patterns(stage_blocks(8))]) == len(few) + 3 * 7


def test_groups_of_stages_are_computed_again_together() -> None:
    found = [*propose_patterns(stage_blocks(4))]
    assert tuple(SegmentRange(0 if at < 0 else at, at + 2) for at in range(-1, 9, 2)) in found
    assert (SegmentRange(0, 3), SegmentRange(3, 7), SegmentRange(7, 9)) in found
    nested = SegmentRange(3, 7, (SegmentRange(3, 5), SegmentRange(5, 7)))
    assert (
        SegmentRange(0, 3, (SegmentRange(0, 1), SegmentRange(1, 3))),
        nested,
        SegmentRange(7, 9),
    ) in found
    assert (SegmentRange(0, 9),) in found
