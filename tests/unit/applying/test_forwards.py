"""Modules with plans run again in backward what was run in forward, once for who looks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from wrapped_models import Block, Model, count_saved, make_plan, wrap

import fxmem
from fxmem.errors import UsageError
from fxmem.planning.plan import Plan, Segment


def test_a_wrapped_module_keeps_less_and_runs_again() -> None:
    model = Model()
    planned = wrap(model, "first")
    x = torch.randn(3, 4)
    assert count_saved(lambda: planned.first(x)) < count_saved(lambda: model.first(x))


def test_what_is_wrapped_runs_again_and_nothing_else() -> None:
    runs: list[str] = []

    class Telling(Block):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            runs.append(self.name)
            return super().forward(x)

    model = Model()
    model.first, model.second = Telling(), Telling()
    model.first.name, model.second.name = "first", "second"
    out = wrap(model, "first")(torch.randn(3, 4))
    assert runs == ["first", "second"]
    out.sum().backward()
    assert runs == ["first", "second", "first"]


@pytest.mark.parametrize("prepare", ["eval", "no_grad"])
def test_where_there_is_no_training_nothing_is_checkpointed(prepare: str) -> None:
    model = Model()
    planned = wrap(model, "first")
    x = torch.randn(3, 4)
    if prepare == "eval":
        planned.eval()
        model.eval()
        assert count_saved(lambda: planned.first(x)) == count_saved(lambda: model.first(x)) > 0
    else:
        with torch.no_grad():
            assert not planned(x).requires_grad
    model.first.eval()
    with torch.no_grad():
        torch.testing.assert_close(planned.first.eval()(x), model.first(x), rtol=0, atol=0)


def test_statistics_are_updated_once_and_gradients_are_the_same() -> None:
    torch.manual_seed(0)
    model = Model()
    other = copy.deepcopy(model)
    planned = wrap(other, "first", "second")
    x = torch.randn(3, 4)
    for trained in (model, planned):
        trained(x, scale=0.5).sum().backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, dict(other.named_buffers())[name])


def test_hooks_stay_outside_of_the_checkpoint() -> None:
    model = Model()
    calls: list[str] = []
    handle = model.first.register_forward_hook(lambda *_: calls.append("hook"))
    planned = wrap(model, "first")
    planned(torch.randn(3, 4)).sum().backward()
    assert calls == ["hook"]
    handle.remove()
    planned(torch.randn(3, 4))
    assert calls == ["hook"]


def test_hooks_that_a_call_installs_are_installed_once() -> None:
    class Watching(Block):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            if not getattr(self, "is_watched", False):
                self.linear.register_forward_hook(lambda *_: calls.append("hook"))
                self.is_watched = True
            return super().forward(x)

    calls: list[str] = []
    model = Model()
    model.first = Watching()
    planned, again = wrap(model, "second"), wrap(model, "second")
    for run in (planned, again, model, planned.eval(), copy.deepcopy(again)):
        calls.clear()
        run(torch.randn(3, 4))
        assert calls == ["hook"]


def test_hooks_within_a_wrapped_module_are_called_once_for_each_call() -> None:
    model = Model()
    calls: list[str] = []
    model.first.linear.register_forward_hook(lambda *_: calls.append("hook"))
    wrap(model, "first")(torch.randn(3, 4)).sum().backward()
    assert calls == ["hook"]


def test_a_functional_call_is_computed_again_with_its_own_tensors() -> None:
    torch.manual_seed(0)
    model = Model()
    planned = wrap(copy.deepcopy(model), "first")
    x, gradients = torch.randn(3, 4), []
    for called in (model, planned):
        tensors = {name: (2 * p).detach() for name, p in model.named_parameters()}
        weight = tensors["first.linear.weight"].requires_grad_()
        torch.func.functional_call(called, tensors, (x,)).sum().backward()
        gradients.append(weight.grad)
    assert torch.equal(*gradients)


def add_layer(block: nn.Module) -> None:
    block.norm = nn.Sequential(block.norm, nn.BatchNorm1d(4))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "parametrization": lambda block: parametrizations.spectral_norm(block.linear),
    "hook": lambda block: nn.utils.spectral_norm(block.linear),
    "layer": add_layer,
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_put_in_afterwards_changes_once_for_each_call(
    change: Callable[[Any], Any], compiled: bool
) -> None:
    model, x = Model(), torch.randn(5, 4)
    planned = wrap(copy.deepcopy(model), "first", "second")
    results = []
    for each in (model, planned, copy.deepcopy(planned)):
        torch.manual_seed(0)
        change(each.first)
        run = torch.compile(each, backend="aot_eager") if compiled else each
        for _ in range(3):
            run(x).square().sum().backward()
        results.append((dict(each.state_dict()), {n: p.grad for n, p in each.named_parameters()}))
        torch._dynamo.reset()
    for state, gradients in results[1:]:
        torch.testing.assert_close(state, results[0][0], rtol=0, atol=0)
        torch.testing.assert_close(gradients, results[0][1], rtol=0, atol=0)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_put_in_afterwards_stays_where_the_plan_comes_off(
    change: Callable[[Any], Any],
) -> None:
    planned = wrap(Model(), "first")
    change(planned.first)
    x = torch.randn(5, 4)
    planned(x).sum().backward()
    expected = planned.eval()(x)
    assert torch.equal(fxmem.unapply(planned)(x), expected)


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.counts = False
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        if self.counts:
            self.count += 1
        return super().forward(x, scale=scale)


def test_a_buffer_that_begins_to_change_is_told_in_backward() -> None:
    model = Model()
    model.first = Counting()
    planned = wrap(model, "first")
    planned(torch.randn(3, 4)).sum().backward()
    planned.first.counts = True
    with pytest.raises(UsageError) as caught:
        planned(torch.randn(3, 4)).sum().backward()
    assert str(caught.value) == (
        "first of the plan changes first.count, which it did not when the plan was made: computed"
        " again in backward, it would do so twice (make the plan for the model as it is now)"
    )


def test_a_normalisation_that_is_taken_away_is_missed_by_nobody() -> None:
    model, x = Model(), torch.randn(5, 4)
    nn.utils.spectral_norm(model.first.linear)
    states = ("first.linear.weight_u",)
    segment = Segment("a", "b", 2, fqn="first", norms=("first.norm",), states=states)
    plan = Plan("0123", 200, 100, segments=(segment,), style="modules")
    planned: Any = fxmem.apply(copy.deepcopy(model), plan)
    for each in (model, planned):
        nn.utils.remove_spectral_norm(each.first.linear)
    expected, got = model.second.eval()(model.first.eval()(x)), planned.eval()(x)
    assert torch.equal(expected, got)
    planned.train()(x).sum().backward()


def test_a_forward_of_the_module_itself_is_what_runs() -> None:
    model = Model()
    module = model.first

    def forward(self: Block, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.linear(x) * 2

    module.forward = forward.__get__(module)  # type: ignore[method-assign]
    planned = wrap(model, "first")
    x = torch.randn(3, 4)
    assert torch.equal(planned.first(x), module.linear(x) * 2)
    assert planned.first.forward.replaced.__self__ is planned.first


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        y = self.linear(x)
        if cache is not None:
            cache.append(y)
        return y


def test_a_cache_that_a_wrapped_module_changes_is_refused() -> None:
    model = nn.Sequential(Caching())
    planned: Any = fxmem.apply(model, make_plan("0"))
    x = torch.randn(2, 4)
    planned[0](x).sum().backward()
    with pytest.raises(UsageError) as caught:
        planned[0](x, cache=[])
    assert str(caught.value) == (
        "0 is given an object, such as a cache, that it or others change: computed again in"
        " backward, it would compute something else (train without a cache (use_cache=False), or"
        " plan with these arguments)"
    )
    with torch.no_grad():
        cache: list[Tensor] = []
        planned[0](x, cache=cache)
    assert len(cache) == 1


class Joining(nn.Module):
    """Takes what there is so far, as the layers of a DenseNet do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 4)

    def forward(self, so_far: Any) -> Tensor:
        values = so_far if isinstance(so_far, list) else so_far.values
        return torch.tanh(self.linear(torch.cat(values, 1)))


