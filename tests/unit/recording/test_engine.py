"""Where eager works in place, checked against the allocator of a real step that nobody watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxmem
from benchmarks.cases import Case, Spec
from benchmarks.measure import measure_allocator

ROWS, COLUMNS = 64, 256


class OnWeight(nn.Module):
    """A function of the input times a weight, so that backward has a gradient to pass on."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.rand(ROWS, COLUMNS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight)


class AddsInPython(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        doubled = grads[0] * 2
        return doubled + grads[0].exp()  # Python's own: always new memory


def zeros(columns: int) -> torch.Tensor:
    return torch.zeros(ROWS, columns, dtype=torch.int64)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "two gradients meet": lambda x: x.sin() * x.cos(),
    "a gradient that others hold": lambda x: x + x.relu() + x.sin() * x.cos(),
    "expanded gradient": lambda x: x.sum(1, keepdim=True).expand(-1, COLUMNS) + x.exp(),
    "gather": lambda x: x.gather(1, zeros(2 * COLUMNS)),
    "sort": lambda x: x.sort(1)[0],
    "scatter_reduce": lambda x: torch.zeros(ROWS, 9).scatter_reduce(1, zeros(COLUMNS), x, "amax"),
    "index": lambda x: x[torch.zeros(96, dtype=torch.int64)],
    "added in Python": lambda x: AddsInPython.apply(x),
    "scatter in forward": lambda x: torch.zeros_like(x).scatter(1, zeros(COLUMNS), x),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_peak_is_that_of_the_allocator(name: str) -> None:
    case = Case(name, lambda: OnWeight(FUNCTIONS[name]), (Spec((ROWS, COLUMNS)),))
    real_bytes = measure_allocator(case, "train")["peak_bytes"]
    analysis = fxmem.analyze(case.model(), (f"{ROWS}x{COLUMNS}",), device="cpu")
    # A Python number becomes a tensor of up to 16 bytes on its way into an operator.
    assert abs(analysis.peak_bytes - real_bytes) <= 16


class Gradient(OnWeight):
    """A gradient that forward computes itself, as of an energy by its coordinates."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            output = super().forward(x)
            return torch.autograd.grad(output.sum(), self.weight)[0]


@pytest.mark.parametrize("name", ["two gradients meet", "gather"])
def test_the_peak_of_a_backward_inside_forward_is_that_of_the_allocator(name: str) -> None:
    case = Case(name, lambda: Gradient(FUNCTIONS[name]), (Spec((ROWS, COLUMNS)),))
    real_bytes = measure_allocator(case, "infer")["peak_bytes"]
    analysis = fxmem.analyze(case.model(), (f"{ROWS}x{COLUMNS}",), device="cpu", mode="infer")
    assert abs(analysis.peak_bytes - real_bytes) <= 16
