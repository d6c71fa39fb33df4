"""Linear algebra on the CPU: factors and pivots beside the results."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fxmem.kernels.arguments import tensor
from fxmem.kernels.cpu.copying import transposing_buffer_bytes
from fxmem.kernels.cpu.target import CPU
from fxmem.kernels.tape import Tape, size_bytes
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten
_INT_BYTES, _LONG_BYTES = 4, 8


def count_matrices(x: Tensor) -> int:
    """How many matrices a batch has."""
    return math.prod(x.shape[:-2])


def _pivots(x: Tensor) -> int:
    """How many pivots all matrices have."""
    return count_matrices(x) * min(x.shape[-2:])


def _pivot_checks_bytes(x: Tensor) -> int:
    """aten/src/ATen/native/BatchLinearAlgebra.cpp, ``linalg_lu_solve_out``: pivots in range.

    One bit per pivot, compared with a number.
    """
    return _pivots(x) + _LONG_BYTES + _INT_BYTES


@CPU.workspace(_aten.linalg_lu_solve.default, _aten._linalg_solve_ex.default)
def _solve(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """BatchLinearAlgebra.cpp, ``_linalg_solve_ex_out``: factors are outputs too."""
    return _pivot_checks_bytes(tensor(args[0]))


@CPU.workspace(_aten.linalg_inv_ex.default)
def _inverse(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """BatchLinearAlgebra.cpp, ``linalg_inv_ex_out``: solves for the identity."""
    x = tensor(args[0])
    return size_bytes(x) + _pivots(x) * _INT_BYTES + _pivot_checks_bytes(x)


def _sign_bytes(x: Tensor) -> int:
    """BatchLinearAlgebra.cpp, ``lu_det_P``: which pivots are not in place, counted as integers."""
    pivots, batch = _pivots(x), count_matrices(x)
    line = x.shape[-1] * _INT_BYTES
    return line + pivots + batch * _LONG_BYTES + pivots * _LONG_BYTES


@CPU.workspace(_aten._linalg_det.default)
def _determinant(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """BatchLinearAlgebra.cpp, ``_linalg_det_out``: the product of the diagonal times the sign."""
    x = tensor(args[0])
    return count_matrices(x) * (_INT_BYTES + x.element_size()) + _sign_bytes(x)


@CPU.workspace(_aten._linalg_slogdet.default)
def _log_determinant(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """BatchLinearAlgebra.cpp, ``_linalg_slogdet_out``."""
    x = tensor(args[0])
    return count_matrices(x) * _INT_BYTES + _sign_bytes(x)


def _unpack_bytes(x: Tensor) -> int:
    """BatchLinearAlgebra.cpp, ``lu_unpack_out``: one permutation, and each matrix's own."""
    line, batch = x.shape[-2] * _LONG_BYTES, count_matrices(x)
    return line + (line * batch if batch > 1 else 0)


@CPU.workspace(_aten._linalg_check_errors.default)
def _check_errors(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """BatchLinearAlgebra.cpp, ``_linalg_check_errors``: the codes as bits, and whether any is."""
    return tensor(args[0]).numel() + 1


@CPU.workspace(_aten.linalg_lu.default)
def _lu(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """BatchLinearAlgebra.cpp, ``linalg_lu_out``: factors, pivots and codes, then unpacked."""
    x = tensor(args[0])
    rest = _pivots(x) * _INT_BYTES + count_matrices(x) * _INT_BYTES
    return rest + max(size_bytes(x), _unpack_bytes(x))


@CPU.workspace(_aten.lu_unpack.default)
def _unpack(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """BatchLinearAlgebra.cpp, ``lu_unpack_out``."""
    return _unpack_bytes(tensor(args[0]))


@CPU.workspace(_aten._linalg_svd.default)
def _svd(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """BatchLinearAlgebra.cpp, ``_linalg_svd_out``; the work space is no tensor."""
    return svd_bytes(tensor(args[0]))


def svd_bytes(x: Tensor) -> int:
    """A copy to work in, and a code per matrix."""
    return size_bytes(x) + count_matrices(x) * _INT_BYTES + transposing_buffer_bytes(x.mT)


@CPU.workspace(_aten.cholesky_solve.default)
def _cholesky_solve(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """BatchLinearAlgebra.cpp, ``_cholesky_solve_helper_cpu``: a copy of the factor, and codes.

    Then the codes as bits, and whether any is set.
    """
    x = tensor(args[1])
    codes = count_matrices(x) * (_INT_BYTES + 1) + 1
    return size_bytes(x) + max(codes, transposing_buffer_bytes(x.mT))


@CPU.workspace(_aten._euclidean_dist.default)
def _distances(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Distance.cpp, ``_euclidean_dist``.

    A product of both, each with a column of squared norms and one of ones.
    """
    tape = Tape()
    rows = []
    for x in (tensor(args[0]), tensor(args[1])):
        squares = tape.allocate(size_bytes(x))
        norms = tape.allocate(x.numel() // max(1, x.shape[-1]) * x.element_size())
        tape.free(squares)
        rows.append(norms + tape.allocate(norms))
    scaled = tape.allocate(size_bytes(tensor(args[0])))
    for x, columns in zip((tensor(args[0]), tensor(args[1])), rows, strict=True):
        tape.allocate(size_bytes(x) + columns)
        tape.free(columns, scaled)
        scaled = 0
    result = tape.allocate(size_bytes(tensor(outputs)))
    return tape.peak_bytes - result