class Growing(nn.Module):
    def __init__(self, collect: Callable[[list[Tensor]], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Joining(4 * (at + 1)) for at in range(3))
        self.collect = collect

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        collected = self.collect(values)
        for layer in self.layers:
            values.append(layer(collected))
        return values[-1]


def test_a_list_that_grows_later_is_taken_as_it_was() -> None:
    torch.manual_seed(0)
    model = Growing(lambda values: values)
    other = copy.deepcopy(model)
    planned = fxmem.apply(other, make_plan("layers.0", "layers.1"))
    x = torch.randn(3, 4)
    for trained in (model, planned):
        trained(x).sum().backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]


def test_an_object_that_changes_later_is_told_in_backward() -> None:
    planned = fxmem.apply(Growing(Collected), make_plan("layers.0"))
    out = planned(torch.randn(3, 4))
    with pytest.raises(UsageError, match=r"layers\.0 is given an object"):
        out.sum().backward()


class Collected:
    def __init__(self, values: list[Tensor]) -> None:
        self.values = values


def test_a_wrapped_model_is_exported() -> None:
    model = Model().eval()
    planned = wrap(model, "first").eval()
    x = torch.randn(3, 4)
    exported = torch.export.export(planned, (x,))
    torch.testing.assert_close(exported.module()(x), model(x), rtol=0, atol=0)


def test_a_shallow_copy_of_a_wrapped_module_runs_by_its_own_attributes() -> None:
    planned = wrap(Model(), "first")
    copied, x = copy.copy(planned.first), torch.randn(3, 4)
    copied.norm = nn.Identity()
    expected = Model().first
    expected.norm, expected.linear = copied.norm, copied.linear
    assert torch.equal(copied(x), expected(x))
    assert "__getstate__" not in vars(copied)
