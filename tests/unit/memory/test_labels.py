"""Labels of storages, on graphs made by hand and against autograd's own tensor hooks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hand_made import make_analysis, make_graph, make_node, memory_graphs
from hypothesis import given
from running import Runs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxmem
from fxmem.analysis import Analysis
from fxmem.fakes.containers import iterate_tensors
from fxmem.graph import Category, MemoryGraph, Operation, Phase, Storage
from fxmem.memory.labels import label_storages
from fxmem.memory.liveness import find_updated
from fxmem.recording.recorder import Recorder


def change(graph: MemoryGraph, index: int, of: str = "operations", **fields: object) -> MemoryGraph:
    changed = list(getattr(graph, of))
    changed[index] = dataclasses.replace(changed[index], **fields)
    return dataclasses.replace(graph, **{of: tuple(changed)})


class TestHandMade:
    def test_storages_are_called_like_what_makes_them(self) -> None:
        labels = label_storages(make_graph())
        assert labels[:10] == (
            *["fc1.weight", "fc2.weight", "norm.running_mean", "fc2.weight.exp_avg_sq", "x"],
            *["empty", "fc1", "block.relu", "fc2", "loss.sum"],
        )
        assert labels[11:14] == ("gradient of fc1", "backward of fc1", "update of fc2.weight")
        again = change(make_graph(), 5, recomputed=True)
        assert label_storages(again)[11] == "recompute of block.relu"

    @pytest.mark.parametrize(
        "fields",
        [{"name": "aten.add.Tensor"}, {"name": "aten.add_.Tensor"}, {"node": 3}, {"reads": ()}],
        ids=["added", "added in place", "not of an input", "not read"],
    )
    def test_what_need_not_be_a_whole_gradient_is_not_called_one(
        self, fields: dict[str, Any]
    ) -> None:
        assert label_storages(change(make_graph(), 6, **fields))[11] == "backward of block.relu"

    def test_a_node_that_runs_nothing_in_backward_hands_the_gradient_on(self) -> None:
        graph = make_graph()
        added = make_node(5, "add", 12, op="call_function", target="add", inputs=(1,))
        relu = dataclasses.replace(graph.nodes[2], inputs=(5,))
        nodes = (*graph.nodes[:2], relu, *graph.nodes[3:], added)
        assert label_storages(dataclasses.replace(graph, nodes=nodes))[11] == "gradient of add"
        for fields in ({"dtype": "bool"}, {"target": "detach"}):
            cut = (*nodes[:5], dataclasses.replace(added, **fields))
            label = label_storages(dataclasses.replace(graph, nodes=cut))[11]
            assert label == "backward of block.relu"

    def test_the_first_gradient_is_made_by_no_node(self) -> None:
        graph = change(make_graph(), 5, node=None, name="aten.ones_like.default")
        graph = change(graph, 11, "storages", node=None, name="")
        assert label_storages(graph)[11] == "gradient of fc1"
        assert label_storages(change(graph, 6, reads=()))[11] == "aten.ones_like"

    def test_the_optimizer_updates_parameters(self) -> None:
        many = change(make_graph(), 7, reads=(0, 3, 10))
        assert label_storages(many)[13] == "update of 2 parameters"
        assert label_storages(change(make_graph(), 7, reads=()))[13] == "aten.sqrt"

    @given(memory_graphs())
    def test_every_storage_of_the_step_has_a_label(self, graph: MemoryGraph) -> None:
        labels = label_storages(graph)
        assert all(label for label, s in zip(labels, graph.storages, strict=True) if s.born >= 0)


class TestUpdated:
    @pytest.mark.parametrize(
        ("reads", "names"),
        [
            ((0,), ("fc1.weight",)),
            ((3,), ("fc2.weight",)),
            ((10, 3, 1), ("fc2.weight",)),
            ((0, 1), ("fc1.weight", "fc2.weight")),
            ((4, 7), ()),
            ((), ()),
        ],
        ids=["value", "state", "one parameter", "two", "neither", "nothing"],
    )
    def test_reads_tell_the_parameter(self, reads: tuple[int, ...], names: tuple[str, ...]) -> None:
        graph = change(make_graph(), 7, reads=reads)
        assert find_updated(graph, graph.operations[7]) == names

    def test_a_temporary_is_followed_to_what_it_was_computed_from(self) -> None:
        graph = make_graph()
        division = Operation(8, "aten.div.Tensor", Phase.OPTIMIZER, reads=(13, 9))
        graph = dataclasses.replace(graph, operations=(*graph.operations, division))
        assert find_updated(graph, division) == ("fc2.weight",)

    def test_the_peak_in_the_optimizer_names_the_parameter(self) -> None:
        analysis = make_analysis(change(make_graph(), 13, "storages", nbytes=2**30))
        assert analysis.peak.parameters == ("fc2.weight",)
        assert analysis.to_dict()["peak"]["parameters"] == ["fc2.weight"]


class Residual(nn.Module):
    """Shortcuts, a node used twice, a view, in-place results and dropout that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(4) for _ in range(3)])
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(4 * 8 * 8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu_(self.dropout(norm(conv(x))) + x)
        wide = torch.cat([x, torch.sigmoid(x)], dim=1)
        return self.head(wide[:, 2:6].flatten(1))


def make_checkpointed(use_reentrant: bool) -> nn.Module:
    def run(model: Any, x: Tensor) -> Any:
        y = torch.sigmoid(model.first(x))
        return checkpoint(model.recompute, y, use_reentrant=use_reentrant) * y

    def recompute(y: Tensor) -> Tensor:
        return torch.sigmoid(model.second(torch.relu(model.first(y))))

    model: Any = Runs(run, first=nn.Linear(8, 8), second=nn.Linear(8, 8), recompute=recompute)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "residual": (Residual, "2x4x8x8"),
    "checkpoint": (lambda: make_checkpointed(False), "4x8"),
    "reentrant checkpoint": (lambda: make_checkpointed(True), "4x8"),
}


