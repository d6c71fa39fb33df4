"""Sizes that depend on values: hints of how many elements are found, and counts that are read.

A count of truth values, such as that of the tokens that are not padding, is a number by which
losses divide. In an analysis it is the most that it may be, as long as no branch hangs on it or on
what is computed from it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TypeAlias

from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

from fxmem.errors import UsageError
from fxmem.fakes.stand_ins import stand_in
from fxmem.fakes.values import find_partly_known
from fxmem.kernels.registry import ANY
from fxmem.source import find_source, iterate_user_frames
from fxmem.versions.operators import aten

SizeHint: TypeAlias = int | Mapping[str, int] | None
"""A size for all lines; or sizes by ``FILE:LINE``, where ``""`` stands for all others."""


Routing: TypeAlias = str | tuple[float, ...]
"""``"balanced"``, ``"worst"``, or the share of each expert."""

ROUTINGS = "balanced, worst, or a number for each expert, such as 4,2,1,1"


@dataclass(frozen=True, slots=True)
class SizeHints:
    """The sizes that a user gave, and the way in which unknown tokens go to experts."""

    default: int | None = None  # for lines without a size of their own; None to refuse them
    by_line: tuple[tuple[str, int], ...] = ()  # FILE:LINE, the end of a path at least, and a size
    routing: Routing = "balanced"  # the experts that tokens go to

    def find_own(self) -> int | None:
        """Finds the size that was given for the running line."""
        frames = iterate_user_frames(sys._getframe(1)) if self.by_line else ()
        return next(filter(lambda size: size is not None, map(self._match, frames)), None)

    def _match(self, frame: FrameType) -> int | None:
        place = f"/{frame.f_code.co_filename}:{frame.f_lineno}".replace("\\", "/")
        return next((size for end, size in self.by_line if place.endswith(f"/{end}")), None)

    def vary(self) -> Iterator[SizeHints]:
        """Yields other sizes and another routing; a graph that serves any stays the same."""
        has_sizes = self.default is not None or self.by_line
        for times, more in ((0, 0), (2, 0), (2, 1)) if has_sizes else ((0, 0),):
            yield SizeHints(
                None if self.default is None else times * self.default + more,
                tuple((line, times * size + more) for line, size in self.by_line),
                routing="worst",
            )

    def describe(self) -> str:
        """Describes the sizes, for a report; empty where none were given."""
        sizes = [f"{size:,} at {line}" for line, size in self.by_line]
        if self.default is not None:
            sizes.append(f"{self.default:,}{' elsewhere' if sizes else ''}")
        return ", ".join(sizes)


def read_size_hint(hint: SizeHint) -> SizeHints:
    """Reads a size hint as a caller gives it.

    Raises:
        UsageError: It is not an integer, nor integers by file and line.

    >>> read_size_hint({"expert.py:31": 512, "": 16}).describe()
    '512 at expert.py:31, 16 elsewhere'
    """
    sizes = hint if isinstance(hint, Mapping) else {} if hint is None else {"": hint}
    for line, size in sizes.items():
        if not isinstance(size, int) or size < 0:
            raise UsageError(
                f"size_hint must be an integer, 0 or more, got {size!r}", hint="--size-hint 16"
            )
        if line and not line.rpartition(":")[2].isdecimal():
            raise UsageError(
                f"size_hint: {line!r} is not a line", hint="FILE:LINE, as expert.py:31"
            )
    lines = tuple((line, size) for line, size in sizes.items() if line)
    return SizeHints(sizes.get(""), lines)


def read_routing(routing: str | Sequence[float]) -> Routing:
    """Reads a routing: a name, or how many tokens each expert gets, in any unit.

    Raises:
        UsageError: It is neither.

    >>> read_routing("worst"), read_routing("3,1"), read_routing([30, 10])
    ('worst', (0.75, 0.25), (0.75, 0.25))
    """
    if routing in ("balanced", "worst"):
        return str(routing)
    try:
        numbers = routing.split(",") if isinstance(routing, str) else routing
        counts = [float(number) for number in numbers]
    except (TypeError, ValueError):
        raise UsageError(f"unknown routing {routing!r}", hint=ROUTINGS) from None
    if not counts or min(counts) < 0 or not 0 < sum(counts) < float("inf"):
        raise UsageError(f"bad routing {routing!r}", hint=ROUTINGS)
    return tuple(count / sum(counts) for count in counts)


def name_routing(routing: Routing) -> str:
    """Names a routing in a sentence: tokens are taken as ..."""
    if isinstance(routing, tuple):
        return "in the shares given"
    return "even over the experts" if routing == "balanced" else "all to the same"


# -- counts ----------------------------------------------------------------------------------------

_takers: list[Callable[[int], object]] = []
"""Functions that answer a count: that of the analysis that runs, if one does."""


@contextlib.contextmanager
def assume_counts(hints: SizeHints, notes: MutableMapping[str, None]) -> Iterator[None]:
    """Takes a count as the most that it may be, within, where no size hint says what it is."""

    def take(most: int) -> object:
        if hints.default is not None or hints.find_own() is not None:
            return None
        source = find_source()
        at = f" at {source}" if source else ""
        notes[f"A count{at} is taken as {most:,}, the most that it may be."] = None
        return stand_in(most, refuse)

    def refuse(_frame: FrameType, result: object) -> object:
        if take in _takers:
            raise DataDependentOutputException(aten._local_scalar_dense.default)
        return result

    _takers.append(take)
    try:
        yield
    finally:
        _takers.remove(take)


@ANY.function(Tensor.item)
def _take_count(tensor: Tensor) -> object:
    value = find_partly_known(tensor) if _takers else None
    if value is None or value.most is None or tensor.is_floating_point():
        return tensor.item()
    count = _takers[-1](int(value.most))
    return tensor.item() if count is None else count
