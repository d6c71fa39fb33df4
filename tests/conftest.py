"""Fixtures and options of all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Threads of kernels that spin while they wait hold up the tests beside them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# That of the terminal in which the tests run, which reports would take as their width.
os.environ.pop("COLUMNS", None)

GOLDEN = Path(__file__).parent / "golden"

# A deadline measures the machine, which may be busy, not the code.
settings.register_profile("fxmem", deadline=None, max_examples=40)
settings.load_profile("fxmem")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--overwrite",
        action="store_true",
        help="write what the golden tests expect anew, from what they get; then read the diff",
    )


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Kernels on one thread: more would spin where processors are shared, and some kernels take
    scratch memory for each."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _quick_collections() -> Iterator[None]:
    """Keeps what is loaded out of collections of garbage, of which measurements make many."""
    gc.freeze()
    yield
    gc.collect()  # the test's own objects alone


@pytest.fixture(autouse=True)
def _no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps lines on progress, which a busy machine would get, out of what commands write."""
    monkeypatch.setattr("fxmem.cli.shared.output._LOG_DELAY_S", 1e6)


@pytest.fixture
def full_precision() -> Iterator[None]:
    """Keeps float32 off tensor cores, for which cuDNN reorders operands in a workspace."""
    import torch

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


@pytest.fixture
def quick_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans after few trials, where a test is not about how good they are."""
    monkeypatch.setattr("fxmem.planning.strategies.problem.SMALL_STEP_TRIALS", 1)


@pytest.fixture
def check_golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with a file under tests/golden, or writes that file with --overwrite."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--overwrite"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: run pytest --overwrite"
        assert text == path.read_text(encoding="utf-8"), "pytest --overwrite writes it anew"

    return check
