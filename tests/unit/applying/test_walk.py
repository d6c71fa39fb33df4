"""What each call asks of a model's modules: as if it walked them all."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.flop_counter import FlopCounterMode

from fxmem.applying.walk import Walk


def make() -> nn.Sequential:
    block = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.BatchNorm1d(2))
    return nn.Sequential(block, nn.Linear(2, 2), nn.Sequential(), block)


def describe(tensor: torch.Tensor) -> tuple[torch.dtype, bool, torch.Size]:
    return tensor.dtype, tensor.requires_grad, tensor.shape


def replace(model: nn.Module) -> None:
    model[0][1] = nn.Linear(2, 2).double()  # type: ignore[index]


def add(model: nn.Module) -> None:
    model[2].append(nn.Linear(2, 2).half())  # type: ignore[index]


def add_to_a_leaf(model: nn.Module) -> None:
    weight_norm(model[1])  # type: ignore[index]


def remove(model: nn.Module) -> None:
    del model[0][0]  # type: ignore[index]


@pytest.mark.parametrize("change", [replace, add, add_to_a_leaf, remove])
def test_changed_modules_are_seen(change: Any) -> None:
    model = make()
    walk = Walk(model)
    change(model)
    assert walk.update()
    assert walk.modules == [*model.modules()]
    assert {*walk.list_kinds()} == {describe(t) for t in (*model.parameters(), *model.buffers())}
    tables = [t for m in model.modules() for t in (m._parameters, m._buffers, m._modules) if t]
    assert {*map(id, walk.list_tables())} == {*map(id, tables)}


def test_it_is_walked_again_only_where_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(make())
    monkeypatch.setattr(walk, "_model", None)
    assert not walk.update()


def test_tensors_put_in_place_of_others_are_seen() -> None:
    model = make()
    walk = Walk(model)
    model[1].weight = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    assert describe(model[1].weight) in walk.list_kinds()


@pytest.mark.parametrize(
    ("hooked", "entered", "found"),
    [
        ("0", ("0",), "0"),
        ("3", ("0",), "0"),  # the same module
        ("0", ("2",), ""),
        ("1", ("0",), ""),
        ("", ("0",), ""),
    ],
)
def test_hooks_are_seen_where_a_graph_does_not_call_the_module(
    hooked: str, entered: tuple[str, ...], found: str
) -> None:
    model = make()
    walk = Walk(model, entered)
    handle = model.get_submodule(hooked).register_full_backward_hook(lambda *_: None)
    assert walk.find_hooked() == found
    handle.remove()
    assert walk.find_hooked() == ""


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_walks_the_copy(make_copy: Any) -> None:
    model = make()
    model.walk = Walk(model)
    copied = make_copy(model)
    copied.walk.update()
    assert copied.walk.modules == [*copied.modules()]


@pytest.mark.parametrize(("entered", "found"), [((), ""), (("2", "0"), "0")])
def test_hooks_on_all_modules_are_for_those_that_a_graph_does_not_call(
    entered: tuple[str, ...], found: str
) -> None:
    walk = Walk(make(), entered)
    assert walk.find_unseen() == ""
    handle = nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        assert walk.find_unseen() == found
    finally:
        handle.remove()
    with FlopCounterMode(display=False):
        assert walk.find_unseen() == ""
