"""The frontend that serves, and the reason why the first did not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import fx

import fxmem
from fxmem.analyzing import Served, record_blueprint
from fxmem.errors import DataDependentError, FxmemError, TraceError
from fxmem.graph import MemoryGraph
from fxmem.training.failures import mark_traced
from fxmem.training.step import Recording

RECORDED = Recording(MemoryGraph((), (), (), ()), fx.Graph(), "", ())
UNFIT = replace(RECORDED, reason="no graph holds it")


class Records:
    """Takes the place of a blueprint, and of the step that it prepares; what was asked of it."""

    def __init__(
        self, symbolic: Recording | FxmemError | Callable[[], Recording], frontend: str | None
    ) -> None:
        names = "layout", "size_hint", "target", "hints", "compilation"
        self.options = SimpleNamespace(frontend=frontend, **dict.fromkeys(names))
        self.symbolic = symbolic
        self.asked: list[bool] = []

    def prepare_step(self, _inputs: Any) -> contextlib.AbstractContextManager[Records]:
        return contextlib.nullcontext(self)

    def record(self, *, symbolic_sizes: bool = True, **_: Any) -> Recording:
        self.asked.append(symbolic_sizes)
        if not symbolic_sizes:
            return RECORDED
        if isinstance(self.symbolic, FxmemError):
            raise self.symbolic
        return self.symbolic() if callable(self.symbolic) else self.symbolic


@pytest.fixture(autouse=True)
def recording_by_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fxmem.analyzing, "record_step", Records.record)


def fail_traced() -> Recording:
    """An error that came while nodes were traced."""
    error = TraceError("no int")
    mark_traced(error)
    raise error


@pytest.mark.parametrize(
    ("symbolic", "frontend", "served", "asked"),
    [
        (RECORDED, None, Served(RECORDED, "fx", ""), [True]),
        (UNFIT, None, Served(UNFIT, "record", UNFIT.reason), [True]),
        (fail_traced, None, Served(RECORDED, "record", "no int"), [True, False]),
        (RECORDED, "record", Served(RECORDED, "record", "record was asked for"), [False]),
    ],
    ids=["fx", "a graph that cannot be replayed", "what symbolic sizes break", "asked for"],
)
def test_the_first_frontend_that_serves_is_taken(
    symbolic: Any, frontend: str | None, served: Served, asked: list[bool]
) -> None:
    record: Any = Records(symbolic, frontend)
    assert record_blueprint(record, ()) == served
    assert record.asked == asked


@pytest.mark.parametrize(
    ("symbolic", "frontend"),
    [
        (TraceError("no such operator"), None),
        (DataDependentError("it depends on data"), None),
        (UNFIT, "fx"),
        (fail_traced, "fx"),
    ],
)
def test_what_would_fail_again_is_not_tried_again(symbolic: Any, frontend: str | None) -> None:
    record: Any = Records(symbolic, frontend)
    with pytest.raises(fxmem.TraceError):
        record_blueprint(record, ())
    assert record.asked == [True]
