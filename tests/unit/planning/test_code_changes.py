"""Plans of what the code could do: for inference all together, for training beside the segments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxmem

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
    plan = fxmem.plan(analysis, max_overhead=0.5, time_limit_s=1)
    assert plan.peak_bytes <= analysis.peak_bytes
    # Autograd keeps neither sum nor product, so relu and the product can take their places.
    assert {(c.node, c.call) for c in plan.inplace} == {("relu", "relu_"), ("mul", "mul_")}
    assert [point.value for point in plan.dels] == ["add"]  # big, unused after relu
    assert all(change.saving_bytes > 0 for change in (*plan.inplace, *plan.dels))
