"""What autograd keeps, for which function, from where to where; and what operators do besides."""

from __future__ import annotations

import torch
from torch import nn

from fxmem import analyze
from fxmem.graph import Category, Effect, MemoryGraph, Phase


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x)))
        return y * torch.sigmoid(y)


def record(model: nn.Module, *inputs: str) -> MemoryGraph:
    return analyze(model, inputs, device="cpu").graph


def test_what_is_saved_dies_with_the_last_function_that_keeps_it() -> None:
    graph = record(Net(), "2x3x8x8")
    for storage in graph.storages:
        kept = [save for save in graph.saves if save.storage == storage.index]
        if storage.category is Category.ACTIVATION:
            assert storage.died == max(save.released or 0 for save in kept)
        for save in kept:
            assert save.unpacked is not None and save.released is not None
            assert save.unpacked <= save.released
            assert graph.operations[save.unpacked].phase is Phase.BACKWARD
            assert save.node in storage.saved_by


def test_an_argument_is_kept_before_its_operator_runs_and_a_result_after_it() -> None:
    graph = record(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), "4x3")
    names = [operation.name for operation in graph.operations]
    tanh = names.index("aten.tanh.default")
    product = names.index("aten.addmm.default", tanh)
    result = graph.nodes[2].results[0]
    positions = [save.position for save in graph.saves if save.storage == result]
    assert positions[0] == tanh + 1  # tanh keeps its result
    assert positions[1] <= product  # the product its argument


def test_results_of_views_and_of_operators_in_place_lie_on_what_they_were_made_from() -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            z = y.view(-1)
            return z.relu_()

    graph = record(nn.Sequential(nn.Linear(2, 2), Views()), "2x2")
    mul, view, relu = (node for node in graph.nodes if node.target in ("mul", "view", "relu_"))
    assert mul.results == view.results == relu.results
    (operation,) = (o for o in graph.operations if o.name == "aten.relu_.default")
    assert operation.writes == mul.results


def test_what_an_operator_draws_on() -> None:
    class Draws(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            own = torch.rand(x.shape, generator=torch.Generator())
            return x * own * torch.rand_like(x)

    graph = record(nn.Sequential(nn.Linear(2, 2), Draws()), "2x2")
    effects = {o.name: o.effect for o in graph.operations if o.name.startswith("aten.rand")}
    assert effects == {
        "aten.rand.generator": Effect.GENERATOR,
        "aten.rand_like.default": Effect.RANDOM,
    }
    assert {o.effect for o in graph.operations} == {None, *effects.values()}


def test_a_copy_that_is_saved_belongs_to_the_function_in_place() -> None:
    """``hardtanh_`` saves a copy of its argument: tools/autograd/derivatives.yaml."""
    graph = record(nn.Sequential(nn.Linear(2, 3), nn.ReLU6(inplace=True)), "4x2")
    (copied,) = (s for s in graph.storages if graph.operations[s.born].name == "aten.clone.default")
    (save,) = (save for save in graph.saves if save.storage == copied.index)
    assert save.released == copied.died
    assert graph.operations[save.released].name == "aten.hardtanh_backward.default"


def test_a_function_returns_before_the_engine_adds_up_gradients_in_its_name() -> None:
    """``addmm``'s own formulas end with a view; torch/csrc/autograd/engine.cpp sums for the bias
    (``validate_outputs``) and adds what comes from elsewhere (``InputBuffer::add``)."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x).tanh()
            return self.layer(y) * y

    graph = record(Shared(), "8x4")
    names = [operation.name for operation in graph.operations]
    y = graph.nodes[2].results[0]
    save = next(s for s in graph.saves if s.storage == y and s.node == 3)
    assert save.returned is not None and save.released is not None
    own = names[save.returned - 2 : save.returned + 1]
    assert own == ["aten.t.default", "aten.mm.default", "aten.t.default"]
    later = names[save.returned + 1 : save.released + 1]
    assert later == ["aten.sum.dim_IntList", "aten.view.default", "aten.add.Tensor"]
