"""The calls of modules as a recording has them."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint
from running import Call
from torch import Tensor, nn

from fxmem import analyze
from fxmem.graph import MemoryGraph, ModuleCall


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        y = self.inner(x).sigmoid()
        if cache is not None:
            cache.append(y)
        return x * y


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.gate(x) + 1)


def record(model: nn.Module) -> MemoryGraph:
    return analyze(model, ("2x4",), device="cpu").graph


def find(graph: MemoryGraph, fqn: str) -> list[ModuleCall]:
    return [call for call in graph.calls if call.fqn == fqn]


def test_each_call_has_its_nodes_and_what_goes_in_and_out() -> None:
    graph = record(Twice())
    names = [node.name for node in graph.nodes]
    first, second = find(graph, "gate")
    assert names[first.start : first.stop] == ["gate.inner", "gate.sigmoid", "gate.mul"]
    assert names[second.start : second.stop] == ["gate.inner_1", "gate.sigmoid_1", "gate.mul_1"]
    assert [graph.storages[index].name for index in first.inputs] == ["x"]
    assert first.results == graph.nodes[first.stop - 1].results
    assert second.inputs == graph.nodes[names.index("add")].results
    assert [call.stop - call.start for call in find(graph, "gate.inner")] == [1, 1]
    assert all(call.obstacle == "" for call in graph.calls)


def test_what_hooks_of_a_module_run_is_no_part_of_its_call() -> None:
    model = Twice()
    model.gate.register_forward_pre_hook(lambda module, args: (args[0].abs(),))
    model.gate.register_forward_hook(lambda module, args, result: result.exp())
    graph = record(model)
    names = [node.name for node in graph.nodes]
    first, _ = find(graph, "gate")
    assert names[first.start : first.stop] == ["gate.inner", "gate.sigmoid", "gate.mul"]
    assert first.inputs == graph.nodes[names.index("gate.abs")].results
    assert first.results == graph.nodes[names.index("gate.mul")].results


class Caching(Twice):
    def forward(self, x: Tensor) -> Tensor:
        cache: list[Tensor] = []
        return self.gate(x, cache=cache) + cache[0]


class ModuleCache(nn.Module):
    """A cache as transformers 4.49 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def append(self, x: Tensor) -> None:
        self.kept.append(x)


class CachingInModule(Twice):
    def forward(self, x: Tensor) -> Tensor:
        cache = ModuleCache()
        return self.gate(x, cache=cache) + cache.kept[0]


class Counting(Gate):
    calls = 0

    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Hidden(Twice):
    def forward(self, x: Tensor) -> Tensor:
        return self.gate(torch.utils.checkpoint.checkpoint(self.gate, x, use_reentrant=False))


def test_obstacles_to_calling_twice_are_told() -> None:
    hooked, counting = Twice(), Twice()
    hooked.gate.inner.register_forward_hook(lambda module, args, result: result.exp())
    counting.gate = Counting()
    for model, fqn, obstacle in (
        (hooked, "gate.inner", "hooks run with it"),
        (
            Caching(),
            "gate",
            "it changes an object that it is given, such as a cache (use_cache=False avoids one)",
        ),
        (
            CachingInModule(),
            "gate",
            "it changes an object that it is given, such as a cache (use_cache=False avoids one)",
        ),
        (counting, "gate", "it changes what its module holds"),
        (Hidden(), "gate", "it is also called where its calls are not seen"),
    ):
        calls = find(record(model), fqn)
        assert calls and all(call.obstacle.startswith(obstacle) for call in calls)


def test_when_the_code_lets_go_is_seen_though_autograd_keeps_it() -> None:
    def hold(x: Tensor) -> Tensor:
        scale = x.sigmoid()
        y = scale.exp()
        z = y.sin()
        del y  # which sin and exp save
        return z.cos() * scale

    model = nn.Sequential(nn.Linear(4, 4), Call(hold), nn.Linear(4, 4))
    graph = record(model)
    by_name = {node.name: graph.let_go[node.results[0]] for node in graph.nodes if node.results}
    at = {o.node: o.index for o in graph.operations[:20] if o.node is not None}
    names = [node.name for node in graph.nodes]
    assert by_name["1.exp"] == at[names.index("1.sin")]
    assert by_name["1.sigmoid"] == at[names.index("1.mul")]
    assert by_name["2"] is None  # the step returns it
