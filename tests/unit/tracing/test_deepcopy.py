"""Copies that go on at functions, weak references and optimizers."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxmem.tracing.deepcopy import (
    Memo,
    copy_through_functions,
    find_accumulator,
    find_class_state,
    undo_failed,
)

FACTOR = 1
WEIGHTS: dict[str, Any] = {}


def deep_copy(value: Any, memo: Memo | None = None) -> Any:
    with copy_through_functions():
        return copy.deepcopy(value, {} if memo is None else memo)


def test_functions_of_one_scope_still_share_it() -> None:
    kept: list[int] = []

    def write(value: int) -> None:
        kept.append(value)

    def read() -> list[int]:
        return kept

    new_write, new_read = deep_copy((write, read))
    new_write(3)
    assert (new_read(), kept) == ([3], [])


def test_a_rebound_variable_is_shared_as_it_was() -> None:
    count, seen = 0, [0]

    def add() -> None:
        nonlocal count
        count += 1
        seen.append(count)

    def read() -> int:
        return count

    new_add, new_read = deep_copy((add, read))
    new_add()
    assert (new_read(), read(), seen) == (1, 0, [0])


def make_decorated() -> Callable[..., Any]:
    def inner() -> None: ...

    @functools.wraps(inner)
    def outer() -> None:
        inner()

    return outer


def test_a_function_that_holds_nothing_stays_itself() -> None:
    functions = [deep_copy, len, torch.relu, nn.functional.gelu, lambda x: x, make_decorated()]
    assert all(new is old for new, old in zip(deep_copy(functions), functions, strict=True))
    assert deep_copy(nn.Linear.forward) is nn.Linear.forward


def test_what_a_function_is_called_and_takes_is_copied() -> None:
    weight = torch.ones(1)

    def scale(x: int, by: Any = weight, *, to: Any = (weight,)) -> Any:
        """Doc."""
        return x, by, to

    scale.note = [weight]  # type: ignore[attr-defined]
    new = deep_copy(scale)
    _, by, to = new(1)
    assert by is to[0] is new.note[0] is not weight
    assert (new.__name__, new.__qualname__, new.__module__, new.__doc__, new.__annotations__) == (
        scale.__name__,
        scale.__qualname__,
        scale.__module__,
        scale.__doc__,
        scale.__annotations__,
    )


def test_a_function_may_call_itself() -> None:
    weights = [torch.ones(1)]

    def visit(depth: int) -> Any:
        return visit(depth - 1) if depth else weights[0]

    assert deep_copy(visit)(2) is not weights[0]


def read_global() -> tuple[Any, int]:
    return helper(), FACTOR


def helper() -> Any:
    return WEIGHTS.get("first")


def test_globals_that_reach_a_tensor_are_copied_and_others_read_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.ones(1)
    monkeypatch.setitem(WEIGHTS, "first", weight)
    memo: Memo = {}
    new = deep_copy(read_global, memo)
    monkeypatch.setitem(globals(), "FACTOR", 2)
    found, factor = new()
    assert found is memo[id(weight)] is not weight
    assert factor == 2
    assert read_global()[0] is weight
    with pytest.raises(NameError):
        deep_copy(names_nothing)()


def names_nothing() -> Any:
    return WEIGHTS, undefined  # type: ignore[name-defined]  # noqa: F821


class Counter:
    def __init__(self) -> None:
        self.kept: list[Any] = []

    def keep(self, value: Any) -> None:
        self.kept.append(value)


def test_methods_partials_and_bound_builtins_act_on_the_copy() -> None:
    counter = Counter()
    copied, method, partial, append = deep_copy(
        (counter, counter.keep, functools.partial(counter.keep, 2), counter.kept.append)
    )
    method(1)
    partial()
    append(3)
    assert (copied.kept, counter.kept) == ([1, 2, 3], [])


def test_weak_references_follow_what_is_copied() -> None:
    module, other = nn.Linear(1, 1), Counter()
    new_module, reference, kept = deep_copy((module, weakref.ref(module), weakref.ref(other)))
    assert reference() is new_module
    assert kept() is other


def test_a_dict_by_id_is_one_of_the_copies() -> None:
    weight = torch.ones(1)
    new_weight, table = deep_copy((weight, {id(weight): "found", 7: "seven"}))
    assert table == {id(new_weight): "found", 7: "seven"}


def test_an_optimizer_is_copied_with_its_state_and_hooks() -> None:
    weight, calls = nn.Parameter(torch.ones(1)), []
    optimizer = torch.optim.Adam([weight])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # patches optimizer.step
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    new_weight, new, new_calls, new_scheduler = deep_copy((weight, optimizer, calls, scheduler))
    new_weight.grad = torch.ones(1)
    new.step()
    assert (len(new.state), new_calls) == (1, [1])
    assert new.state[new_weight]["exp_avg"].shape == (1,)
    assert new_scheduler.optimizer is new and new._opt_called
    assert (len(optimizer.state), calls, weight.item()) == (0, [], 1.0)
    assert not hasattr(torch.optim.Optimizer, "__deepcopy__")


def test_the_node_that_accumulates_becomes_that_of_the_copy() -> None:
    weight = nn.Parameter(torch.ones(1))
    new_weight, node = deep_copy((weight, find_accumulator(weight)))
    assert node.variable is new_weight


def test_locks_and_modules_are_shared() -> None:
    lock, generator = threading.Lock(), torch.Generator().manual_seed(3)
    new = deep_copy([lock, itertools, generator])
    assert new[:2] == [lock, itertools]
    assert new[2] is not generator and new[2].initial_seed() == 3


def test_what_cannot_be_copied_is_shared_only_where_it_reaches_no_tensor() -> None:
    stream, weight = (number for number in range(3)), torch.ones(1)

    def count() -> Any:
        return next(stream)

    def scale() -> Any:
        return weight * next(stream)

    memo: Memo = {}
    assert deep_copy(count, memo) is count
    assert id(stream) not in memo
    with pytest.raises(TypeError, match="generator"):
        deep_copy(scale)


def test_a_failed_copy_leaves_the_memo_as_it_was() -> None:
    memo: Memo = {}
    deep_copy([1], memo)
    with pytest.raises(TypeError), copy_through_functions(), undo_failed(memo):
        before = dict(memo)
        copy.deepcopy([[2], (number for number in range(3))], memo)
    assert memo == before


def test_a_class_shares_what_it_closes_over() -> None:
    kept: list[int] = []
    weights = [torch.ones(1)]

    class Net(nn.Module):
        def forward(self) -> Any:
            return kept, weights

    assert find_class_state(Net()) == {id(kept): kept}


class Itself(nn.Module):
    def __deepcopy__(self, memo: Memo) -> Itself:
        return self


def test_a_module_is_copied_whatever_it_says() -> None:
    module = Itself()
    with copy_through_functions([module]):
        assert copy.deepcopy(module) is not module
        module.stream = (number for number in range(3))
        assert copy.deepcopy(module) is module
    assert copy.deepcopy(module) is module


def test_deepcopy_is_as_before_afterwards() -> None:
    table = dict(copy._deepcopy_dispatch)  # type: ignore[attr-defined]
    with pytest.raises(KeyError), copy_through_functions():
        raise KeyError
    assert copy._deepcopy_dispatch == table  # type: ignore[attr-defined]
