"""Decompositions of matrices on the CPU, with the work space that LAPACK asks for.

Source: aten/src/ATen/native/BatchLinearAlgebra.cpp, and BatchLinearAlgebraKernel.cpp for the work
space. LAPACK overwrites matrices whose columns are dense, so inputs are copied, if possible into
an output.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fxmem.kernels.arguments import argument, new_bytes, tensor
from fxmem.kernels.cpu import lapack
from fxmem.kernels.cpu.copying import transposing_buffer_bytes
from fxmem.kernels.cpu.linalg import count_matrices, svd_bytes
from fxmem.kernels.cpu.target import CPU
from fxmem.kernels.linalg import make_least_squares
from fxmem.kernels.tape import Tape, size_bytes
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten
_INT_BYTES, _LONG_BYTES = 4, 8


def _reflectors_bytes(x: Tensor) -> int:
    """The magnitudes of the reflectors of all matrices."""
    return count_matrices(x) * min(x.shape[-2:]) * x.element_size()


@CPU.workspace(_aten.linalg_qr.default)
def _qr(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``linalg_qr_out``: decomposed in Q or R, whichever has the shape, or else in a copy."""
    assert isinstance(outputs, (tuple, list))
    x, q, r = tensor(args[0]), tensor(outputs[0]), tensor(outputs[1])
    rows, columns = x.shape[-2:]
    least = min(rows, columns)
    has_q = argument(args, kwargs, 1, "mode") != "r"
    fits = (has_q and q.shape[-1] == columns) or r.shape[-2] == rows
    copied = 0 if fits else size_bytes(x)
    steps = [0 if fits else transposing_buffer_bytes(x.mT)]
    steps.append(lapack.geqrf_bytes(x.dtype, rows, columns))
    # ``triu_out`` takes batches whose matrices follow each other.
    steps.append(size_bytes(r) if x.dim() > 2 and rows > r.shape[-2] else 0)
    if has_q:
        steps.append(lapack.orgqr_bytes(x.dtype, rows, q.shape[-1], least))
    return copied + _reflectors_bytes(x) + max(steps)


