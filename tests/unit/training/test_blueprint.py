"""Steps made of one model: nothing is shared between them, nor with the caller."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from fxmem import analyze
from fxmem.graph import MemoryGraph

F = nn.functional
WIDTH = 64
BATCH_BYTES = 32 * WIDTH * 4


class Autoencoder(nn.Linear):
    """Its target is its input; or what it holds as an attribute."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.target = torch.rand(32, WIDTH)


def list_residents(graph: MemoryGraph) -> dict[str, int]:
    return {s.name: s.nbytes for s in graph.storages if s.born < 0 and s.nbytes == BATCH_BYTES}


@pytest.mark.parametrize(("device", "is_input"), [("cpu", True), ("cuda", True), ("cpu", False)])
def test_a_tensor_that_the_loss_reads_is_counted_once(device: str, is_input: bool) -> None:
    x, y = torch.rand(32, WIDTH), torch.rand(32, WIDTH)
    loss = lambda out: F.mse_loss(out, x if is_input else y)  # noqa: E731
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    graph = analyze(model, (x,), device=device, loss=loss).graph
    names = ["input"] if is_input else ["input", "held by the loss"]
    assert list_residents(graph) == dict.fromkeys(names, BATCH_BYTES)


def test_a_loss_that_reads_the_model_reads_the_copy() -> None:
    model, x = Autoencoder(), torch.rand(32, WIDTH)

    def penalize(out: Tensor) -> Tensor:
        return F.mse_loss(out, model.target) + model.weight.pow(2).sum()

    graph = analyze(model, (x,), device="cpu", loss=penalize).graph
    assert list_residents(graph) == {"input": BATCH_BYTES, "target": BATCH_BYTES}
    gradients = [s.nbytes for s in graph.storages if s.category.name == "GRADIENT"]
    assert gradients == [WIDTH * WIDTH * 4]
    assert model.weight.grad is None


def test_a_tensor_that_the_model_holds_may_be_its_input() -> None:
    model = Autoencoder()
    loss = functools.partial(F.mse_loss, target=model.target)
    graph = analyze(model, (model.target,), device="cpu", loss=loss).graph
    assert list_residents(graph) == {"input": BATCH_BYTES}
