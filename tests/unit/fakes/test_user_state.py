"""State that code keeps outside of the model: as it was found."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.fakes.swapping import restore_user_state

TABLE: dict[str, Any] = {}
LISTED: list[Any] = []
RECENT: deque[Any] = deque()
MASK: Any = None


class Helper:
    """Keeps a table for everyone."""

    table: Any = None
    tables: dict[int, Tensor] = {}  # noqa: RUF012

    @classmethod
    def find(cls, size: int) -> Tensor:
        if size not in cls.tables:
            cls.tables[size] = torch.ones(size, size)
        if cls.table is None:
            cls.table = torch.ones(size)
        return cls.tables[size]


class Slots:
    __slots__ = ("count", "mask")

    def __init__(self) -> None:
        self.count: Any = None


SLOTS = Slots()


@functools.lru_cache
def cached(size: int) -> tuple[Tensor, int]:
    return torch.ones(size, size), size


@functools.cache
def known(size: int) -> int:
    return size


class Net(nn.Module):
    """Keeps what it computes in all these places."""

    kept: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        global MASK
        MASK = torch.ones(4, 4)
        Net.kept = (MASK,)
        LISTED.append(MASK)
        SLOTS.count = SLOTS.mask = MASK
        RECENT.append({"mask": MASK})
        TABLE.setdefault("mask", [MASK])
        known(4)
        result: Tensor = self.linear(x) @ Helper.find(4) @ cached(4)[0] @ TABLE["mask"][0]
        return result


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    for held in (TABLE, LISTED, RECENT, Helper.tables):
        held.clear()
    cached.cache_clear()


def test_no_fake_tensor_is_left() -> None:
    net = Net()
    peaks = {fxmem.analyze(net, ("3x4",), device="cpu").peak_bytes for _ in range(2)}
    assert len(peaks) == 1
    assert (MASK, Net.kept, Helper.table, SLOTS.count) == (None, None, None, None)
    assert not hasattr(SLOTS, "mask")
    assert not (TABLE or LISTED or RECENT or Helper.tables)
    assert (cached.cache_info().currsize, known.cache_info().currsize) == (0, 1)
    assert type(net(torch.ones(3, 4))) is Tensor
    # Now there is something, which stays.
    table, listed = TABLE["mask"], LISTED[0]
    fxmem.analyze(net, ("3x4",), device="cpu")
    assert (TABLE["mask"], Helper.tables[4].shape) == (table, (4, 4))
    assert len(LISTED) == 1 and LISTED[0] is listed
    assert type(MASK) is Tensor and type(Net.kept[0]) is Tensor


class Lazy(dict[str, int]):
    """A dict that must not be asked for what it does not hold yet."""

    def keys(self) -> Any:
        raise AssertionError

    values = items = keys


def test_a_dict_that_loads_is_not_asked() -> None:
    lazy = Lazy(a=1)
    with restore_user_state([lambda: lazy]):
        pass
