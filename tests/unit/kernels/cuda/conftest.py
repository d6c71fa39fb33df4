"""Fixtures of the tests of CUDA's kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_steps import on_gpu


@pytest.fixture
def gpu() -> Iterator[None]:
    """Fake tensors that are made lie on a GPU."""
    with on_gpu():
        yield
