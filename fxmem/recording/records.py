"""What a recorder writes down; :mod:`fxmem.recording.assemble` makes the memory graph of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxmem.graph import Category


@dataclass(slots=True)
class LiveStorage:
    """A storage under observation; :class:`fxmem.graph.Storage` once the step is over."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    born: int
    node: int | None
    died: int | None = None
    death_rank: int = 0
    category: Category = Category.TEMPORARY
    name: str = ""
    saved_by: list[int] = field(default_factory=list)
    cast_until: int | None = None


@dataclass(slots=True)
class NodeRecord:
    """What was measured while a node ran."""

    output_bytes: int = 0
    transient_bytes: int = 0
    results: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SavedRecord:
    """The first time that a storage was saved for backward."""

    storage: int
    node: int | None
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """One time that a storage was saved for backward, by the function with that number."""

    storage: int
    node: int | None
    position: int
    sequence: int
