"""The code of planned modules: what is called, what each function takes and gives, which names."""

from __future__ import annotations

import copy
import textwrap
from typing import Any

import pytest
import torch
from leanest import build_module, read_code
from running import Runs
from steps import check_same_step, sum_squares
from torch import Tensor, nn

import fxmem
from fxmem.planning.plan import Segment


class Net(nn.Module):
    """A weight used in two segments, two results of one node, a size, dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch = x.size(0)
        low, high = (self.layer(x) * self.weight).chunk(2, 1)
        y = torch.cat([high, low], 1).view(batch, 8)
        y = self.drop(self.norm(y))
        return torch.tanh(y) * self.weight, y


def build(model: nn.Module, segments: tuple[Segment, ...], *inputs: str) -> nn.Module:
    analysis = fxmem.analyze(model, inputs or ("4x8",), device="cpu")
    return build_module(model, analysis.fx_graph, segments)


def test_each_segment_is_a_function_that_takes_and_gives_what_crosses_it() -> None:
    model = Net()
    inner = (Segment("cat", "norm", 3, norms=("norm",)), Segment("tanh", "tanh", 1))
    outer = Segment("cat", "mul_1", 6, random=True, norms=("norm",), children=inner)
    planned = build(model, (Segment("layer", "chunk", 3), outer))
    assert read_code(planned).strip() == textwrap.dedent(
        """\
        def forward(self, x):
            def segment_1(x):
                layer = self.layer(x);  x = None
                weight = self.weight
                mul = layer.mul(weight);  layer = weight = None
                chunk = mul.chunk(2, 1);  mul = None
                getitem_1 = chunk[0]
                getitem = chunk[1];  chunk = None
                return (getitem_1, getitem)

            def segment_2(getitem, getitem_1, size):
                def segment_2_1(getitem, getitem_1, size):
                    cat = torch.cat([getitem, getitem_1], 1);  getitem = getitem_1 = None
                    view = cat.view(size, 8);  cat = size = None
                    norm = self.norm(view);  view = None
                    return norm

                def segment_2_2(drop):
                    tanh = torch.tanh(drop);  drop = None
                    return tanh

                norm = CHECKPOINT(segment_2_1, getitem, getitem_1, size, norms = (self.norm,));\
  getitem = getitem_1 = size = None
                drop = self.drop(norm);  norm = None
                tanh = CHECKPOINT(segment_2_2, drop)
                weight = self.weight
                mul_1 = tanh.mul(weight);  tanh = weight = None
                return (drop, mul_1)

            size = x.size(0)
            segment_1_results = CHECKPOINT(segment_1, x);  x = None
            getitem_1 = segment_1_results[0]
            getitem = segment_1_results[1];  segment_1_results = None
            segment_2_results = CHECKPOINT(segment_2, getitem, getitem_1, size,\
 norms = (self.norm,));  getitem = getitem_1 = size = None
            drop = segment_2_results[0]
            mul_1 = segment_2_results[1];  segment_2_results = None
            return (mul_1, drop)"""
    ).replace("CHECKPOINT", "fxmem_applying_runtime_checkpoint")
    check_same_step(model, planned, torch.randn(4, 8), loss_of=sum_squares)


class Colliding(nn.Module):
    """Values that are called like segments and what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.segment_2 = nn.Linear(8, 8)
        self.segment_1_results = nn.Linear(8, 8)
        self.checkpoint = nn.Tanh()

    def forward(self, x: Tensor, segment_1: Tensor) -> Tensor:
        y = torch.sin(self.segment_2(x))
        low, high = self.segment_1_results(y).chunk(2, 1)
        z = self.checkpoint(torch.cat([high * low, low], 1))
        return z * segment_1


def test_names_of_values_are_not_those_of_segments() -> None:
    model = Colliding()
    segments = (Segment("segment_2", "sin", 2), Segment("segment_1_results", "chunk", 2))
    planned = build(model, segments, "4x8", "4x8")
    assert "def planned_segment_1(x):" in read_code(planned)
    check_same_step(model, planned, torch.randn(4, 8), torch.randn(4, 8), loss_of=sum_squares)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2 + 0 * x


def raise_to_powers(model: Runs, x: Tensor) -> Tensor:
    """Calls functions of torch whose names do not lead back to them."""
    y = Doubled.apply(model.layer(x)) ** 3
    return 2.0 / (3.0 - torch.exp(y) ** 2)  # type: ignore[no-any-return]


@pytest.mark.parametrize("segments", [(), (Segment("layer", "pow", 3),)], ids=["plain", "segment"])
def test_functions_are_called_whatever_torch_fx_names_them(segments: tuple[Segment, ...]) -> None:
    model = Runs(raise_to_powers, layer=nn.Linear(8, 8))
    planned = build(model, segments)
    x = torch.randn(4, 8)
    check_same_step(model, planned, x, loss_of=sum_squares)
    check_same_step(model, copy.deepcopy(planned), x, loss_of=sum_squares)


def test_a_segment_that_the_graph_lacks_is_told() -> None:
    with pytest.raises(fxmem.UsageError) as caught:
        build(Net(), (Segment("layer", "softmax", 2),))
    assert str(caught.value) == (
        "the plan's node 'softmax' is not in the model"
        " (make the plan for this model and these inputs)"
    )
