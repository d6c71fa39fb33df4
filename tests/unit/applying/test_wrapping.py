"""Models with plans of modules: what they share with the original, and what they refuse."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
import weakref
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from wrapped_models import Block, Model, count_saved, make_plan, wrap

import fxmem
from fxmem.applying.wrapping import find_original
from fxmem.errors import UsageError
from fxmem.planning.plan import Plan

Pair = namedtuple("Pair", "first second")


def test_everything_but_the_objects_is_shared() -> None:
    model = Model()
    planned = wrap(model, "first")
    assert type(planned) is Model and isinstance(planned.first, Block)
    assert [name for name, _ in planned.named_modules()] == [n for n, _ in model.named_modules()]
    assert [*planned.state_dict()] == [*model.state_dict()]
    for one, other in zip(planned.parameters(), model.parameters(), strict=True):
        assert one is other
    for one, other in zip(planned.buffers(), model.buffers(), strict=True):
        assert one is other
    assert inspect.signature(planned.forward) == inspect.signature(model.forward)
    assert inspect.signature(planned.first.forward) == inspect.signature(model.first.forward)
    assert planned.first.forward.__name__ == "forward"


def test_the_model_is_left_as_it_was() -> None:
    model = Model()
    states = {name: dict(vars(module)) for name, module in model.named_modules()}
    planned = wrap(model, "first")
    planned.eval()
    planned.first.runs = 3
    planned.third = nn.Linear(1, 1)
    for name, module in model.named_modules():
        assert vars(module) == states[name]
    assert fxmem.unapply(planned) is model


def test_what_training_changed_comes_back_with_the_model() -> None:
    model = Model()
    model.first.order = [model.second]
    planned = wrap(model, "first")
    planned.first.runs = 3
    planned.second.order = [planned.first]
    planned.second.norm = added = nn.BatchNorm1d(4)
    planned.eval()
    assert fxmem.unapply(planned) is model
    assert model.first.runs == 3
    assert model.first.order[0] is model.second
    assert model.second.order[0] is model.first
    assert model.second.norm is added
    assert not any(module.training for module in (model, model.first, model.second))
    assert not any("forward" in vars(module) for module in model.modules())
    assert not hasattr(model, "plan")


def test_a_weight_that_hooks_replace_is_held_once() -> None:
    model = Model()
    nn.utils.spectral_norm(model.first.linear)
    model(torch.randn(3, 4))
    planned = wrap(model, "first")
    before = weakref.ref(model.first.linear.weight)
    planned(torch.randn(3, 4))
    assert before() is None
    assert model.first.linear.weight is planned.first.linear.weight


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: save_and_load(m)],
)
def test_copies_are_planned_and_have_tensors_of_their_own(
    duplicate: Callable[[Any], Any],
) -> None:
    planned = wrap(Model(), "first")
    copied = duplicate(planned)
    assert type(copied) is Model
    assert copied.first.linear.weight is not planned.first.linear.weight
    assert copied.first.forward.module is copied.first
    assert copied.first.forward.norms == (copied.first.norm,)
    x = torch.randn(3, 4)
    assert count_saved(lambda: copied.first(x)) == count_saved(lambda: planned.first(x))
    original = fxmem.unapply(copied)
    assert original.first.linear.weight is copied.first.linear.weight


def save_and_load(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_move_moves_both() -> None:
    model = Model()
    planned = wrap(model, "first").to(torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert planned(torch.randn(3, 4, dtype=torch.float64)).dtype == torch.float64


def test_a_module_with_two_names_is_one_module() -> None:
    model = Model()
    model.second = model.first
    planned = wrap(model, "first")
    assert planned.first is planned.second
    assert planned.first.forward.fqn == "first"


def test_tied_weights_stay_tied() -> None:
    model = Model()
    model.second.linear.weight = model.first.linear.weight
    planned = wrap(model, "first")
    assert planned.second.linear.weight is planned.first.linear.weight


def test_parametrizations_are_computed_by_the_copies() -> None:
    model = Model()
    parametrizations.weight_norm(model.first.linear)
    planned = wrap(model, "first")
    x = torch.randn(3, 4)
    planned(x).sum().backward()
    assert type(planned.first.linear) is type(model.first.linear)
    assert model.first.linear.parametrizations.weight.original0.grad is not None
    expected = copy.deepcopy(model).train()
    assert torch.equal(planned(x), expected(x))


class Holding(nn.Module):
    """Holds a registered module once more."""

    def __init__(self, hold: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.block = Block()
        self.held = hold(self.block)


@pytest.mark.parametrize(
    ("hold", "take"),
    [
        (lambda m: [m], lambda held: held[0]),
        (lambda m: (m, 1), lambda held: held[0]),
        (lambda m: {"a": [m]}, lambda held: held["a"][0]),
        (lambda m: Pair(m, 2), lambda held: held.first),
        (lambda m: m.forward, lambda held: held.__self__),
        (lambda m: functools.partial(torch.add, m, alpha=2), lambda held: held.args[0]),
        (lambda m: weakref.ref(m), lambda held: held()),
    ],
)
def test_what_holds_a_module_again_holds_the_copy(
    hold: Callable[[nn.Module], Any], take: Callable[[Any], Any]
) -> None:
    model = Holding(hold)
    planned = wrap(model, "block")
    assert take(planned.held) is planned.block
    assert take(model.held) is model.block
    assert type(planned.held) is type(model.held)


def test_a_module_set_past_registration_is_the_copy() -> None:
    model = Holding(lambda module: None)
    model.__dict__["held"] = model.block
    assert vars(wrap(model, "block"))["held"] is not model.block


def test_an_object_that_would_call_the_original_is_refused() -> None:
    class Router:
        def __init__(self, module: nn.Module) -> None:
            self.module = module

    with pytest.raises(UsageError) as caught:
        wrap(Holding(Router), "block")
    assert str(caught.value) == (
        "held (Router) holds the module block, and would go on calling it without the plan (make"
        " it a submodule, or hold it in a list or dict)"
    )


def test_a_function_that_would_call_the_original_is_refused() -> None:
    with pytest.raises(UsageError, match=r"held \(function\) holds the module block"):
        wrap(Holding(lambda module: lambda x: module(x)), "block")


def test_what_knows_the_whole_model_is_shared() -> None:
    class Trainer:
        model: nn.Module

    trainer = Trainer()
    model = Holding(lambda module: trainer)
    trainer.model = model
    planned = wrap(model, "block")
    assert planned.held is trainer


@pytest.mark.parametrize("fqn", ["third", ""])
def test_a_module_that_is_not_there_is_told(fqn: str) -> None:
    with pytest.raises(UsageError) as caught:
        wrap(Model(), fqn)
    assert str(caught.value) == (
        f"the plan's module {fqn!r} is not in the model (make the plan for this model)"
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_script_is_told() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(UsageError) as caught:
        fxmem.apply(model, make_plan("0"))
    assert str(caught.value) == "0 is a script, which runs as it was compiled"


def test_a_plan_on_a_plan_is_told() -> None:
    planned = wrap(Model(), "first")
    with pytest.raises(UsageError) as caught:
        wrap(planned, "second")
    assert str(caught.value) == "a plan was applied to this model (fxmem.unapply it first)"


def test_a_model_without_a_plan_has_no_original() -> None:
    model = Model()
    assert find_original(model) is None
    with pytest.raises(UsageError, match="no plan was applied to this Model"):
        fxmem.unapply(model)


def test_a_plan_from_a_file_needs_no_inputs_and_checks_those_it_gets() -> None:
    model = Model()
    analysis = fxmem.analyze(model, ("3x4",), device="cpu")
    plan = fxmem.pareto(analysis, style="modules", time_limit_s=1)[0]
    read = Plan.from_json(plan.to_json())
    assert read == plan and read.style == "modules"
    assert type(fxmem.apply(model, read)) is Model
    assert type(fxmem.apply(model, read, ("3x4",))) is Model
    with pytest.raises(UsageError, match="the plan was made for other sizes"):
        fxmem.apply(model, read, ("5x4",))
