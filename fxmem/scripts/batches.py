"""The fullest batches of a script's loader, which its steps get instead of the first ones."""

from __future__ import annotations

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fxmem.analysis import Analysis
from fxmem.errors import TraceError
from fxmem.fakes.containers import iterate_paths, iterate_tensors
from fxmem.memory.interpolation import describe_structure, interpolate_graph
from fxmem.memory.succession import Fragmentation, replay_steps
from fxmem.parallelism.process_group import run_outside_modes
from fxmem.scripts.windows import Windows

_MOST_BATCHES = 100_000
"""Batches that are read of a loader without an end."""
_MOST_LARGEST = 4
_MOST_SHOWN = 3
_MOST_KEPT_BYTES = 1 << 30
_SEVERAL = "they differ in more than one size"
_LEAST_REPLAYED, _MOST_REPLAYED, _MOST_OPERATIONS = 20, 200, 500_000
_SHARES = ((0.5, "Half"), (0.9, "90 %"), (0.99, "99 %"))

Sizes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
_Key: TypeAlias = tuple[str, int]
_NBYTES: _Key = ("", -1)


@dataclass(frozen=True)
class _Batch:
    """A batch that was read, and its place among the others."""

    number: int
    nbytes: int
    sizes: Sizes

    def list_figures(self) -> Iterator[tuple[_Key, int]]:
        """Lists the figures of which the largest is looked for."""
        yield _NBYTES, self.nbytes
        for name, shape in self.sizes:
            for axis, size in enumerate(shape):
                yield (name, axis), size

    def __str__(self) -> str:
        largest = sorted(self.sizes, key=lambda each: -math.prod(each[1]))
        sizes = [
            f"{name} {'x'.join(map(str, shape)) or 'scalar'}".strip()
            for name, shape in largest[:_MOST_SHOWN]
        ]
        more = len(largest) - len(sizes)
        return f"batch {self.number:,}: {', '.join(sizes)}{f' and {more} more' if more else ''}"