@CPU.workspace(_aten.geqrf.default)
def _geqrf(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``geqrf_out``: decomposed in the output."""
    x = tensor(args[0])
    return lapack.geqrf_bytes(x.dtype, *x.shape[-2:])


@CPU.workspace(_aten.linalg_householder_product.default)
def _householder(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``linalg_householder_product_out_helper``: made of the output, and of dense magnitudes."""
    x, tau = tensor(args[0]), tensor(args[1])
    copied = 0 if tau.is_contiguous() else size_bytes(tau)
    rows, columns = x.shape[-2:]
    return copied + lapack.orgqr_bytes(x.dtype, rows, columns, tau.shape[-1])


@CPU.workspace(_aten.ormqr.default)
def _multiply_by_reflectors(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``ormqr_out_helper``: reflectors in dense columns, dense magnitudes."""
    x, tau, other = (tensor(value) for value in args[:3])
    left, transpose = (argument(args, kwargs, 3 + i, name) for i, name in enumerate(_SIDES))
    copied = sum(size_bytes(y) for y in (x.mT, tau) if not y.is_contiguous())
    rows, columns = other.shape[-2:]
    return copied + lapack.ormqr_bytes(
        x.dtype, rows, columns, tau.shape[-1], left is not False, transpose is True
    )


_SIDES = ("left", "transpose")


@CPU.workspace(_aten.linalg_ldl_factor_ex.default)
def _ldl(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``linalg_ldl_factor_ex_out``: decomposed in the output."""
    x = tensor(args[0])
    return lapack.sytrf_bytes(x.dtype, x.shape[-1], kwargs.get("hermitian") is True)


@CPU.workspace(_aten._linalg_eigh.default)
def _eigh(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``_linalg_eigh_out``: in the vectors' place if they are wanted; a code per matrix."""
    x, vectors = tensor(args[0]), argument(args, kwargs, 2, "compute_v") is not False
    codes = count_matrices(x) * _INT_BYTES
    copied = 0 if vectors else size_bytes(x)
    buffer = 0 if vectors else transposing_buffer_bytes(x.mT)
    work = lapack.syevd_bytes(x.dtype, x.shape[-1], vectors)
    return copied + max(buffer, codes + work)


@CPU.workspace(_aten.linalg_eig.default, _aten._linalg_eigvals.default)
def _eig(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``linalg_eig_out_info``: LAPACK gives real matrices' values and vectors in real numbers."""
    x, vectors = tensor(args[0]), isinstance(outputs, (tuple, list))
    codes = count_matrices(x) * _INT_BYTES
    inside = codes + size_bytes(x) + lapack.geev_bytes(x.dtype, x.shape[-1], vectors)
    if not x.is_complex():
        inside += new_bytes(outputs[0] if vectors else outputs)  # type: ignore[index]
        inside += size_bytes(x) if vectors else 0
    return inside


_DRIVER = "gelsy"
CPU.kernel(_aten.linalg_lstsq.default)(
    functools.partial(make_least_squares, default_driver=_DRIVER)
)


@CPU.workspace(_aten.linalg_lstsq.default)
def _least_squares(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """``linalg_lstsq_out_info``: the matrices copied, a code for each, indices of the batches.

    Matrices that serve several right-hand sides are copied once more, with a flag for each.
    """
    assert isinstance(outputs, (tuple, list))
    x, b, solution = tensor(args[0]), tensor(args[1]), tensor(outputs[0])
    rows, columns = x.shape[-2:]
    is_vector = solution.dim() < x.dim()
    targets = 1 if is_vector else b.shape[-1]
    batch = solution.shape[:-1] if is_vector else solution.shape[:-2]
    count = count_matrices(x)
    indices = (count + math.prod(batch)) * _LONG_BYTES
    shared = 0 if batch == x.shape[:-2] else size_bytes(x) + count
    driver = str(kwargs.get("driver") or _DRIVER).lower()
    work = lapack.least_squares_bytes(driver, x.dtype, rows, columns, targets)
    residuals = size_bytes(tensor(outputs[1]))  # made when the work is done
    return size_bytes(x) + max(1, count) * _INT_BYTES + work + indices + shared - residuals


@CPU.workspace(_aten.linalg_matrix_exp.default)
def _exponential(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/LinearAlgebra.cpp, ``mexp_impl`` and ``compute_T18``.

    Scaled matrices, five powers of each and five combinations of those, beside norms and scales.
    A single matrix is told by its norm how many powers it needs, and then copied: it is taken to
    need the most.
    """
    x, count = tensor(args[0]), count_matrices(tensor(args[0]))
    if x.shape[-1] <= 1 or not count:
        return 0
    real_bytes = x.dtype.to_real().itemsize
    if count > 1:
        return 10 * size_bytes(x) + 3 * count * real_bytes
    return 12 * size_bytes(x) + 4 * real_bytes + 8


@CPU.workspace(_aten.linalg_pinv.atol_rtol_tensor)
def _pseudoinverse(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """LinearAlgebra.cpp, ``linalg_pinv``: vectors on one side are rescaled, then multiplied.

    Vectors of complex matrices are conjugated on their way into both.
    """
    x, count = tensor(args[0]), count_matrices(tensor(args[0]))
    rows, columns = x.shape[-2:]
    least, is_hermitian = min(rows, columns), kwargs.get("hermitian") is True
    column = count * least * x.element_size()
    values = count * least * x.dtype.to_real().itemsize
    tape = Tape()
    tape.allocate(values + column * (rows if is_hermitian else rows + columns))
    decomposing = svd_bytes(x)
    if is_hermitian:
        decomposing = count * _INT_BYTES + lapack.syevd_bytes(x.dtype, rows, vectors=True)
    tape.free(tape.allocate(decomposing))
    if is_hermitian:  # magnitudes, and the largest of each matrix
        tape.allocate(values + values // max(1, least))
    tape.allocate(count * _LONG_BYTES + column)  # tolerances in double precision, reciprocals
    scaled = tape.allocate(column * columns)
    if x.is_complex():
        tape.free(tape.allocate(0 if is_hermitian else scaled))
        tape.allocate(column * rows)
    result = tape.allocate(new_bytes(outputs))
    return tape.peak_bytes - result
