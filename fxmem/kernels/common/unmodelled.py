"""Operators whose kernels' memory is not counted on any device."""

from __future__ import annotations

LINEAR_ALGEBRA = (
    "_linalg_svd", "_linalg_eigh", "_linalg_eigvals", "linalg_eig", "linalg_eigvals", "linalg_qr",
    "linalg_cholesky_ex", "linalg_lu", "linalg_lu_factor_ex", "linalg_ldl_factor_ex",
    "linalg_inv_ex", "_linalg_det", "_linalg_slogdet", "_linalg_solve_ex",
    "linalg_solve_triangular", "linalg_lstsq", "linalg_matrix_exp", "linalg_householder_product",
    "cholesky_solve", "cholesky_inverse", "triangular_solve", "lu_unpack", "ormqr", "geqrf",
)  # fmt: skip
"""Decompositions and solvers, whose libraries take workspaces that PyTorch does not state."""
