"""Solvers without fake kernels in torch, as the shapes of some results depend on values."""

from __future__ import annotations

import torch
from torch import Tensor

from fxmem.kernels.cuda.gpu import is_on_gpu
from fxmem.kernels.registry import ANY


@ANY.kernel("linalg_lstsq")
def solve_least_squares(
    a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, ...]:
    """aten/src/ATen/native/BatchLinearAlgebra.cpp, ``linalg_lstsq``.

    ``gelsy``, which the CPU takes by default, finds a rank; a GPU has but ``gels``, which finds
    residuals of more equations than unknowns. Rows of the solution lie in the memory of ``b``'s.
    """
    is_vector = b.dim() == a.dim() - 1
    columns = b.unsqueeze(-1) if is_vector else b
    (*own, rows, unknowns), sides = a.shape, columns.shape[-1]
    batch = [*torch.broadcast_shapes(own, columns.shape[:-2])]  # type: ignore[no-untyped-call]
    whole = b.new_empty((*batch, sides, max(rows, unknowns))).transpose(-2, -1)
    solution = whole.narrow(-2, 0, unknowns)
    nothing, kind = a.new_empty(0), "gels" if is_on_gpu(a) else driver or "gelsy"
    has_residuals = rows > unknowns and kind != "gelsy"
    residuals = a.new_empty((*batch, sides)) if has_residuals else nothing
    rank = a.new_empty(0 if kind == "gels" else own, dtype=torch.int64)
    values = a.new_empty((*own, min(rows, unknowns))) if kind in ("gelsd", "gelss") else nothing
    return solution.squeeze(-1) if is_vector else solution, residuals, rank, values
