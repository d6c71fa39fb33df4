"""Plans that run all copies of a stage alike, or some of them one way and the rest another.

Where a block is repeated, as in a transformer, little is won by telling its copies apart: what
matters is how many of them run which way. So these plans are tried for steps of any depth, also
where a chain of so many stages would take too long to solve.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.planning.model.segments import SegmentRange, shift_segments
from fxmem.planning.strategies.stages import StagedStep

_GROUPS = (1, 2, 3, 4, 6)
"""Stages under one checkpoint, everywhere the same; for two or more, each under its own too."""
_PARTS = 8
"""Into how many parts the copies of a stage are divided: so many run one way, the rest another."""

Option = tuple[SegmentRange, ...]


def propose_patterns(staged: StagedStep) -> Iterator[Option]:
    """The same way to run every stage, groups of stages, and parts of the copies of a stage.

    Args:
        staged: A step cut into stages.

    Returns:
        Segments, some of which may not be allowed.
    """
    ranges = staged.ranges
    for level in range(max(len(stage.options) for stage in ranges)):
        yield tuple(r for s in ranges for r in s.options[min(level, len(s.options) - 1)])
    whole = [SegmentRange(stage.start, stage.stop) for stage in ranges]
    for size in _GROUPS:
        groups = [whole[at : at + size] for at in range(0, len(whole), size)]
        yield tuple(SegmentRange(group[0].start, group[-1].stop) for group in groups)
        if size > 1:
            yield tuple(
                SegmentRange(group[0].start, group[-1].stop, tuple(group) if len(group) > 1 else ())
                for group in groups
            )
    yield from _divide_copies(staged)


def _divide_copies(staged: StagedStep) -> Iterator[Option]:
    """For the stage that is repeated most: the first of its copies one way, the rest another."""
    classes: dict[tuple[int, tuple[Option, ...]], list[int]] = {}
    for index, stage in enumerate(staged.ranges):
        ways = tuple(shift_segments(option, -stage.start) for option in stage.options)
        classes.setdefault((stage.stop - stage.start, ways), []).append(index)
    (size, options), copies = max(classes.items(), key=lambda item: len(item[1]) * item[0][0])
    if len(copies) < _PARTS:
        return
    measured = staged.chain.stages[copies[0]].options
    order = sorted(range(len(options)), key=lambda at: measured[at].cost)
    choices = [*dict.fromkeys([*(options[at] for at in order), (SegmentRange(0, size),)])]
    starts = [staged.ranges[index].start for index in copies]
    for at, later in enumerate(choices):
        for earlier in choices[at + 1 :]:
            for part in range(1, _PARTS):
                turn = len(starts) * part // _PARTS
                yield tuple(
                    segment
                    for position, start in enumerate(starts)
                    for segment in shift_segments(earlier if position < turn else later, start)
                )
