"""Values without vectors, least squares, and what composite functions make of both."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from allocator_peaks import check_peak
from torch import Tensor

from benchmarks.cases import Case
from benchmarks.catalogue.core import Apply
from benchmarks.step import Mode

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = (3, 40, 40)


def _symmetric(x: Tensor) -> Tensor:
    return x + x.mT


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "singular values": torch.linalg.svdvals,
    "eigenvalues": lambda x: torch.linalg.eigvals(x).real,
    "symmetric eigenvalues": lambda x: torch.linalg.eigvalsh(_symmetric(x)),
    "condition": torch.linalg.cond,
    "nuclear norm": lambda x: torch.linalg.matrix_norm(x, "nuc"),
    "spectral norm": lambda x: torch.linalg.norm(x, 2, (-2, -1)),
    "old norm": lambda x: torch.norm(x[0], "nuc"),
    "rank": lambda x: x * torch.linalg.matrix_rank(x.detach())[:, None, None],
    "pseudoinverse": torch.linalg.pinv,
    "least squares": lambda x: torch.linalg.lstsq(x, 2 * x)[0],
    "least squares with residuals": lambda x: torch.linalg.lstsq(x[..., :9], x, driver="gels")[1],
    "exponential": torch.linalg.matrix_exp,
    "factors": lambda x: torch.linalg.qr(x)[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_the_peak_is_that_of_the_allocator(name: str, mode: Mode) -> None:
    check_peak(Case(name, lambda: Apply(FUNCTIONS[name], (SIZES,))), mode)
