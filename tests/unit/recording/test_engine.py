"""Where eager works in place, checked against the allocator of a real step that nobody watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from measuring.allocator_peaks import check_peak
from torch import Tensor

from benchmarks.cases import Case, Spec
from benchmarks.catalogue.core import Apply
from benchmarks.step import Mode

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS, COLUMNS = 64, 256


class AddsInPython(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        doubled = grads[0] * 2
        return doubled + grads[0].exp()  # Python's own: always new memory


def zeros(columns: int) -> Tensor:
    return torch.zeros(ROWS, columns, dtype=torch.int64)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
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


def check(name: str, run: Callable[[Tensor, Tensor], Tensor], mode: Mode) -> None:
    """Compares the peak of a function of a weight and the input."""
    size = (ROWS, COLUMNS)
    check_peak(Case(name, lambda: Apply(run, (size,)), (Spec(size),)), mode)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_peak_is_that_of_the_allocator(name: str) -> None:
    # Times a weight, so that backward has a gradient to pass on.
    check(name, lambda weight, x: FUNCTIONS[name](x * weight), "train")


@pytest.mark.parametrize("name", ["two gradients meet", "gather"])
def test_the_peak_of_a_backward_inside_forward_is_that_of_the_allocator(name: str) -> None:
    def differentiate(weight: Tensor, x: Tensor) -> Tensor:
        """As of an energy by its coordinates."""
        with torch.enable_grad():
            return torch.autograd.grad(FUNCTIONS[name](x * weight).sum(), weight)[0]

    check(name, differentiate, "infer")
