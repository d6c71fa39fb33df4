"""Products of Householder reflectors: the peak of a real step, and autograd's own gradients."""

from __future__ import annotations

import pytest
import torch
from allocator_peaks import check_peak
from torch import nn

from benchmarks.cases import Case, image
from benchmarks.step import Mode
from fxmem.kernels.cpu import CPU
from fxmem.kernels.functions import lower_functions


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_the_peak_is_that_of_the_allocator(mode: Mode) -> None:
    def build() -> nn.Module:
        return nn.utils.parametrizations.orthogonal(nn.Linear(24, 60))

    check_peak(Case("orthogonal", build, (image(2, 24),)), mode)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients_are_those_of_autograd(dtype: torch.dtype) -> None:
    given = torch.geqrf(torch.randn(2, 7, 5, dtype=dtype))
    plain = [x.clone().requires_grad_() for x in given]
    lowered = [x.clone().requires_grad_() for x in given]
    weight = torch.randn(2, 7, 5, dtype=dtype)
    torch.linalg.householder_product(*plain).backward(weight)
    with lower_functions(CPU):
        torch.linalg.householder_product(*lowered).backward(weight)
    for a, b in zip(plain, lowered, strict=True):
        torch.testing.assert_close(a.grad, b.grad)
