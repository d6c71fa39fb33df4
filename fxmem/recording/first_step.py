"""Operators of the first step, to which the allocations before the steady step belong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from fxmem.graph import FirstOperation, Operation, Phase
from fxmem.versions.operators import aten

_SKIPPED = ("step.begin", "random.get_state", str(aten.detach.default))
"""Operations of the steady step alone: the recording's own, and what its hooks add to backward."""


class FirstStepLog:
    """Notes to which operator each allocation and free of the first step belongs."""

    def __init__(self) -> None:
        self._marks: list[tuple[int, Phase, int, Any]] = []
        self._counts: dict[Phase, int] = defaultdict(int)

    def see(self, func: Any, phase: Phase, start: int) -> None:
        """Notes an operator that has run, after ``start`` allocations and frees."""
        rank = self._counts[phase]
        if func is aten.detach.default or (phase is Phase.OPTIMIZER and rank):
            return
        if self._marks and self._marks[-1][0] == start:
            self._marks.pop()  # the operator before neither allocated nor freed
        self._marks.append((start, phase, rank, func))
        self._counts[phase] = rank + 1

    def list_operations(self, operations: Iterable[Operation]) -> Iterator[FirstOperation]:
        """Lists the operators, each with its twin among those of the steady step.

        Both steps run the same operators in the same order.
        """
        steady: dict[Phase, list[Operation]] = defaultdict(list)
        for operation in operations:
            if operation.name not in _SKIPPED:
                steady[operation.phase].append(operation)
        for start, phase, rank, func in self._marks:
            twins = steady[phase]
            found = twins[rank] if phase is not Phase.OPTIMIZER and rank < len(twins) else None
            is_twin = found is not None and found.name == str(func)
            yield FirstOperation(start, phase, found.index if found and is_twin else None)
