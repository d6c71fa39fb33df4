"""Functions that look at values take what the allocator of a real step says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from allocator_peaks import check_peak
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.catalogue.core import Apply
from benchmarks.step import Mode

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = (40, 300)


def weigh(x: Tensor, reduction: str) -> Tensor:
    target, weight = torch.ones(SIZES), torch.ones(SIZES[1])
    return F.binary_cross_entropy_with_logits(x, target, weight, None, None, reduction, weight)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda x: x.prod(),
    "prod of a row": lambda x: torch.prod(x, 1),
    "prod, kept": lambda x: x.prod(dim=0, keepdim=True),
    "prod of a number": lambda x: x.sum().prod(),
    "cumprod": lambda x: x.cumprod(1),
    "cumprod by name": lambda x: torch.cumprod(x, dim=0),
    "max": lambda x: x.max(),
    "min": lambda x: torch.min(x),
    "max of two": lambda x: torch.max(x, x * 2),
    "trace": lambda x: x.trace(),
    "logits": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(SIZES), reduction="none"),
    "scaled logits": lambda x: F.binary_cross_entropy_with_logits(
        x, torch.ones(SIZES), torch.ones(SIZES), reduction="none"
    ),
    "weighted logits": lambda x: weigh(x, "mean"),
    "weighted logits, not reduced": lambda x: weigh(x, "none"),
    "sign": lambda x: x.sgn() * x,
    "one hot": lambda x: F.one_hot(x.argmax(1), 300) * x,
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "train") for name in FUNCTIONS), ("max", "infer"), ("one hot", "infer")],
)
def test_the_peak_is_that_of_the_allocator(name: str, mode: Mode) -> None:
    check_peak(Case(name, lambda: Apply(FUNCTIONS[name], (SIZES,))), mode)


@pytest.mark.parametrize(
    "function",
    [
        torch.prod,
        torch.Tensor.max,
        lambda x: x.cumprod(0),
        lambda x: F.binary_cross_entropy_with_logits(x, x.detach() / 2, x.detach()),
        lambda x: F.binary_cross_entropy_with_logits(
            x, x.detach() / 2, None, pos_weight=x[0].detach()
        ),
    ],
)
def test_gradients_are_those_of_autograd(function: Callable[[Tensor], Tensor]) -> None:
    from fxmem.kernels.cpu import CPU
    from fxmem.kernels.functions import lower_functions

    x = torch.rand(4, 5) + 0.5
    plain, lowered = x.clone().requires_grad_(), x.clone().requires_grad_()
    function(plain).sum().backward()
    with lower_functions(CPU):
        function(lowered).sum().backward()
    torch.testing.assert_close(lowered.grad, plain.grad)
