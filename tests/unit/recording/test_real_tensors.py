"""Real tensors that the code of a class takes from a global or a closure of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.graph import RESIDENT, Category

HELD: dict[str, Any] = {}


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = HELD["compute"](self.linear(x))
        return result


@pytest.fixture(autouse=True)
def _nothing_held() -> Any:
    yield
    HELD.clear()


def analyse(compute: Any, **held: Any) -> fxmem.Analysis:
    HELD.update(held, compute=compute)
    return fxmem.analyze(Takes(), ("3x4",), device="cpu")


@pytest.mark.parametrize("requires_grad", [False, True])
def test_it_is_resident_once_and_left_alone(requires_grad: bool) -> None:
    weight = torch.ones(4, 50, requires_grad=requires_grad)
    analysis = analyse(lambda x: x @ HELD["weight"], weight=weight)
    sizes = [s.nbytes for s in analysis.graph.storages if s.born == RESIDENT]
    assert sizes.count(4 * 50 * 4) == 1 + requires_grad  # and the gradient, which nobody zeroes
    assert weight.grad is None and torch.equal(weight.detach(), torch.ones(4, 50))
    named = {s.shape: s.category for s in analysis.graph.storages if s.born == RESIDENT}
    assert named[(4, 50)] is Category.BUFFER


def test_a_gradient_that_it_has_stays() -> None:
    weight = torch.ones(4, 50, requires_grad=True)
    weight.grad = torch.ones(4, 50)
    analyse(lambda x: x @ HELD["weight"], weight=weight)
    assert torch.equal(weight.grad, torch.ones(4, 50))


def test_its_value_is_known_and_not_changed() -> None:
    def compute(x: Tensor) -> Tensor:
        HELD["count"].add_(1)
        return x.exp() if HELD["count"] > 2 else x[HELD["mask"]]

    count, mask = torch.tensor(5.0), torch.tensor([True, False, True])
    analysis = analyse(compute, count=count, mask=mask)
    assert "exp" in {node.target for node in analysis.nodes}
    assert count.item() == 5.0
    analysis = analyse(compute, count=torch.tensor(-9.0), mask=mask)
    assert [node.shape for node in analysis.nodes if node.target == "getitem"] == [(2, 4)]
