"""Values that an analysis knows or assumes, and size hints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from running import Runs
from torch import Tensor, nn

import fxmem

Ask = Callable[..., Tensor]


def find_output_shape(ask: Ask, *inputs: object) -> tuple[int, ...] | None:
    weight = nn.Parameter(torch.ones(4, 4))
    model = Runs(lambda net, *inputs: ask(net.weight, *inputs), weight=weight)
    analysis = fxmem.analyze(model, inputs, device="cpu")
    return [node for node in analysis.nodes if node.phase.value == "forward"][-1].shape


def real_output_shape(ask: Ask, *inputs: Tensor) -> tuple[int, ...]:
    return tuple(ask(torch.ones(4, 4), *inputs).shape)


def use_item(weight: Tensor) -> Tensor:
    lengths = torch.ones(3, 5).cumsum(1).long()
    return weight * weight.new_ones(int(lengths.max()) - 1)


def use_in_place(weight: Tensor) -> Tensor:
    count = torch.zeros(4, dtype=torch.int64)
    count[1:].add_(1)  # through a view
    return weight[: int(count.sum())] * 2


USES: dict[str, Ask] = {
    "item": use_item,
    "in place": use_in_place,
    "nonzero": lambda weight: weight[torch.eye(4).sum(0).nonzero().flatten()] * 2,
    "mask": lambda weight: weight[torch.arange(4) > 1] * 2,
    "masked_select": lambda w: w.masked_select(torch.ones_like(w).tril().bool()) * 2,
}


@pytest.mark.parametrize("ask", USES.values(), ids=USES)
def test_shapes_from_constants_are_those_of_a_real_run(ask: Ask) -> None:
    assert find_output_shape(ask) == real_output_shape(ask)


def test_an_integer_input_given_as_a_real_tensor_keeps_its_values() -> None:
    def ask(weight: Tensor, mask: Tensor) -> Tensor:
        return weight[mask.bool()] * 2

    mask = torch.tensor([1, 0, 1, 1])
    assert find_output_shape(ask, mask) == real_output_shape(ask, mask)


@pytest.mark.parametrize("given", ["4:int64", torch.rand(4)])
def test_an_input_without_values_is_refused(given: object) -> None:
    def ask(weight: Tensor, mask: Tensor) -> Tensor:
        return weight[mask > 0] * 2

    with pytest.raises(fxmem.DataDependentError, match=r"^`weight\[mask > 0\]` at test_constants"):
        find_output_shape(ask, given)


def test_a_constant_overwritten_with_data_is_forgotten() -> None:
    def ask(weight: Tensor) -> Tensor:
        mask = torch.zeros(4)
        whole = mask[:]
        mask.copy_(weight.detach()[0])
        return weight[whole > 0] * 2

    with pytest.raises(fxmem.DataDependentError):
        find_output_shape(ask)


def test_activations_are_taken_to_be_finite() -> None:
    def ask(weight: Tensor) -> Tensor:
        healthy = torch.isfinite(weight).all()
        sick = torch.isinf(weight).any() or torch.isnan(weight).any()
        return weight * 2 if healthy and not sick else weight[:1] * 2

    assert find_output_shape(ask) == (4, 4)


def test_a_layer_dropped_at_random_is_there() -> None:
    def ask(weight: Tensor) -> Tensor:
        return weight[:1] * 2 if torch.rand([]) < 0.1 else weight * 2

    assert find_output_shape(ask) == (4, 4)


class DropsLayers(nn.Module):
    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(1) > self.probability:
                x = layer(x)
        return x + torch.rand(1) * torch.isfinite(x).all().item()


DRAW = (
    f"A random draw decides at test_constants.py:{DropsLayers.forward.__code__.co_firstlineno + 2}"
    ": taken as 0.5"
)


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_a_draw_that_decides_is_told_once(mode: str) -> None:
    assert fxmem.analyze(DropsLayers(0.2), "2x4", mode=mode, device="cpu").setup.notes == (
        f"{DRAW}.",
    )


@pytest.mark.parametrize("loss", [None, "mse"])
def test_where_a_draw_drops_everything_it_is_told(loss: str | None) -> None:
    with pytest.raises(fxmem.TraceError) as caught:
        fxmem.analyze(DropsLayers(0.5), "2x4", loss=loss, device="cpu")
    assert caught.value.cause.endswith(f". {DRAW}")
    assert caught.value.hint == "a layer that is dropped with a probability below 0.5 is kept"


Forward = Callable[[Tensor], Tensor]


def make(forward: Forward) -> nn.Module:
    return Runs(lambda net, x: forward(x * net.scale), scale=nn.Parameter(torch.ones(1)))


SEARCHES: dict[str, tuple[Forward, tuple[int, ...]]] = {
    "nonzero": (lambda x: x.nonzero(), (5, 2)),
    "nonzero as a tuple": (lambda x: x.nonzero(as_tuple=True)[1], (5,)),
    "where": (lambda x: torch.where(x > 0)[0], (5,)),
    "mask": (lambda x: x[x > 0], (5,)),
    "mask of rows": (lambda x: x[x[:, 0] > 0], (5, 6)),
    "mask and slice": (lambda x: x[:, x[0] > 0], (4, 5)),
    "masked_select": (lambda x: torch.masked_select(x, x > 0), (5,)),
    "unique": (lambda x: torch.unique(x.detach()), (5,)),
    "unique_consecutive": (lambda x: torch.unique_consecutive(x.detach()), (5,)),
    "bincount": (lambda x: torch.bincount(x.detach().flatten().long()), (5,)),
    "bincount at least": (lambda x: torch.bincount(x.detach()[0].long(), minlength=9), (9,)),
    "repeat_interleave": (lambda x: x.repeat_interleave(x[:, 0].long(), 0), (5, 6)),
    "item": (lambda x: x[: x.argmax(0)[0].item()], (4, 6)),  # type: ignore[misc]
    "item as a shape": (lambda x: x.new_zeros(int(x.argmax())), (5,)),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_finds_as_many_as_was_said(name: str) -> None:
    search, shape = SEARCHES[name]
    analysis = fxmem.analyze(make(search), ("4x6",), size_hint=5, mode="infer", device="cpu")
    assert analysis.nodes[-1].shape == shape


@pytest.mark.parametrize("name", SEARCHES)
def test_without_a_hint_the_line_is_named(name: str) -> None:
    with pytest.raises(fxmem.DataDependentError, match=r"test_constants\.py:\d+ needs tensor"):
        fxmem.analyze(make(SEARCHES[name][0]), ("4x6",), mode="infer", device="cpu")


@pytest.mark.parametrize("hint", [None, 5])
def test_a_float_is_no_size(hint: int | None) -> None:
    with pytest.raises(fxmem.DataDependentError, match=r"test_constants\.py"):
        fxmem.analyze(make(lambda x: x * x.max().item()), ("4x6",), size_hint=hint, device="cpu")


class _AsksForItsGradient(torch.autograd.Function):
    """Skips a product with 1, as losses do that are the end of a model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if torch.equal(gradient, torch.tensor(1.0, device=gradient.device)):
            return gradient.expand(4, 4)
        return gradient.expand(4, 4) * 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_gradient_of_the_loss_is_one(device: str) -> None:
    apply: Any = _AsksForItsGradient.apply
    model = Runs(lambda net: apply(net.weight), weight=nn.Parameter(torch.ones(4, 4)))
    operations = fxmem.analyze(model, (), device=device).graph.operations
    assert not any(operation.name.startswith("aten.mul") for operation in operations)


