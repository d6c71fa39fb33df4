"""Changes of Python objects, as snapshots show them."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

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
    ],
)
def test_a_change_shows(value: Any, change: Callable[[Any], None]) -> None:
    before = take_snapshot([value])
    assert is_same(before, take_snapshot([value]))
    change(value)
    assert not is_same(before, take_snapshot([value]))


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