class FullestBatches:
    """Reads the loader that the steps draw from to its end, and gives them its largest batches.

    The largest take the most bytes, or are the longest in a dimension. Batches of the median size
    and the like come first, where all sizes fit in a GiB.

    Args:
        windows: The steps, each of which gets a batch.
        hold: Counts the tensors of a batch, where the host's memory is the target's.

    Attributes:
        is_reading: The loader is read to its end.
    """

    def __init__(self, windows: Windows, hold: Callable[[Any], Any]) -> None:
        self._windows = windows
        self._hold = hold
        self.is_reading = False
        self._loader: DataLoader[Any] | None = None
        self._count = 0
        self._chosen: list[tuple[_Batch, Any]] = []
        self._drawn: dict[int, _Batch] = {}
        self._read: list[_Batch] = []
        self._taken: dict[str, _Batch] = {}  # by the name of the window
        self._moved_in = 0

    def replace_iteration(self, iterate: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a replacement of ``DataLoader.__iter__``."""

        def __iter__(loader: DataLoader[Any]) -> Any:
            if self._loader is None and torch.is_grad_enabled():
                self._loader = loader
                self.is_reading = True
                with run_outside_modes():
                    self._choose(iter(iterate(loader)))
                self.is_reading = False
            return self._draw() if self._loader is loader else iterate(loader)

        return __iter__

    def see_move(self, tensor: Tensor) -> None:
        """Sees a tensor of a batch move to the GPU, in the step that the batch is of."""
        batch = self._drawn.get(tensor.untyped_storage().data_ptr())
        if batch is not None:
            self._moved_in = self._windows.number
            self._take(batch)

    def _draw(self) -> Iterator[Any]:
        for _ in range(self._count):
            number = self._windows.number
            batch, value = self._chosen[min(number, len(self._chosen)) - 1]
            with run_outside_modes():
                drawn = self._hold(copy.deepcopy(value))
                for tensor in iterate_tensors(drawn):
                    self._drawn[tensor.untyped_storage().data_ptr()] = batch
            # A loader that reads ahead moves one batch and draws another.
            if self._moved_in != number:
                self._take(batch)
            yield drawn

    def _take(self, batch: _Batch) -> None:
        self._windows.batch = f"batch {batch.number:,} of {self._count:,}"
        self._taken[self._windows.name_step()] = batch

    def replay(self) -> tuple[Fragmentation, ...]:
        """Replays the first batches of the loader in its order, with several allocators.

        The graphs of batches that no step had are computed, where batches differ in one size alone.
        """
        sizes = _find_sizes(self._read) or _find_sizes(self._read[:-1])
        alike: dict[Any, dict[int, Analysis]] = defaultdict(dict)
        for step in self._windows.steps:
            batch = self._taken.get(step.setup.window or "")
            if batch is not None and batch.number <= len(sizes):
                alike[describe_structure(step.graph)][sizes[batch.number - 1]] = step
        known = max(alike.values(), key=len, default={})
        settings = next((step.settings for step in self._windows.steps), None)
        if settings is None:  # on the host
            return ()
        if len(known) < 2:
            if len({batch.sizes for batch in self._read}) > 1:
                self._tell("steps of different sizes run other operators" if sizes else _SEVERAL)
            return ()
        step = next(iter(known.values()))
        most = _MOST_OPERATIONS // len(step.graph.operations)
        replayed = sizes[: min(max(most, _LEAST_REPLAYED), _MOST_REPLAYED)]
        graphs = {size: each.graph for size, each in known.items()}
        return replay_steps(
            self._windows.steps[0].graph,
            (interpolate_graph(graphs, size) for size in replayed),
            settings,
            capacity_bytes=None if step.gpu is None else step.gpu.capacity_bytes,
            context_bytes=max(step.context_bytes),
        )

    def _tell(self, why: str) -> None:
        note = f"What is reserved after many batches was not computed: {why}."
        if note not in self._windows.notes:
            self._windows.notes.append(note)

    def _choose(self, batches: Iterator[Any]) -> None:
        read: list[_Batch] = []
        kept: dict[Sizes, Any] = {}
        kept_bytes = 0
        for value in itertools.islice(batches, _MOST_BATCHES):
            tensors = [(_write_path(path), tensor) for path, tensor in iterate_paths(value)]
            sizes = tuple((name, tuple(tensor.shape)) for name, tensor in tensors)
            batch = _Batch(len(read) + 1, sum(tensor.nbytes for _, tensor in tensors), sizes)
            read.append(batch)
            self._windows.read_batches = len(read)
            if sizes not in kept:
                kept[sizes] = value
                kept_bytes += batch.nbytes
            if kept_bytes > _MOST_KEPT_BYTES:
                kept = {each.sizes: kept[each.sizes] for each in _list_largest(read)}
                kept_bytes = 0  # to be reached again
        if not read:
            raise TraceError("the loader that the steps draw from has no batches")
        self._count, self._windows.read_batches = len(read), 0
        self._read = read
        ranked = [batch for batch in _list_ranked(read) if batch.sizes in kept]
        chosen = {batch.sizes: batch for batch in (*ranked, *_list_largest(read))}
        ordered = sorted(chosen.values(), key=lambda batch: batch.nbytes)
        if len(ordered) > 1:
            # The first two steps make what later ones find: gradients, and states of the optimizer.
            ordered = [*ordered[:2], ordered[0], *(ordered[2:] or ordered[1:])]
        self._chosen = [(each, kept[each.sizes]) for each in ordered]
        self._windows.expect(len(ordered) + 1)  # for a loader that reads ahead
        self._windows.notes += _list_notes(read)


def _find_sizes(read: list[_Batch]) -> list[int]:
    """Finds the one size in which batches differ; nothing where they do in none or in several."""
    figures = [dict(batch.list_figures()) for batch in read]
    if len({tuple(each) for each in figures}) != 1:
        return []
    keys = [key for key in figures[0] if key != _NBYTES]
    varying = [key for key in keys if len({each[key] for each in figures}) > 1]
    sizes = [{each[key] for key in varying} for each in figures]
    return [each.pop() for each in sizes] if all(len(each) == 1 for each in sizes) else []


def _list_largest(read: list[_Batch]) -> list[_Batch]:
    """Lists the batch that takes the most bytes, and those that are longer in a dimension."""
    best: dict[_Key, int] = {}
    largest: dict[_Key, _Batch] = {}
    for batch in read:
        for key, figure in batch.list_figures():
            if figure > best.get(key, -1):
                best[key], largest[key] = figure, batch
    fullest = largest[_NBYTES]
    own = dict(fullest.list_figures())
    longer = [batch for key, batch in largest.items() if best[key] > own.get(key, -1)]
    return [fullest, *{batch.sizes: batch for batch in longer}.values()][:_MOST_LARGEST]


def _list_ranked(read: list[_Batch]) -> list[_Batch]:
    ranked = sorted(read, key=lambda batch: batch.nbytes)
    return [ranked[int(share * (len(read) - 1))] for share, _ in _SHARES]


def _list_notes(read: list[_Batch]) -> list[str]:
    if len({batch.sizes for batch in read}) == 1:
        return [f"The loader's {len(read):,} batches are all of one size."]
    fullest, *longer = _list_largest(read)
    notes = [f"Of the loader's {len(read):,} batches the fullest is {fullest}."]
    notes += [f"Longer in a dimension is {batch}." for batch in longer]
    ranked = zip(_SHARES, _list_ranked(read), strict=True)
    return notes + [f"{text} of them are no larger than {batch}." for (_, text), batch in ranked]


def _write_path(path: tuple[Any, ...]) -> str:
    keys = [key[1] if isinstance(key, tuple) else key for key in path]
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".")
