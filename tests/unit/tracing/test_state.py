"""Changes of Python objects, as snapshots show them."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn

from fxmem.tracing.state import take_snapshot


class Cache:
    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.length = 0
        self.owner = self


@dataclasses.dataclass(slots=True)
class Slots:
    scale: float = 1.0


class Mode(Enum):
    SUM = 0
    MEAN = 1


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([], lambda value: value.append(1)),
        ({"a": 1}, lambda value: value.update(a=2)),
        ([torch.ones(1)], lambda value: value.__setitem__(0, torch.ones(1))),
        (([],), lambda value: value[0].append(1)),
        (Cache(), lambda value: value.keys.append(torch.ones(2))),
        (Cache(), lambda value: setattr(value, "length", 1)),
        (Slots(), lambda value: setattr(value, "scale", 2.0)),
        ([1], lambda value: value.__setitem__(0, True)),
        ([Mode.SUM], lambda value: value.__setitem__(0, Mode.MEAN)),
        ([0] * 20_000, lambda value: value.append(1)),
    ],
)
def test_a_change_shows(value: Any, change: Callable[[Any], None]) -> None:
    before = take_snapshot([value])
    assert before == take_snapshot([value])
    change(value)
    assert before != take_snapshot([value])


def test_numbers_in_tensors_and_what_modules_hold_are_no_part_of_a_snapshot() -> None:
    tensor, module = torch.ones(1), nn.Linear(1, 1)
    before = take_snapshot([tensor, module, [tensor]])
    tensor.zero_()
    module.weight = nn.Parameter(torch.ones(1, 1))
    assert before == take_snapshot([tensor, module, [tensor]])


def test_nothing_is_kept_alive() -> None:
    holder = [torch.ones(1)]
    gone = weakref.ref(holder[0])
    before = take_snapshot([holder])
    holder.clear()
    gc.collect()
    assert gone() is None
    holder.append(torch.ones(1))  # may come to lie where the other did
    assert before != take_snapshot([holder])
