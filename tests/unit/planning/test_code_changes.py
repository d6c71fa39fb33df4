"""Changes in place and deletions: alone in inference, beside segments in training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.planning.inplace.inplace_changes import find_inplace
from fxmem.planning.model.index import build_index
from fxmem.planning.outcome import measure_plan

pytestmark = pytest.mark.usefixtures("quick_search")

MIB = 1024**2


class Keeps(nn.Module):
    """Keeps a tensor of 4 MiB past its last use, and makes one that could overwrite another."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x * 2.0
        y = kept + 1.0
        z = y.exp()
        return torch.cat([z, z])


def test_inference_takes_all_changes_and_needs_no_limit() -> None:
    """By hand, in units of x (4 MiB): at cat x, kept, y, z and the result of two are alive, 6.

    Without ``kept`` and ``y`` after their last use, and ``exp`` in place of ``y``: x, z and two.
    """
    analysis = fxmem.analyze(Keeps(), ("1024x1024",), mode="infer", device="cpu")
    assert analysis.peak_bytes == 6 * 4 * MIB
    plan = fxmem.plan(analysis)
    assert plan.peak_bytes == 4 * 4 * MIB
    assert plan.segments == ()
    assert plan.overhead == 0
    assert {point.variable for point in plan.dels} <= {"kept", "y"}
    # Without a graph, all changes are for the user's code.
    recorded = fxmem.analyze(Keeps(), ("1024x1024",), mode="infer", device="cpu", frontend="record")
    plan = fxmem.plan(recorded)
    assert (plan.fx_graph, plan.mode, plan.peak_bytes) == (None, "infer", 4 * 4 * MIB)
    with pytest.raises(fxmem.InfeasibleError) as error:
        fxmem.plan(analysis, budget="8MiB")
    assert str(error.value) == (
        "no plan within 8.00 MiB was found; with all changes the step takes 16.00 MiB"
    )


def test_training_lists_changes_beside_the_segments() -> None:
    class Trains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1024, 1024)

        def forward(self, x: Tensor) -> Tensor:
            big = self.linear(x) + 1.0
            small = torch.relu(big)
            return small.sum() + (self.linear(x) * 3.0).sum()

    analysis = fxmem.analyze(Trains(), ("1024x1024",), device="cpu")
    plan = fxmem.plan(analysis, max_overhead_flops=0.5, strategy="schedules")
    assert plan.peak_bytes <= analysis.peak_bytes
    # Autograd keeps neither sum nor product, so relu and the product can take their places.
    assert {(c.node, c.call) for c in plan.inplace} == {("relu", "relu_"), ("mul", "mul_")}
    assert [point.value for point in plan.dels] == ["add"]  # big, unused after relu
    assert all(change.saving_bytes > 0 for change in (*plan.inplace, *plan.dels))


class Chain(nn.Module):
    """Attention scores, scaled and masked: backward keeps none of the three, until softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for inner in self.inner:
            y = inner(x)
            scores = y @ y.transpose(-2, -1)
            x = ((scores / 4.0) + 1.0).softmax(-1) @ y
        return x


class Headed(Chain):
    """The widest result is shifted, and backward needs neither of the two."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 1024, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.head(super().forward(x)) + 1.0).mean(-1)


@pytest.mark.parametrize("style", ["graph", "modules"])
def test_changes_of_training_are_for_the_user_s_code(style: str) -> None:
    analysis = fxmem.analyze(Headed(), ("4x128x16",), device="cpu")
    plan = fxmem.plan(analysis, max_overhead_flops=0.5, style=style)
    alone = [c for c in find_inplace(build_index(analysis.graph)) if c.saving_bytes]
    assert alone and [*plan.inplace] == alone
    assert plan.peak_bytes == measure_plan(analysis, plan)[0]
    assert plan.peak_bytes == measure_plan(analysis, replace(plan, inplace=()))[0]
    applied = fxmem.apply(Headed(), plan)
    assert fxmem.analyze(applied, ("4x128x16",), device="cpu").peak_bytes == plan.peak_bytes
