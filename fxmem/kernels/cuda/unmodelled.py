"""Operators whose kernels on CUDA take memory that only the library behind them can tell."""

from __future__ import annotations

import torch

from fxmem.kernels.cuda.target import CUDA

_aten = torch.ops.aten

for _names, _reason in (
    (
        "_linalg_svd _linalg_eigh _linalg_eigvals linalg_eig linalg_eigvals linalg_qr "
        "linalg_cholesky_ex linalg_lu linalg_lu_factor_ex linalg_ldl_factor_ex linalg_inv_ex "
        "_linalg_det _linalg_slogdet _linalg_solve_ex linalg_solve_triangular linalg_lstsq "
        "linalg_matrix_exp linalg_householder_product cholesky_solve cholesky_inverse "
        "triangular_solve lu_unpack ormqr geqrf",
        "cuSOLVER or MAGMA serves: copies by column, and a workspace that the library states",
    ),
    (
        "_fft_r2c _fft_c2r _fft_c2c",
        "cuFFT serves: clones by dimension, and a plan's workspace that the library states",
    ),
    (
        "_sparse_mm_reduce_impl _scaled_mm _scaled_grouped_mm",
        "a workspace that depends on the kernel which the library picks",
    ),
):
    for _name in _names.split():
        CUDA.unmodelled[getattr(_aten, _name).default] = _reason
