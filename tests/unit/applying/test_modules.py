"""Plans of modules: an object beside the model, which shares everything with it."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sample_nets.wrapped import Block, Model, count_saved, make_plan, wrap
from torch import Tensor, nn

import fxmem
from fxmem.errors import UsageError
from fxmem.planning.plan import Plan, Segment


def test_everything_is_shared_and_the_model_is_left_as_it_was() -> None:
    model = Model()
    states = {name: dict(vars(module)) for name, module in model.named_modules()}
    planned = wrap(model, "first")
    planned(torch.randn(3, 4)).sum().backward()
    assert isinstance(planned, Model) and type(planned).__name__ == "Model"
    assert planned is not model and planned.first is model.first
    assert [*planned.state_dict()] == [*model.state_dict()]
    assert all(map(lambda a, b: a is b, planned.parameters(), model.parameters()))
    assert inspect.signature(planned.forward) == inspect.signature(model.forward)
    for name, module in model.named_modules():
        assert vars(module) == states[name]
    assert not hasattr(model, "plan") and planned.plan.segments
    assert fxmem.unapply(planned) is model


class Telling(Block):
    def __init__(self, runs: list[str], name: str) -> None:
        super().__init__()
        self.notes, self.name = runs, name

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.notes.append(self.name)
        return super().forward(x, scale=scale)


def test_what_is_chosen_runs_again_and_nothing_else() -> None:
    runs: list[str] = []
    model = Model()
    model.first, model.second = Telling(runs, "first"), Telling(runs, "second")
    planned, x = wrap(model, "first"), torch.randn(3, 4)
    assert count_saved(lambda: planned(x)) < count_saved(lambda: model(x))
    runs.clear()
    planned(x).sum().backward()
    assert runs == ["first", "second", "first"]
    runs.clear()
    model(x).sum().backward()
    assert runs == ["first", "second"]


def test_chosen_modules_within_one_run_again_in_its_second_run() -> None:
    runs: list[str] = []
    block = nn.Sequential(Telling(runs, "a"), Telling(runs, "b"))
    model = nn.Sequential(nn.Linear(4, 4), block)
    inner = Segment("a", "b", 1, fqn="1.0", norms=("1.0.norm",))
    segment = Segment("a", "b", 2, fqn="1", norms=("1.0.norm", "1.1.norm"), children=(inner,))
    planned = fxmem.apply(
        copy.deepcopy(model), Plan("", 2, 1, segments=(segment,), style="modules")
    )
    x = torch.randn(3, 4)
    planned[1][0].notes = planned[1][1].notes = runs  # type: ignore[index]
    planned(x).sum().backward()
    assert runs == ["a", "b", "a", "b", "a"]
    model(x).sum().backward()
    for one, other in zip(model.parameters(), planned.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)
    for one, other in zip(model.buffers(), planned.buffers(), strict=True):
        assert torch.equal(one, other)


def test_a_shared_module_within_a_chosen_one_runs_again_under_its_other_name() -> None:
    shared = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    model = nn.Sequential(shared, nn.Sequential(nn.LayerNorm(4), shared))
    inner = Segment("a", "b", 1, fqn="0.1")
    outer = Segment("a", "b", 4, fqn="1", children=(inner,))
    plan = Plan("", 2, 1, segments=(inner, outer), style="modules")
    planned, x = fxmem.apply(copy.deepcopy(model), plan), torch.randn(3, 4)
    planned(x).sum().backward()
    model(x).sum().backward()
    for one, other in zip(model.parameters(), planned.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("prepare", ["eval", "no_grad"])
def test_where_there_is_no_training_nothing_is_checkpointed(prepare: str) -> None:
    model = Model()
    planned, x = wrap(model, "first"), torch.randn(3, 4)
    with torch.set_grad_enabled(prepare == "eval"):
        model.train(prepare == "no_grad")
        assert count_saved(lambda: planned(x)) == count_saved(lambda: model(x))


def test_a_forward_of_the_module_itself_is_what_runs() -> None:
    model = Model()
    model.first.forward = lambda x, scale=1.0: model.first.linear(x) * 2
    own = model.first.forward
    planned, x = wrap(model, "first"), torch.randn(3, 4)
    assert torch.equal(planned(x), model(x))
    assert model.first.forward is own


def test_forward_is_itself_again_after_an_error() -> None:
    planned = wrap(Model(), "first")
    with pytest.raises(RuntimeError):
        planned(torch.randn(3, 5))
    assert "forward" not in vars(planned.first)


def test_a_module_that_was_replaced_is_the_one_that_runs() -> None:
    planned, x = wrap(Model(), "first", "second"), torch.randn(3, 4)
    del planned.second
    planned.first, planned.second = Block(), lambda x: x
    assert count_saved(lambda: planned(x)) < count_saved(lambda: planned.first(x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_planned_and_have_tensors_of_their_own(duplicate: Callable[[Any], Any]) -> None:
    planned, x = wrap(Model(), "first"), torch.randn(3, 4)
    copied = duplicate(planned)
    assert copied.first.linear.weight is not planned.first.linear.weight
    assert count_saved(lambda: copied(x)) == count_saved(lambda: planned(x))
    assert copied.plan == planned.plan
    original = fxmem.unapply(copied)
    assert type(original) is Model and original.first is copied.first
    assert original is not fxmem.unapply(planned)


class Joining(nn.Module):
    """Takes what there is so far, as the layers of a DenseNet do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 4)

    def forward(self, so_far: list[Tensor]) -> Tensor:
        return torch.tanh(self.linear(torch.cat(so_far, 1)))


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Joining(4 * (at + 1)) for at in range(3))

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer in self.layers:
            values.append(layer(values))
        return values[-1]


def test_a_list_that_grows_later_is_taken_as_it_was() -> None:
    torch.manual_seed(0)
    model = Growing()
    other = copy.deepcopy(model)
    planned, x = fxmem.apply(other, make_plan("layers.0", "layers.1")), torch.randn(3, 4)
    for trained in (model, planned):
        trained(x).sum().backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert one.grad is not None and two.grad is not None and torch.equal(one.grad, two.grad)


@pytest.mark.parametrize("fqn", ["third", ""])
def test_a_module_that_is_not_there_is_told(fqn: str) -> None:
    with pytest.raises(UsageError) as caught:
        wrap(Model(), fqn)
    assert str(caught.value) == (
        f"the plan's module {fqn!r} is not in the model (make the plan for this model)"
    )


def test_a_tensor_that_is_not_there_is_told() -> None:
    segment = Segment("a", "b", 2, fqn="first", states=("first.count",))
    plan = Plan("0123", 200, 100, segments=(segment,), style="modules")
    with pytest.raises(UsageError, match=r"^the plan's tensor 'first.count' is not in the model"):
        fxmem.apply(Model(), plan)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_script_is_told() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(UsageError) as caught:
        fxmem.apply(model, make_plan("0"))
    assert str(caught.value) == "0 is a script, which runs as it was compiled"


def test_a_plan_from_a_file_needs_no_inputs_and_checks_those_it_gets() -> None:
    model = Model()
    analysis = fxmem.analyze(model, ("3x4",), device="cpu")
    plan = fxmem.pareto(analysis, style="modules", time_limit_s=1)[0]
    read = Plan.from_json(plan.to_json())
    assert read == plan and read.style == "modules"
    assert isinstance(fxmem.apply(model, read), Model)
    assert isinstance(fxmem.apply(model, read, ("3x4",)), Model)
    with pytest.raises(UsageError, match="the plan was made for other sizes"):
        fxmem.apply(model, read, ("5x4",))
