"""Changes of Python objects, as snapshots show them."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fxmem.tracing.changes import is_same, take_snapshot


class Layer:
    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.length = 0


class Cache:
    def __init__(self) -> None:
        self.layers = [Layer()]
        self.owner = self


@dataclasses.dataclass(slots=True)
class Slots:
    scale: float = 1.0


class Mangled(Slots):
    __slots__ = ["__own"]

    def __init__(self) -> None:
        super().__init__()
        self.__own = [1.0]

    def change(self) -> None:
        self.__own[0] = 2.0


class Mode(Enum):
    SUM = 0
    MEAN = 1


def make_scales(factor: float) -> tuple[Callable[[float], float], Callable[[float], float]]:
    return (lambda value: value * factor), (lambda value: value + factor)


SCALES = make_scales(2.0)


def fill(cache: Any) -> None:
    cache.layers[0].keys = torch.ones(2)


def count(cache: Any) -> None:
    cache.layers[0].length += 1


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([], lambda value: value.append(1)),
        ({}, lambda value: value.update(a=1)),
        (set(), lambda value: value.add(1)),
        (deque(), lambda value: value.append(1)),
        ([1], lambda value: value.__setitem__(0, 2)),
        ([torch.ones(1)], lambda value: value.__setitem__(0, torch.ones(1))),
        (([],), lambda value: value[0].append(1)),
        (Cache(), fill),
        (Cache(), count),
        (Cache(), lambda value: value.layers.append(Layer())),
        (Slots(), lambda value: setattr(value, "scale", 2.0)),
        (Slots(), lambda value: delattr(value, "scale")),
        (Mangled(), lambda value: setattr(value, "scale", 2.0)),
        (Mangled(), Mangled.change),
        ([1], lambda value: value.__setitem__(0, True)),
        ([2], lambda value: value.__setitem__(0, 2.0)),
        ([0.0], lambda value: value.__setitem__(0, -0.0)),
        ([Mode.SUM], lambda value: value.__setitem__(0, Mode.MEAN)),
        ([SCALES[0]], lambda value: value.__setitem__(0, SCALES[1])),
        ([partial(round, ndigits=1)], lambda value: value.__setitem__(0, partial(round))),
        ([slice(0, 2)], lambda value: value.__setitem__(0, slice(0, 3))),
        (OrderedDict(a=1, b=1), lambda value: value.move_to_end("a")),
        ([0] * 20_000, lambda value: value.__setitem__(-1, 1)),
        ([0] * 20_000, lambda value: value.__setitem__(-1, False)),
        ([-1] * 1200, lambda value: value.__setitem__(5, -2)),
        ([0.0] * 1200, lambda value: value.__setitem__(5, -0.0)),
        ([[1.0] * 100 for _ in range(200)], lambda value: value[199].__setitem__(99, 7.0)),
        ([(1, 2)] * 20_000, lambda value: value.__setitem__(-1, (1, True))),
        ([Layer() for _ in range(20_000)], lambda value: value.append(Layer())),
        (dict.fromkeys(range(20000), "a"), lambda value: value.update({19_999: "b"})),
        ([np.zeros(3)], lambda value: value[0].__setitem__(2, 1.0)),
        ([np.zeros((2, 4)).T], lambda value: value[0].__setitem__((3, 1), 1.0)),
        (bytearray(3), lambda value: value.__setitem__(0, 1)),
        (array("d", [1.0]), lambda value: value.append(2.0)),
    ],
)
def test_a_change_shows(value: Any, change: Callable[[Any], None]) -> None:
    before = take_snapshot([value])
    assert is_same(before, take_snapshot([value]))
    change(value)
    assert not is_same(before, take_snapshot([value]))


@pytest.mark.parametrize("make", [np.float32, Decimal, Fraction, range, lambda n: slice(0, n)])
def test_what_takes_the_place_of_another_shows(make: Callable[[int], object]) -> None:
    holder = [make(0)]
    before = take_snapshot([holder])
    for number in range(1, 9):
        holder[0] = make(number)  # may come to lie where one before did
        assert not is_same(before, take_snapshot([holder]))


@pytest.mark.parametrize("value", [Slots(), np.float32(1), slice(1, 2), Mode.SUM, (1, [2.0])])
def test_what_holds_the_same_is_no_change(value: object) -> None:
    assert is_same(take_snapshot([value]), take_snapshot([copy.deepcopy(value)]))


def test_equal_entries_are_the_same_whichever_objects_they_are() -> None:
    first, words = 1000.5, [str(number) for number in range(20)]
    table = [[first] * 20, words, *[[first, None]] * 20]
    assert is_same(take_snapshot([table]), take_snapshot([eval(repr(table))]))


def test_a_copied_snapshot_is_of_what_was_copied_with_it() -> None:
    held = Slots()
    copied, (function, snapshot) = copy.deepcopy((held, (abs, take_snapshot([abs, held]))))
    assert is_same(snapshot, take_snapshot([function, copied]))


def test_a_snapshot_is_a_key() -> None:
    held = [np.ones(2), torch.ones(2), {"slots": Slots()}, SCALES, range(3)]
    before = take_snapshot(held)
    assert {before: "found"}[take_snapshot(held)] == "found"
    days = [np.array(["2026-01-01"], dtype="datetime64[D]") for _ in range(2)]
    assert take_snapshot(days[:1]) != take_snapshot(days[1:])  # as a whole
    assert pickle.loads(pickle.dumps(before := take_snapshot([range(3)]))) != before


def test_numbers_in_tensors_and_what_modules_hold_are_no_part_of_it() -> None:
    tensor, module = torch.ones(1), nn.Linear(1, 1)
    before = take_snapshot([tensor, module, [tensor]])
    tensor.zero_()
    module.weight = nn.Parameter(torch.ones(1, 1))
    assert is_same(before, take_snapshot([tensor, module, [tensor]]))


def test_nothing_is_kept_alive() -> None:
    tensor = torch.ones(1)
    holder = [tensor]
    gone = weakref.ref(tensor)
    before = take_snapshot([holder])
    del tensor
    holder.clear()
    gc.collect()
    assert gone() is None
    holder.append(torch.ones(1))  # may come to lie where the other did
    assert not is_same(before, take_snapshot([holder]))
