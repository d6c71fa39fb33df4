"""Linear algebra whose C++ code asks whether it needs vectors, or has no fake kernel.

Source: aten/src/ATen/native/BatchLinearAlgebra.cpp. Singular vectors and eigenvectors are for
backward where only values were asked for; of a tensor that may be a subclass they are made anyway
(``_may_require_fw_or_bw_grad``).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fxmem.kernels.target import ANY, Function
from fxmem.tracing.dispatch import LeanDispatchMode

_aten = torch.ops.aten
_LEFT_OUT = {
    _aten._linalg_svd.default: (2, "compute_uv"),
    _aten._linalg_eigh.default: (2, "compute_v"),
}
"""Decompositions, and the argument that says whether vectors are wanted."""


class _WithoutVectors(LeanDispatchMode):  # type: ignore[no-untyped-call]
    """Decomposes for the values alone."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.linalg_eig.default:
            return _aten._linalg_eigvals(*args), None
        if func in _LEFT_OUT:
            position, name = _LEFT_OUT[func]
            if len(args) > position:
                args = (*args[:position], False, *args[position + 1 :])
            else:
                kwargs = kwargs | {name: False}
        return func(*args, **kwargs)


def run_for_values(function: Function, *args: Any, **kwargs: Any) -> Any:
    """Calls a function that needs no vectors unless it is differentiated."""
    given = (*args, *kwargs.values())
    is_differentiated = any(isinstance(x, Tensor) and x.requires_grad for x in given)
    if is_differentiated and torch.is_grad_enabled():
        return function(*args, **kwargs)
    with _WithoutVectors():  # type: ignore[no-untyped-call]
        return function(*args, **kwargs)


for _function in (
    torch.linalg.svdvals,
    torch.linalg.eigvals,
    torch.linalg.eigvalsh,
    torch.linalg.matrix_norm,
    torch.linalg.norm,
    torch.linalg.cond,
    torch.linalg.matrix_rank,
    torch.nuclear_norm,
    torch.norm,
    Tensor.norm,
):
    ANY.function(_function)(functools.partial(run_for_values, _function))


@ANY.kernel(_aten._linalg_svd.default)
def svd(
    x: Tensor,
    full_matrices: bool = False,
    compute_uv: bool = True,
    *,
    driver: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``TORCH_META_FUNC(_linalg_svd)``: no vectors where none are asked for."""
    left, values, right = _aten._linalg_svd.default(x, full_matrices, compute_uv, driver=driver)
    return (left, values, right) if compute_uv else (x.new_empty(0), values, x.new_empty(0))


def make_least_squares(
    x: Tensor,
    b: Tensor,
    rcond: float | None = None,
    *,
    driver: str | None = None,
    default_driver: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The outputs of ``linalg_lstsq_out_info``: solution, residuals, rank and singular values.

    Matrices are taken to be of full rank, where that decides whether there are residuals.
    """
    driver = (driver or default_driver).lower()
    rows, columns = x.shape[-2:]
    is_vector = b.dim() == 1 or (x.dim() - 1 == b.dim() and b.shape == x.shape[:-1])
    matrix = b.unsqueeze(-1) if is_vector else b
    batch = torch.broadcast_shapes(x.shape[:-2], matrix.shape[:-2])  # type: ignore[no-untyped-call]
    targets = matrix.shape[-1]
    # LAPACK writes residuals below the solution.
    solution = x.new_empty((*batch, targets, max(rows, columns))).mT.narrow(-2, 0, columns)
    real = x.dtype.to_real()
    has_residuals = rows > columns and driver != "gelsy"
    has_values = driver in ("gelsd", "gelss")
    return (
        solution.squeeze(-1) if is_vector else solution,
        x.new_empty((*batch, targets) if has_residuals else 0, dtype=real),
        x.new_empty(0 if driver == "gels" else x.shape[:-2], dtype=torch.int64),
        x.new_empty((*x.shape[:-2], min(rows, columns)) if has_values else 0, dtype=real),
    )


ANY.kernel(_aten.linalg_lstsq.default)(functools.partial(make_least_squares, default_driver="gels"))
