"""The index of a step: readers, lives, saves, and buffers that nodes change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from running import Running
from torch import Tensor
from torch.nn import functional as F

import fxmem
from fxmem.graph import MemoryGraph
from fxmem.planning.model.index import Activation, StepIndex, build_index


def record(
    run: Callable[[Running, Tensor], object], child: Running | None = None, **options: Any
) -> MemoryGraph:
    x = torch.zeros(3, 4, requires_grad=True)
    return fxmem.analyze(Running(run, 4, child), x, device="cpu", **options).graph


def find_activations(step: StepIndex, name: str) -> Activation:
    """The result of the node of that name."""
    node = next(node for node in step.graph.nodes if node.name == name)
    (index,) = node.results
    return step.makers[index]


def name_nodes(step: StepIndex, nodes: Any) -> list[str]:
    return [step.graph.nodes[node].name for node in nodes]


def test_nodes_have_operations_readers_and_saves() -> None:
    def run(m: Running, x: Tensor) -> Tensor:
        y = x.exp()
        return y.sin() + m.same(y).view(12).sum()

    step = build_index(record(run))
    names = name_nodes(step, range(step.nodes))
    assert names == ["x", "exp", "sin", "same", "view", "sum", "add"]
    ran = [[o.name for o in step.list_operations(n, n + 1)] for n in range(step.nodes)]
    assert ran[1:4] == [["aten.exp.default"], ["aten.sin.default"], []]
    assert [step.find_node(start) for start in step.first_operation[1:3]] == [1, 2]
    exp = find_activations(step, "exp")
    assert name_nodes(step, exp.readers) == ["sin", "same", "view", "sum"]
    assert name_nodes(step, [save.node for save in exp.saves]) == ["exp", "sin"]
    assert [save.storage for save in step.saves_by_node[exp.node]] == [exp.index]
    assert exp.held_to is None


def test_results_are_held_to_the_node_s_end_and_temporaries_as_long_as_they_were() -> None:
    step = build_index(record(lambda m, x: F.normalize(x.exp()).sin(), mode="infer"))
    normalize = next(n for n in step.graph.nodes if n.name == "normalize")
    within = [made for made in step.made if made.node == normalize.index]
    last = step.end_operation[normalize.index] - 1
    ends = {made.index: made.local_end for made in within}
    (result,) = normalize.results
    assert ends.pop(result) == last
    died = {i: step.graph.storages[i].died for i in ends}
    assert len(ends) == 2 and ends == died


def test_the_user_s_variables_hold_values_and_a_rewritten_graph_does_not() -> None:
    def run(m: Running, x: Tensor) -> Tensor:
        held = x.exp()
        z = held.sin()
        z = z.cos().tan()
        del held
        return z

    graph = record(run, mode="infer")
    rewritten, own = build_index(graph), build_index(graph, keeps_frames=True)
    names = [
        name_nodes(step, [step.find_node(find_activations(step, "exp").local_end)])
        for step in (rewritten, own)
    ]
    assert names == [["exp"], ["tan"]]


def test_casts_of_parameters_stay_until_autocast_exits() -> None:
    step = build_index(record(lambda m, x: m.layer(m.layer(x)).exp(), autocast="bf16"))
    kept = [made for made in step.made if made.fills_run]
    # Bias, input and weight: leaves that require grad.
    assert sorted(made.nbytes for made in kept) == [4 * 2, 3 * 4 * 2, 4 * 4 * 2]
    assert {made.held_to for made in kept} == {step.end_operation[-1] - 1}
    # Nobody hands them on: each node finds them in the cache.
    assert {made.readers for made in kept} == {()}
    readers = [step.find_node(operation) for operation, _ in step.casts]
    assert name_nodes(step, dict.fromkeys(readers)) == ["layer", "layer_1"]


def test_an_output_outlives_the_step() -> None:
    step = build_index(record(lambda m, x: x.exp().sin(), mode="infer"))
    assert [find_activations(step, name).is_output for name in ("exp", "sin")] == [False, True]


@pytest.mark.parametrize(
    ("run", "statistics", "states"),
    [
        (lambda m, x: m.norm(x), 3, 0),
        (lambda m, x: m.spectral(x), 0, 2),
        (lambda m, x: m.layer(x), 0, 0),
    ],
    ids=["batch norm", "spectral norm", "linear"],
)
def test_buffers_that_nodes_change(
    run: Callable[[Running, Tensor], object], statistics: int, states: int
) -> None:
    step = build_index(record(run))
    assert len({index for found in step.statistics for index in found}) == statistics
    assert len({index for found in step.states for index in found}) == states


def test_an_argument_comes_into_a_call_and_not_into_its_first_module() -> None:
    """The layer, which a child calls first, is not given all that the child is."""
    child = Running(lambda m, pair: m.layer(pair[0]) + pair[1], 4)
    graph = record(lambda m, x: m.child((x, x * 2)), child=child)
    step = build_index(graph, keeps_frames=True)
    calls = {call.fqn: range(call.start, call.stop) for call in graph.calls}
    bias = find_activations(step, "mul")
    ranges = [range(first, last + 1) for first, last in bias.consumers]
    assert ranges == [calls["child"]]
