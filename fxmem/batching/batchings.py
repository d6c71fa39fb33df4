"""Ways to make batches of samples of different sizes."""

from __future__ import annotations

import json
import math
import operator
import random
import re
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from fxmem.errors import UsageError

SampleSizes: TypeAlias = str | Sequence[int] | Mapping[Any, int]

_MOST_SAMPLES = 10_000_000
_GROUPED_BATCHES = 50
"""Batches whose samples are sorted together (transformers' ``get_length_grouped_indices``)."""
_RANGE = re.compile(r"([0-9]+)-([0-9]+)")
_RANGE_SAMPLES = 10_000
_HINT = "a list of sizes, or an object of how many samples have a size, or a range such as 64-2048"


@dataclass(frozen=True, slots=True)
class Batching:
    """The batches that a way of making them gives.

    Attributes:
        name: ``"padded"``, ``"grouped"``, ``"packed"`` or ``"capped"``.
        rows: Samples of a batch, or rows into which samples are packed.
        sizes: The size of each batch, to which its samples are padded, in order.
        sample_elements: The elements of all samples, as far as they are not cut.
        cut: How many samples are cut.
        dims: How many dimensions have the size: 2 for images.
    """

    name: str
    rows: int
    sizes: tuple[int, ...]
    sample_elements: int
    cut: int = 0
    dims: int = 1

    @property
    def padding(self) -> float:
        """Share of the batches that is padding."""
        areas = [math.prod([size] * self.dims) for size in self.sizes]
        return 1 - self.sample_elements / (self.rows * sum(areas))


def read_sizes(sizes: SampleSizes) -> tuple[int, ...]:
    """Reads the sizes of samples.

    Args:
        sizes: One for each sample; or how many samples have each; or a range, ``"64-2048"``, of
            which each size is as likely; or the path of a JSON file with a list or an object.

    Raises:
        UsageError: They cannot be read, or are no sizes.

    >>> read_sizes({"128": 2, "512": 1})
    (128, 128, 512)
    """
    name = sizes if isinstance(sizes, str) else "sizes"
    if isinstance(sizes, str):
        if match := _RANGE.fullmatch(sizes):
            least, most = int(match[1]), int(match[2])
            if not 0 < least <= most:
                raise UsageError(f"bad range {sizes!r}", hint="64-2048")
            draw = random.Random(0)
            return tuple(draw.randint(least, most) for _ in range(_RANGE_SAMPLES))
        try:
            sizes = json.loads(Path(sizes).read_text(encoding="utf-8"))
        except OSError as error:
            cause = f"cannot read the sizes {name!r}: {error.strerror}"
            raise UsageError(cause, hint=_HINT) from error
        except ValueError as error:
            raise UsageError(f"{name} is no JSON: {error}", hint=_HINT) from error
    try:
        if isinstance(sizes, Mapping):
            counts = [(int(size), operator.index(count)) for size, count in sizes.items()]
            if sum(count for _, count in counts) > _MOST_SAMPLES:
                raise UsageError(f"{name}: more than {_MOST_SAMPLES:,} samples")
            read = tuple(size for size, count in counts for _ in range(count))
        else:
            listed: Sequence[Any] = sizes
            read = tuple(operator.index(size) for size in listed)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name}: sizes are whole numbers ({error})", hint=_HINT) from error
    if not read or min(read) < 1:
        raise UsageError(f"{name}: no sizes, or one below 1", hint=_HINT)
    return read


def list_batchings(
    sizes: Sequence[int], rows: int, *, cap: int, unit: int = 1, dims: int = 1
) -> list[Batching]:
    """Makes batches of samples in several ways, each after the same shuffle.

    Args:
        sizes: The sizes of the samples.
        rows: Samples of a batch. The last batch is left out if it has fewer.
        cap: The size to which samples are cut in one of the ways.
        unit: The sizes of batches are multiples of this number.
        dims: How many dimensions have the size. Samples can lie behind each other along one.

    >>> for each in list_batchings([1, 8, 2, 7], 2, cap=4):
    ...     print(each.name, each.rows, each.sizes, each.sample_elements)
    padded 2 (8, 2) 18
    grouped 2 (8, 2) 18
    packed 2 (8, 8) 18
    capped 2 (4, 2) 11
    """
    shuffled = random.Random(0).sample(sizes, len(sizes))

    def round_up(size: int) -> int:
        return -(-size // unit) * unit

    def batch(samples: Sequence[int]) -> tuple[int, ...]:
        starts = range(0, max(len(samples) - rows, 0) + 1, rows)
        return tuple(round_up(max(samples[at : at + rows])) for at in starts)

    used = shuffled[: max(len(shuffled) // rows, 1) * rows]
    total = sum(size**dims for size in used)
    capped = [min(size, cap) for size in used]
    grouped = [
        size
        for at in range(0, len(used), rows * _GROUPED_BATCHES)
        for size in sorted(used[at : at + rows * _GROUPED_BATCHES], reverse=True)
    ]
    found = [
        Batching("padded", rows, batch(used), total, dims=dims),
        Batching("grouped", rows, batch(grouped), total, dims=dims),
    ]
    if dims == 1:
        longest = round_up(max(used))
        count = _count_packed(used, longest)
        together = max(round(count * rows / len(used)), 1)
        steps = -(-count // together)
        found.append(Batching("packed", together, (longest,) * steps, total))
    if cap < max(used):
        cut = sum(size > cap for size in used)
        elements = sum(size**dims for size in capped)
        found.append(Batching("capped", rows, batch(capped), elements, cut, dims))
    return found


def _count_packed(sizes: Sequence[int], longest: int) -> int:
    """Counts the rows into which samples are packed, each where the least room is left over."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        at = bisect_left(rooms, size)
        room = rooms.pop(at) if at < len(rooms) else longest
        insort(rooms, room - size)
    return len(rooms)
