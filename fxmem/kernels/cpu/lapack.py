"""Ask LAPACK, inside the running PyTorch, how much work space its routines want.

The kernels (aten/src/ATen/native/BatchLinearAlgebraKernel.cpp) call each routine twice: with a
work size of -1, upon which it looks at nothing but sizes and answers with the best one, and then
with a tensor of that size. The answer is asked of the same routine here: it depends on the library
that PyTorch was built with. Where its functions cannot be found the answer is that of the reference
implementation (netlib.org/lapack) with its blocks of 32.
"""

from __future__ import annotations

import ctypes
import functools
import math

import torch

from fxmem.kernels.cpu.symbols import find_addresses

_LETTERS = {
    torch.float32: "s",
    torch.float64: "d",
    torch.complex64: "c",
    torch.complex128: "z",
}
_BLOCK = 32
_INT_BYTES = 4
_ELEMENT_BYTES = 16
"""The largest that an answer can take."""
_SINGLE_ULPS = 1 << 29
"""Steps of double precision in one of single precision."""
_ROUTINES = (
    "geqrf", "orgqr", "ormqr", "syevd", "geev", "sytrf", "hetrf", "gels", "gelsy", "gelss", "gelsd",
)  # fmt: skip
_REAL_NAMES = {"hetrf": "sytrf"}
_COMPLEX_NAMES = {"orgqr": "ungqr", "ormqr": "unmqr", "syevd": "heevd"}

_Argument = int | str | None


def geqrf_bytes(dtype: torch.dtype, rows: int, columns: int) -> int:
    """Work space of a QR decomposition; ``apply_geqrf``."""
    answers = _ask("geqrf", dtype, rows, columns, None, max(1, rows), None, "work", -1, None)
    wanted = _read_work(answers["work"], dtype) if answers else _BLOCK * columns
    return max(columns, wanted) * dtype.itemsize


def orgqr_bytes(dtype: torch.dtype, rows: int, columns: int, reflectors: int) -> int:
    """Work space of the product of Householder reflectors; ``apply_orgqr``."""
    if not rows * columns:
        return 0
    answers = _ask(
        "orgqr", dtype, rows, columns, reflectors, None, max(1, rows), None, "work", -1, None
    )
    wanted = _read_work(answers["work"], dtype) if answers else _BLOCK * columns
    return wanted * dtype.itemsize


def ormqr_bytes(
    dtype: torch.dtype, rows: int, columns: int, reflectors: int, left: bool, transpose: bool
) -> int:
    """Work space of a product by Householder reflectors; ``apply_ormqr``."""
    trans = ("C" if dtype.is_complex else "T") if transpose else "N"
    answers = _ask(
        "ormqr", dtype, "L" if left else "R", trans, rows, columns, reflectors,
        None, max(1, rows if left else columns), None, None, max(1, rows), "work", -1, None,
    )  # fmt: skip
    if answers is None:
        return _BLOCK * (columns if left else rows) * dtype.itemsize
    return max(1, int(_read_real(answers["work"], dtype))) * dtype.itemsize


def sytrf_bytes(dtype: torch.dtype, side: int, hermitian: bool) -> int:
    """Work space of an LDL decomposition; ``apply_ldl_factor``."""
    routine = "hetrf" if hermitian else "sytrf"
    answers = _ask(routine, dtype, "L", side, None, max(1, side), None, "work", -1, None)
    if answers is None:
        return _BLOCK * side * dtype.itemsize
    return max(1, int(_read_real(answers["work"], dtype))) * dtype.itemsize


def syevd_bytes(dtype: torch.dtype, side: int, vectors: bool) -> int:
    """Work space of the eigenvalues of a symmetric matrix; ``apply_lapack_eigh``."""
    rwork = ("rwork", -1) if dtype.is_complex else ()
    answers = _ask(
        "syevd", dtype, _job(vectors), "L", side, None, max(1, side), None,
        "work", -1, *rwork, "iwork", -1, None,
    )  # fmt: skip
    if answers is None:
        wanted = 1 + 6 * side + 2 * side**2 if vectors else (_BLOCK + 2) * side
        return wanted * dtype.itemsize + (3 + 5 * side if vectors else 1) * _INT_BYTES
    total = _read_work(answers["work"], dtype) * dtype.itemsize
    total += max(1, _read_int(answers["iwork"])) * _INT_BYTES
    if dtype.is_complex:
        real = dtype.to_real()
        total += _read_work(answers["rwork"], real) * real.itemsize
    return total