@pytest.fixture
def handed_on(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """By storage, the nodes for whose result autograd's own hooks were handed it as gradient."""
    seen: dict[int, set[int]] = {}
    exit_node = Recorder.exit_node

    def exit_and_hook(recorder: Recorder, index: int, result: Any) -> int:
        def see(gradient: Tensor) -> None:
            seen.setdefault(recorder.track(gradient), set()).add(index)

        count = exit_node(recorder, index, result)
        for tensor in iterate_tensors(result):
            if tensor.grad_fn is not None:
                tensor.register_hook(see)
        return count

    monkeypatch.setattr(Recorder, "exit_node", exit_and_hook)
    return seen


def list_temporaries(analysis: Analysis) -> list[Storage]:
    operations = analysis.graph.operations
    return [
        storage
        for storage in analysis.graph.storages
        if storage.category is Category.TEMPORARY
        and storage.born > 0
        and operations[storage.born].phase is Phase.BACKWARD
    ]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_that_autograd_hands_to_hooks(
    name: str, handed_on: dict[int, set[int]]
) -> None:
    build, spec = MODELS[name]
    analysis = fxmem.analyze(build(), (spec,), device="cpu")
    named = {node.name: node.index for node in analysis.nodes}
    checked = 0
    for storage in list_temporaries(analysis):
        what, _, node = analysis.labels[storage.index].partition(" of ")
        if what == "gradient":
            checked += 1
            assert named[node] in handed_on[storage.index], (storage, node)
    # and few are missed: those that autograd adds up first, and has in hand as a part before
    assert checked >= 0.8 * len(set(handed_on) & {s.index for s in list_temporaries(analysis)})


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_makes_again_says_so(use_reentrant: bool) -> None:
    model = make_checkpointed(use_reentrant)
    analysis = fxmem.analyze(model, ("4x8",), optimizer="adam", device="cpu")
    made_again = [
        analysis.graph.operations[storage.born].name
        for storage in list_temporaries(analysis)
        if analysis.labels[storage.index] == "recompute of checkpoint"
    ]
    run = ["aten.addmm.default", "aten.relu.default", "aten.addmm.default", "aten.sigmoid.default"]
    assert made_again == run
    recomputed = [o for o in analysis.graph.operations if o.recomputed]
    assert {o.phase for o in recomputed} == {Phase.BACKWARD}
    names = [o.name for o in recomputed if "detach" not in o.name]
    assert [name for name in names if name != "aten.t.default"] == run
    assert names.count("aten.t.default") == 2


def test_without_a_checkpoint_nothing_is_computed_again() -> None:
    analysis = fxmem.analyze(nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), ("4x8",), device="cpu")
    assert not any(o.recomputed for o in analysis.graph.operations)


@pytest.mark.parametrize(
    ("foreach", "labels"),
    [
        (False, {"update of 0.weight", "update of 2.weight"}),
        (True, {"update of 2 parameters"}),
    ],
)
def test_the_update_of_each_parameter_or_of_all(foreach: bool, labels: set[str]) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 8, bias=False))
    analysis = fxmem.analyze(
        model,
        ("4x8",),
        optimizer=lambda params: torch.optim.Adam(params, foreach=foreach),
        device="cpu",
    )
    operations = analysis.graph.operations
    found = {
        analysis.labels[storage.index]
        for storage in analysis.graph.storages
        if storage.category is Category.TEMPORARY
        and operations[storage.born].phase is Phase.OPTIMIZER
        and storage.shape == (8, 8)
    }
    assert found == labels


def test_the_gradient_of_the_loss_is_named() -> None:
    analysis = fxmem.analyze(nn.Linear(8, 8), ("4x8",), loss="mse", device="cpu")
    (first,) = (s for s in list_temporaries(analysis) if s.nbytes == 4)
    assert analysis.labels[first.index] == "gradient of loss.mse_loss"
