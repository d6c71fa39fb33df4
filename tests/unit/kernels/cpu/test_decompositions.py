"""Decompositions of matrices take what the CPU profiler sees, LAPACK's work space included."""

from __future__ import annotations

import pytest
import torch
from kernels import check

from fxmem.kernels.cpu import lapack

aten = torch.ops.aten

DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
SIZES = ((24, 24), (3, 40, 24), (3, 24, 40), (90, 100), (100, 90))
SQUARES = ((24, 24), (3, 24, 24), (70, 70), (2, 1, 1), (1, 20, 20))

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.parametrize("dtype", DTYPES),
    pytest.mark.skipif(
        lapack.find_routines(torch.float32) is None, reason="LAPACK cannot be asked"
    ),
]


@pytest.mark.parametrize("sizes", SIZES)
def test_orthogonal(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(sizes, dtype=dtype)
    for mode in ("reduced", "complete", "r"):
        check(aten.linalg_qr.default, x, mode)
    check(aten.geqrf.default, x)
    if sizes[-2] >= sizes[-1]:
        reflectors, tau = torch.geqrf(x)
        check(aten.linalg_householder_product.default, reflectors, tau)
        check(aten.linalg_householder_product.default, reflectors, reflectors[..., 0, :])
        for y in (reflectors, reflectors.contiguous()):
            check(aten.ormqr.default, y, tau, x)
            check(aten.ormqr.default, y, tau, x.mT, False, True)


@pytest.mark.parametrize("sizes", SQUARES)
def test_eigenvalues(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(sizes, dtype=dtype)
    for vectors in (True, False):
        check(aten._linalg_eigh.default, x @ x.mH, "L", vectors)
    check(aten.linalg_eig.default, x)
    for hermitian in (False, True):
        check(aten.linalg_ldl_factor_ex.default, x @ x.mH, hermitian=hermitian)
    check(aten._linalg_eigvals.default, x)


@pytest.mark.parametrize("driver", ["gels", "gelsy", "gelsd", "gelss", None])
@pytest.mark.parametrize("sizes", SIZES)
def test_least_squares(sizes: tuple[int, ...], driver: str | None, dtype: torch.dtype) -> None:
    x, targets = torch.randn(sizes, dtype=dtype), torch.randn(*sizes[:-1], 3, dtype=dtype)
    for b in (targets, targets[..., 0]):
        outputs = check(aten.linalg_lstsq.default, x, b, driver=driver)
        assert isinstance(outputs, tuple)
    if len(sizes) == 3:
        check(aten.linalg_lstsq.default, x[None], torch.stack([targets] * 2), driver=driver)


@pytest.mark.parametrize("sizes", [*SIZES, *SQUARES[:3]])
def test_pseudoinverse(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    x, zero = torch.randn(sizes, dtype=dtype), torch.zeros(sizes[:-2], dtype=torch.float64)
    check(aten.linalg_pinv.atol_rtol_tensor, x, atol=zero, rtol=zero)
    if sizes[-2] == sizes[-1]:
        check(aten.linalg_pinv.atol_rtol_tensor, x @ x.mH, atol=zero, rtol=zero, hermitian=True)


@pytest.mark.parametrize("sizes", SQUARES)
def test_exponential(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    check(aten.linalg_matrix_exp.default, 9 * torch.eye(sizes[-1], dtype=dtype).expand(sizes))


def test_triangles(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 24, 20, dtype=dtype)
    parts = (x, x.mT, x[..., :10], x[:, :2], x[0, :, :10], x[0].mT, x[:1, :, :3], x[0, 0].mT)
    for part in parts:
        check(aten.triu.default, part)
        check(aten.tril_.default, part)
