"""Objects that code reaches from a value."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxmem.fakes.fake_mode import make_fake_mode
from fxmem.fakes.reach import find_attributes, iterate_reached

TABLE: dict[str, Any] = {}


class Holder:
    __slots__ = ("unset", "value")

    def __init__(self, value: object) -> None:
        self.value = value

    def method(self) -> object:
        return self.value


def names_the_table() -> object:
    def inner() -> object:
        return TABLE

    return inner


def make_closure(value: object) -> Any:
    return lambda: value


def make_default(value: object) -> Any:
    def function(first: object = value, *, second: object = None) -> object:
        return first, second

    return function


def make_hook(value: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(1))
    parameter.register_hook(lambda grad: grad + value)
    return parameter


def make_cycle(value: object) -> list[Any]:
    cycle: list[Any] = [value]
    cycle.append(cycle)
    return cycle


@pytest.mark.parametrize(
    "hold",
    [
        lambda x: x,
        lambda x: {(x,): 1},
        lambda x: frozenset({x}),
        Holder,
        lambda x: Holder(x).method,
        make_closure,
        make_default,
        lambda x: functools.partial(print, end=x),
        lambda x: [x].append,
        make_hook,
        make_cycle,
        weakref.ref,
    ],
)
def test_a_tensor_is_found_wherever_it_is_held(hold: Any) -> None:
    tensor = torch.ones(3)
    held = hold(tensor)
    found = [thing for thing in iterate_reached(held) if isinstance(thing, Tensor)]
    assert any(thing is tensor or torch.equal(thing, tensor) for thing in found)


def reaches_state(value: object) -> bool:
    kinds = (Tensor, nn.Module, torch.optim.Optimizer)
    return any(isinstance(reached, kinds) for reached in iterate_reached(value))


def test_globals_are_followed_through_functions_that_name_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = [None, 1, "text", torch.relu, nn.functional.gelu, torch.float32, Holder(3), nn.Linear]
    assert not reaches_state([names_the_table, *plain])
    monkeypatch.setitem(TABLE, "weight", torch.ones(1))
    assert reaches_state(names_the_table)


def test_attributes_are_the_users_own() -> None:
    with make_fake_mode():
        fake = nn.Parameter(torch.ones(2))
    real = torch.ones(2)
    fake.scale = real.scale = 3  # type: ignore[attr-defined]
    assert find_attributes(fake) == find_attributes(real) == {"scale": 3}
