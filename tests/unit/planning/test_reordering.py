"""What may run before what, and what becomes of a step in another order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from branched_nets import TwoBranches
from torch import Tensor, nn

import fxmem
from fxmem.analysis import Analysis
from fxmem.api import analyze
from fxmem.applying.checkpointing import build_module
from fxmem.planning import fx_nodes
from fxmem.planning.applied import apply_plan
from fxmem.planning.facts import gather_facts
from fxmem.planning.outcome import trace_plan
from fxmem.planning.plan import Plan, Reorder
from fxmem.planning.reordering import build_program, reorder_nodes
from fxmem.tracing.fxgraph import NODE


class Runs(nn.Module):
    """Nothing but a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(8, 8))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def analyse(function: Any) -> Analysis:
    result: Analysis = analyze(Runs(function), (torch.zeros(8, 8),), device="cpu", mode="infer")
    return result


def list_before(function: Any, name: str) -> set[str]:
    """The nodes that a node has to stay behind, directly or not."""
    analysis = analyse(function)
    facts = gather_facts(analysis.graph)
    tasks = build_program(facts, fx_nodes.iterate_precedences(analysis.fx_graph)).tasks
    names = [node.name for node in facts.graph.nodes[: facts.nodes]]
    waiting, found = [names.index(name)], set[int]()
    while waiting:
        after = tasks[waiting.pop()].after - found
        found |= after
        waiting += after
    return {names[index] for index in found}


def test_the_key_of_traced_nodes_is_that_of_the_trace() -> None:
    assert fx_nodes.NODE == NODE


def test_branches_may_run_in_either_order() -> None:
    assert list_before(lambda _, x: x.sin() + x.cos(), "cos") == {"x"}
    assert list_before(lambda _, x: x.sin() + x.cos(), "add") == {"x", "sin", "cos"}


@pytest.mark.parametrize(
    ("function", "node", "other"),
    [
        pytest.param(
            lambda _, x: torch.rand_like(x) + torch.bernoulli(x),
            "bernoulli",
            "rand_like",
            id="random",
        ),
        pytest.param(lambda m, x: (m.kept + x) * m.kept.add_(1), "add_", "add", id="written"),
        pytest.param(lambda m, x: m.kept.add_(1).sum() * (m.kept + x), "add", "add_", id="read"),
        pytest.param(
            lambda _, x: (lambda y: (y.reshape(64).cos(), y.relu_()))(x.t().sin()),
            "relu_",
            "reshape",
            id="what other sizes may share",
        ),
        pytest.param(
            lambda _, x: (lambda y: x.new_zeros(y.shape[0] + 1))(torch.cat([x.sin(), x])),
            "new_zeros",
            "cat",
            id="sizes",
        ),
    ],
)
def test_what_stays_behind_another(function: Any, node: str, other: str) -> None:
    assert other in list_before(function, node)


def test_what_depends_on_no_input_stays_between_the_nodes_around_it() -> None:
    def run(module: Any, x: Tensor) -> Tensor:
        y = x.sin().cos()
        return (y + module.kept.exp()).tan()

    assert list_before(run, "exp") == {"x", "sin", "cos"}


def test_the_step_in_another_order_is_that_of_code_in_that_order() -> None:
    def run(_: Any, x: Tensor) -> Tensor:
        return x.sin() + torch.cat([x, x]).exp()[:8]

    def run_in_order(_: Any, x: Tensor) -> Tensor:
        other = torch.cat([x, x]).exp()[:8]
        return x.sin() + other

    analysis = analyse(run)
    move = Reorder("cat", "getitem", 3, before="sin")
    graph = reorder_nodes(analysis.graph, [move])
    expected = apply_plan(analyse(run_in_order), Plan("", 0, 0))
    moved = apply_plan(analysis, Plan("", 0, 0, reorders=(move,)))
    assert [node.name for node in graph.nodes] == ["x", "cat", "exp", "getitem", "sin", "add"]
    assert [[graph.nodes[i].name for i in node.inputs] for node in graph.nodes] == [
        *([], ["x"], ["cat"], ["exp"], ["x"]),
        ["sin", "getitem"],
    ]
    assert [o.name for o in moved.operations] == [o.name for o in expected.operations]
    assert [(s.nbytes, s.born, s.died) for s in moved.storages] == [
        (s.nbytes, s.born, s.died) for s in expected.storages
    ]


def test_a_traced_plan_says_which_operations_its_own_are() -> None:
    analysis = analyze(TwoBranches(), ("1x3x64x64",), device="cpu", mode="infer")
    planned = trace_plan(analysis, fxmem.plan(analysis))
    assert planned is not None
    names = [operation.name for operation in analysis.graph.operations]
    assert [names[index] for index, _ in planned.order] == [
        operation.name.replace("_.", ".") for operation in planned.analysis.graph.operations
    ]
    assert [index for index, _ in planned.order] == [0, 2, 3, 1, 4, 5, 6]


@pytest.mark.parametrize(
    "run",
    [lambda _, x: x.sin() + x.cos(), lambda _, x: x.sin().cos().tan()],
    ids=["alike", "a chain"],
)
def test_nothing_is_moved_where_nothing_is_gained(run: Any) -> None:
    assert fxmem.plan(analyse(run)).reorders == ()


def test_training_is_not_reordered() -> None:
    analysis = analyze(TwoBranches(), ("1x3x64x64",), device="cpu")
    assert fxmem.plan(analysis, max_overhead=0.0).reorders == ()


def test_a_move_of_a_node_that_is_not_there_is_refused() -> None:
    model = Runs(lambda _, x: x.sin() + x.cos())
    graph = analyze(model, (torch.zeros(8, 8),), device="cpu", mode="infer").fx_graph
    with pytest.raises(fxmem.UsageError, match="the plan's node 'tan' is not in the model"):
        build_module(model, graph, (), (), [Reorder("tan", "tan", 1, before="sin")], mode="infer")
