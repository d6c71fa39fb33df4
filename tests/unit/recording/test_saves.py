"""Saves: which functions of autograd keep and release which storages; the user's references."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from measuring.profiled import list_changes
from running import Call, Runs
from torch import Tensor, nn

from fxmem import analyze
from fxmem import record as record_steps
from fxmem.graph import Category, Effect, MemoryGraph, Phase


def record(model: nn.Module, *inputs: str) -> MemoryGraph:
    return analyze(model, inputs, device="cpu").graph


def test_what_is_saved_dies_with_the_last_function_that_keeps_it() -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        y = torch.relu(net.norm(net.conv(x)))
        return y * torch.sigmoid(y)

    graph = record(Runs(run, conv=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8)), "2x3x8x8")
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
    views = Call(lambda x: (x * 2).view(-1).relu_())
    graph = record(nn.Sequential(nn.Linear(2, 2), views), "2x2")
    mul, view, relu = (node for node in graph.nodes if node.target in ("mul", "view", "relu_"))
    assert mul.results == view.results == relu.results
    (operation,) = (o for o in graph.operations if o.name == "aten.relu_.default")
    assert operation.writes == mul.results


def test_what_an_operator_draws_on() -> None:
    def draw(x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=torch.Generator()) * torch.rand_like(x)

    graph = record(nn.Sequential(nn.Linear(2, 2), Call(draw)), "2x2")
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

    def share(net: Any, x: Tensor) -> Any:
        y = net.layer(x).tanh()
        return net.layer(y) * y

    graph = record(Runs(share, layer=nn.Linear(4, 4)), "8x4")
    names = [operation.name for operation in graph.operations]
    y = graph.nodes[2].results[0]
    save = next(s for s in graph.saves if s.storage == y and s.node == 3)
    assert save.returned is not None and save.released is not None
    own = names[save.returned - 2 : save.returned + 1]
    assert own == ["aten.t.default", "aten.mm.default", "aten.t.default"]
    later = names[save.returned + 1 : save.released + 1]
    assert later == ["aten.sum.dim_IntList", "aten.view.default", "aten.add.Tensor"]


@pytest.mark.parametrize(
    ("layer", "saver", "is_copy"),
    [
        (nn.ReLU(inplace=True), "aten.threshold_backward.default", False),
        (nn.LeakyReLU(inplace=True), "aten.leaky_relu_backward.default", False),
        (nn.ReLU6(inplace=True), "aten.hardtanh_backward.default", True),
    ],
)
def test_what_runs_in_place_on_a_view_lets_go_with_what_copies_its_gradient(
    layer: nn.Module, saver: str, is_copy: bool
) -> None:
    """Instance normalisation returns a view; ``CopySlices::apply`` runs the layer's backward, in
    torch/csrc/autograd/functions/tensor.cpp, on a copy of the view's gradient."""
    layers = (nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), layer, nn.Conv2d(4, 2, 3))
    graph = record(nn.Sequential(*layers), "2x3x8x8")
    names = [operation.name for operation in graph.operations]
    (norm,) = (node for node in graph.nodes if node.target == "InstanceNorm2d")
    (save,) = (s for s in graph.saves if s.node == norm.index + 1)
    assert (save.storage not in norm.results) is is_copy
    assert save.unpacked is not None and save.released is not None
    runs = [graph.operations[save.unpacked + at] for at in (-1, 0, 1)]
    assert {operation.autograd_node for operation in runs} == {"torch::autograd::CopySlices"}
    assert runs[0].name == "aten.clone.default"
    assert saver in [operation.name for operation in runs]
    assert names[save.released] == "aten.copy_.default"
    assert save.released == graph.storages[save.storage].died


def test_the_gradient_of_a_view_that_was_changed_is_a_new_tensor() -> None:
    """``AsStridedBackward0`` of eager: ``as_strided_backward`` in FunctionsManual.cpp."""

    def add(x: Tensor) -> Tensor:
        return x + torch.relu_((x * 2).view(2, 32)).view_as(x)

    model, x = nn.Sequential(nn.Linear(8, 8), Call(add)), torch.randn(8, 8)
    made = [s for s in record(model, "8x8").storages if s.nbytes == 256 and s.born >= 0]
    model(x).sum().backward()
    with torch.profiler.profile(profile_memory=True) as prof:
        model(x).sum().backward()
    assert len(made) == [nbytes for _, nbytes in list_changes(prof)].count(x.nbytes)


def measure_under(hooks: Any) -> int:
    with record_steps(gpu="h100", steps=1) as recording, hooks:
        result = torch.ones(1 << 20).cuda().requires_grad_()
        for _ in range(8):
            result = result.sin()
        result.sum().backward()
    return recording.steps[0].peak_bytes


def test_hooks_of_the_code_name_devices_and_pin_memory() -> None:
    """PyTorch's ``save_on_cpu``, as its documentation has it, and hooks that compress."""
    graph = torch.autograd.graph

    def pack(tensor: Tensor) -> Any:
        return tensor.half(), torch.as_tensor([1.0]).to("cuda")

    def unpack(packed: Any) -> Tensor:
        return packed[0].float() * packed[1]  # type: ignore[no-any-return]

    whole = measure_under(contextlib.nullcontext())
    moved = measure_under(graph.save_on_cpu(pin_memory=True))
    halved = measure_under(graph.saved_tensors_hooks(pack, unpack))
    assert moved < halved < whole
