"""The training loop of a step, as a report names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Loop:
    """A training loop by name, with the settings that differ from its own.

    Attributes:
        name: Name of its function: one of :data:`fxmem.training.loops.LOOPS`, or the caller's.
        settings: Keyword arguments of the function.

    >>> str(Loop("huggingface", {"accumulate": 4}))
    'huggingface(accumulate=4)'
    """

    name: str = "plain"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def accumulate(self) -> int:
        """How many micro-batches add up their gradients before the optimizer steps."""
        return int(self.settings.get("accumulate", 1))

    @property
    def set_to_none(self) -> bool:
        """Whether ``zero_grad`` frees gradients; else they are zeroed in place."""
        return bool(self.settings.get("set_to_none", True))

    @property
    def retain_graph(self) -> bool:
        """Whether backward keeps the graph, which lives as long as the loss and the output."""
        return bool(self.settings.get("retain_graph", False))

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return f"{self.name}({settings})" if settings else self.name


PLAIN = Loop()