def geev_bytes(dtype: torch.dtype, side: int, vectors: bool) -> int:
    """Work space of the eigenvalues of any square matrix; ``apply_linalg_eig``."""
    is_complex, lead = dtype.is_complex, max(1, side)
    answers = _ask(
        "geev", dtype, "N", _job(vectors), side, None, lead, None, *(() if is_complex else (None,)),
        None, 1, None, lead if vectors else 1, "work", -1, *((None,) if is_complex else ()), None,
    )  # fmt: skip
    wanted = _read_work(answers["work"], dtype) if answers else (_BLOCK + 2) * side
    return wanted * dtype.itemsize + is_complex * 2 * lead * dtype.to_real().itemsize


def least_squares_bytes(
    driver: str, dtype: torch.dtype, rows: int, columns: int, targets: int
) -> int:
    """Work space of a least squares problem; ``apply_lstsq``.

    Args:
        driver: gels, gelsy, gelsd or gelss.
        dtype: Of the matrices.
        rows: Equations.
        columns: Unknowns.
        targets: Right-hand sides.
    """
    lead, most = max(1, rows), max(1, rows, columns)
    least, real = min(rows, columns), dtype.to_real()
    head: tuple[_Argument, ...] = (rows, columns, targets, None, lead, None, most)
    if driver == "gels":
        answers = _ask(driver, dtype, "N", *head, "work", -1, None)
    else:
        rwork = ("rwork",) if dtype.is_complex else ()
        iwork = ("iwork",) if driver == "gelsd" else ()
        answers = _ask(driver, dtype, *head, None, None, None, "work", -1, *rwork, *iwork, None)
    wanted = _read_work(answers["work"], dtype) if answers else least + _BLOCK * most
    total = wanted * dtype.itemsize
    if driver == "gelsy":
        total += max(1, columns) * _INT_BYTES
    if driver == "gelsd" and answers:
        total += max(1, _read_int(answers["iwork"])) * _INT_BYTES
    if dtype.is_complex and driver != "gels":
        counts = {"gelsy": 2 * columns, "gelss": 5 * least}
        asked = int(_read_real(answers["rwork"], real)) if answers else 5 * least
        total += max(1, counts.get(driver, asked)) * real.itemsize
    return total


def _job(vectors: bool) -> str:
    return "V" if vectors else "N"


@functools.lru_cache(maxsize=1024)
def _ask(routine: str, dtype: torch.dtype, *arguments: _Argument) -> dict[str, bytes] | None:
    """Calls a routine; its arguments are sizes, letters, names of what it answers, or memory.

    Numbers are written with 8 bytes, which libraries with integers of 4 and of 8 both understand.
    """
    addresses = find_routines(dtype)
    if addresses is None:
        return None
    buffers = {name: ctypes.create_string_buffer(_ELEMENT_BYTES) for name in _ANSWERS}
    passed: list[object] = []
    for argument in arguments:
        if isinstance(argument, int):
            passed.append(ctypes.byref(ctypes.c_int64(argument)))
        elif argument in _ANSWERS:
            passed.append(buffers[argument])
        elif argument is None:
            passed.append(ctypes.create_string_buffer(_ELEMENT_BYTES))
        else:
            passed.append(ctypes.byref(ctypes.c_char(argument.encode())))
    ctypes.CFUNCTYPE(None)(addresses[routine])(*passed)
    return {name: buffer.raw for name, buffer in buffers.items()}


_ANSWERS = ("work", "rwork", "iwork")


@functools.cache
def find_routines(dtype: torch.dtype) -> dict[str, int] | None:
    """Addresses of the routines for a type, by the names used here."""
    letter = _LETTERS[dtype]
    other_names = _COMPLEX_NAMES if dtype.is_complex else _REAL_NAMES
    names = {routine: f"{letter}{other_names.get(routine, routine)}_" for routine in _ROUTINES}
    found = find_addresses(tuple(names.values()))
    return found and {routine: found[name] for routine, name in names.items()}


def _read_int(answer: bytes) -> int:
    return ctypes.c_int32.from_buffer_copy(answer).value


def _read_real(answer: bytes, dtype: torch.dtype) -> float:
    kind = ctypes.c_float if dtype.to_real() == torch.float32 else ctypes.c_double
    return kind.from_buffer_copy(answer).value


def _read_work(answer: bytes, dtype: torch.dtype) -> int:
    """``lapack_work_to_int``: sizes come as floating numbers, which may have been rounded down."""
    value = _read_real(answer, dtype)
    steps = _SINGLE_ULPS if dtype.to_real() == torch.float32 else 1
    return max(1, math.ceil(value + math.ulp(value) * steps))
