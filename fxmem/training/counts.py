"""Counts of truth values that code reads as numbers: of the tokens that are not padding, say.

Losses divide by them. In an analysis such a number is the most that it may be, as long as no
branch hangs on it or on what is computed from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping
from types import FrameType

from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException

from fxmem.fakes.stand_ins import stand_in
from fxmem.fakes.values import find_partly_known
from fxmem.kernels.registry import ANY
from fxmem.recording.size_hints import SizeHints
from fxmem.source import find_source
from fxmem.versions.operators import aten

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

    def refuse(_frame: FrameType, _result: object) -> None:
        if take in _takers:
            raise DataDependentOutputException(aten._local_scalar_dense.default)

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
