"""Recorded steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from running import Runs
from torch import Tensor, nn

import fxmem
from fxmem.analysis import Analysis
from fxmem.graph import RESIDENT, Category, Phase


def build(body: Callable[..., Any]) -> Any:
    """Makes a model of a function, with a frozen layer, a buffer and an unregistered tensor."""
    first, frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
    table = nn.Buffer(torch.zeros(4))
    return Runs(body, first=first, frozen=frozen, table=table, plain=torch.ones(4), cache=None)


def default(net: Any, x: Tensor) -> Tensor:
    result: Tensor = net.frozen(net.first(x) + net.table + net.plain).relu()
    return result


def analyse(body: Callable[..., Any] = default, *args: Any, **settings: Any) -> Analysis:
    return fxmem.analyze(build(body), args or ("8x4",), device="cpu", **settings)


def names_of(analysis: Analysis, category: Category, *, resident: bool = True) -> set[str]:
    return {
        s.name
        for s in analysis.graph.storages
        if s.category is category and (s.born == RESIDENT) is resident
    }


PARAMETERS = ["first.weight", "first.bias", "frozen.weight", "frozen.bias"]
ADAM_STATES = {
    f"first.{parameter}.{state}"
    for parameter in ("weight", "bias")
    for state in ("step", "exp_avg", "exp_avg_sq")
}


def test_what_is_resident_is_named() -> None:
    analysis = analyse(optimizer="adam", loss="mse")
    assert names_of(analysis, Category.PARAMETER) == set(PARAMETERS)
    assert names_of(analysis, Category.BUFFER) == {"table", "plain"}
    assert names_of(analysis, Category.INPUT) == {"args_0", "target"}
    assert names_of(analysis, Category.OPTIMIZER_STATE) == ADAM_STATES


def test_a_module_s_own_tensors_are_allocated_after_its_children_s() -> None:
    analysis = analyse(mode="infer")
    order = [
        analysis.graph.storages[at].name for at, _ in analysis.graph.warmup[:5] if at is not None
    ]
    assert order == [*PARAMETERS, "table"]


def test_gradients_are_made_in_the_step_and_not_for_what_is_frozen() -> None:
    analysis = analyse()
    assert names_of(analysis, Category.GRADIENT) == set()
    assert names_of(analysis, Category.GRADIENT, resident=False) == {
        "first.weight.grad",
        "first.bias.grad",
    }
    assert analysis.gradient_bytes == 20 * 4


def test_an_input_that_requires_grad_gets_one() -> None:
    x = torch.zeros(8, 4, requires_grad=True)
    analysis = analyse(default, x)
    assert "args_0.grad" in names_of(analysis, Category.GRADIENT, resident=False)
    assert x.grad is None


def test_inference_has_one_phase_and_saves_nothing() -> None:
    analysis = analyse(mode="infer", optimizer="adam")
    assert {operation.phase for operation in analysis.graph.operations} == {Phase.FORWARD}
    assert analysis.saved == () and analysis.optimizer_state_bytes == 0
    assert analysis.breakdown[Category.GRADIENT] == 0


def test_output_and_loss_outlive_the_step() -> None:
    analysis = analyse()
    kept = [s for s in analysis.graph.storages if s.category is Category.OUTPUT and not s.died]
    assert {s.name for s in kept} >= {"loss"}
    last = max(s.died or 0 for s in analysis.graph.storages)
    assert last < len(analysis.graph.operations)
    saved_output = [s for s in analysis.graph.storages if s.name == "output"]
    assert [(s.shape, s.died, s.category) for s in saved_output] == [
        ((8, 4), None, Category.ACTIVATION)  # relu saves its own result
    ]


def test_a_cache_that_the_model_keeps_is_resident_and_replaced() -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        y: Tensor = net.first(x)
        net.cache = [y.detach() * 2]
        return y

    analysis = analyse(body)
    storages = analysis.graph.storages
    (old,) = (s for s in storages if s.name == "held by cache")
    (new,) = (s for s in storages if s.category is Category.TEMPORARY and s.died is None)
    assert (old.category, old.born, old.shape) == (Category.BUFFER, RESIDENT, (8, 4))
    assert old.died is not None and new.shape == (8, 4)


def test_a_reference_cycle_lives_to_the_end_of_its_step() -> None:
    class Ring:
        def __init__(self, held: Tensor) -> None:
            self.held, self.me = held, self

    def body(net: Any, x: Tensor) -> Tensor:
        y: Tensor = net.first(x)
        Ring(y.detach() * 2)
        return y

    analysis = analyse(body)
    left = [s for s in analysis.graph.storages if s.category is Category.TEMPORARY and not s.died]
    assert [s.shape for s in left] == [(8, 4)]
    assert names_of(analysis, Category.BUFFER) == {"table", "plain"}  # none of the first step


def test_the_steady_step_is_reported() -> None:
    """A model that does more the first time."""

    def body(net: Any, x: Tensor) -> Tensor:
        if net.cache is None:
            net.cache = torch.zeros(1000)
        y: Tensor = net.first(x) + net.cache[0]
        return y

    analysis = analyse(body)
    assert "zeros" not in {node.target for node in analysis.nodes}
    assert analysis.buffer_bytes == (4 + 4 + 1000) * 4


def test_recordings_of_one_model_are_equal() -> None:
    assert analyse(optimizer="adam").graph == analyse(optimizer="adam").graph


def test_what_hooks_reach_is_resident_and_named() -> None:
    net = build(default)
    optimizer = torch.optim.Adam(net.first.parameters())
    mask = torch.ones(4, 4)
    net.first.weight.register_hook(lambda grad: grad * mask)

    def update(parameter: Tensor) -> None:
        if parameter is net.first.weight:
            optimizer.step()
            optimizer.zero_grad()

    for parameter in net.first.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    net.spare = [torch.ones(9, requires_grad=True)]
    net.spare[0].grad = torch.ones(9)
    analysis = fxmem.analyze(net, ("8x4",), device="cpu")
    assert names_of(analysis, Category.OPTIMIZER_STATE) == ADAM_STATES
    assert analysis.optimizer_state_bytes == 2 * 20 * 4 + 2 * 4
    assert names_of(analysis, Category.BUFFER) == {
        "table",
        "plain",
        "held by first.weight",
        "held by spare",
    }
    assert names_of(analysis, Category.GRADIENT) == {"held by spare.grad"}
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not optimizer.state


@pytest.mark.parametrize("kind", [torch.optim.ASGD, torch.optim.Adafactor])
def test_an_optimizer_in_backward_may_ask_for_values(kind: Any) -> None:
    net = build(default)
    optimizer = kind(net.first.parameters())
    net.first.weight.register_post_accumulate_grad_hook(lambda p: optimizer.step() and None)
    assert fxmem.analyze(net, ("8x4",), device="cpu").optimizer_state_bytes > 0


def test_the_lines_of_the_first_step_are_those_of_the_second() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.ReLU(), nn.Linear(16, 4))
    graph = fxmem.analyze(model, ("4x8",), optimizer="adam", device="cuda").graph
    *twins, of_optimizer = graph.first_operations
    assert of_optimizer.phase is Phase.OPTIMIZER
    assert len(twins) > 10
    for first in twins:
        assert first.twin is not None
        assert graph.operations[first.twin].phase is first.phase
