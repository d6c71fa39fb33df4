"""Releases of torch: which is supported, and what is said of others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fxmem
from fxmem.versions import release
from fxmem.versions.release import Release, check_release, is_release


@pytest.fixture(autouse=True)
def _check_anew() -> Iterator[None]:
    check_release.cache_clear()
    yield
    check_release.cache_clear()


def test_the_environment_has_a_supported_release() -> None:
    assert release.OLDEST <= release.INSTALLED <= release.NEWEST


@pytest.mark.parametrize(
    ("since", "before", "expected"),
    [
        (None, None, True),
        ((2, 9), None, True),
        ((2, 10), None, False),
        (None, (2, 9), False),
        (None, (2, 10), True),
        ((2, 6), (2, 10), True),
    ],
)
def test_ranges_begin_with_since_and_end_before_before(
    monkeypatch: pytest.MonkeyPatch, since: Release | None, before: Release | None, expected: bool
) -> None:
    monkeypatch.setattr(release, "INSTALLED", (2, 9))
    assert is_release(since, before) is expected


def test_an_older_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "INSTALLED", (2, 5))
    with pytest.raises(fxmem.FxmemError) as error:
        fxmem.analyze(torch.nn.Linear(4, 2), "8x4", device="cpu")
    assert str(error.value) == (
        f"fxmem needs torch 2.6 or later, and {torch.__version__} is installed"
        " (pip install 'torch>=2.6')"
    )


def test_a_newer_release_is_told_once_and_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "INSTALLED", (2, 99))
    with pytest.warns(fxmem.FxmemWarning, match=r"is newer than 2\.14, .* what 2\.14 does") as seen:
        peaks = [
            fxmem.analyze(torch.nn.Linear(4, 2), "8x4", device="cpu").peak_bytes for _ in range(2)
        ]
    assert len(seen) == 1
    monkeypatch.undo()
    assert peaks == [fxmem.analyze(torch.nn.Linear(4, 2), "8x4", device="cpu").peak_bytes] * 2
