"""Fixtures of the tests of planned models."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from fxmem.applying import judgement


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What tracing again found, each time."""
    found: list[bool] = []
    is_graph_of = judgement.is_graph_of

    def trace(*args: Any) -> bool:
        found.append(is_graph_of(*args))
        return found[-1]

    monkeypatch.setattr(judgement, "is_graph_of", trace)
    return found


@pytest.fixture
def every_warning() -> Iterator[None]:
    """What is told in each call is raised or met in each."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
