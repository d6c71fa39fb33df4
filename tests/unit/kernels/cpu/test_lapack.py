"""Where LAPACK cannot be asked, its reference implementation's blocks are assumed."""

from __future__ import annotations

import pytest
import torch

from fxmem.kernels.cpu import lapack, symbols


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """No routine is found."""
    lapack._ask.cache_clear()
    monkeypatch.setattr(lapack, "find_routines", lambda dtype: None)
    yield
    lapack._ask.cache_clear()


@pytest.mark.usefixtures("unknown")
def test_without_lapack() -> None:
    assert lapack.geqrf_bytes(torch.float32, 100, 50) == 32 * 50 * 4
    assert lapack.orgqr_bytes(torch.float64, 100, 50, 50) == 32 * 50 * 8
    assert lapack.ormqr_bytes(torch.float64, 100, 50, 50, True, False) == 32 * 50 * 8
    assert lapack.sytrf_bytes(torch.complex64, 50, True) == 32 * 50 * 8
    assert lapack.syevd_bytes(torch.float32, 50, True) == (1 + 300 + 5000) * 4 + 253 * 4
    assert lapack.syevd_bytes(torch.float32, 50, False) == 34 * 50 * 4 + 4
    assert lapack.geev_bytes(torch.complex64, 50, True) == 34 * 50 * 8 + 2 * 50 * 4
    for driver in ("gels", "gelsy", "gelsd", "gelss"):
        for dtype in (torch.float32, torch.complex128):
            assert lapack.least_squares_bytes(driver, dtype, 100, 50, 3) >= 3250 * dtype.itemsize


def test_symbols_that_no_library_has() -> None:
    assert symbols.find_addresses(("no_such_function",)) is None


@pytest.mark.parametrize("magic", [b"MZ", b"\x7fELF\x02\x01" + bytes(58)])
def test_libraries_without_a_table(
    magic: bytes, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path_factory.mktemp("torch")
    (root / "lib").mkdir()
    (root / "lib" / "libtorch_cpu.so").write_bytes(magic + bytes(64))
    monkeypatch.setattr(torch, "__file__", str(root / "__init__.py"))
    assert symbols.find_addresses(("cblas_sgemm",)) is None