def test_a_count_is_the_most_that_it_may_be_until_code_branches_on_it() -> None:
    def divide(net: Any, x: Tensor) -> Tensor:
        kept = (x != -100).sum().item()
        return net.weight.sum() / kept + x.new_zeros(kept).sum()

    model = Runs(divide, weight=nn.Parameter(torch.ones(4, 4)))
    analysis = fxmem.analyze(model, ("8:int64",), device="cpu")
    assert any(s.shape == (8,) and s.born >= 0 for s in analysis.graph.storages)
    (note,) = [note for note in analysis.setup.notes if "count" in note]
    assert "test_constants.py" in note and note.endswith("is taken as 8, the most that it may be.")
    hinted = fxmem.analyze(model, ("8:int64",), device="cpu", size_hint=3)
    assert any(storage.shape == (3,) for storage in hinted.graph.storages)

    for ask in (lambda kept: kept > 3, bool, lambda kept: kept / 8 >= 0.5):

        def branch(net: Any, x: Tensor, ask: Any = ask) -> Tensor:
            return net.weight.sum() * (2 if ask((x != -100).sum().item()) else 1)

        with pytest.raises(fxmem.DataDependentError, match="test_constants"):
            fxmem.analyze(Runs(branch, weight=model.weight), ("8:int64",), device="cpu")
