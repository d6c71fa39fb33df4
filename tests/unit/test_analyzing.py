"""The frontend that serves, and the reason why the first did not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
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
    """Takes the place of a blueprint; what was asked of it."""

    model = torch.nn.Module()
    loss = make_optimizer = None
    fake_mode = contextlib.nullcontext()

    def __init__(
        self, symbolic: Recording | FxmemError | Callable[[], Recording], frontend: str | None
    ) -> None:
        self.options = SimpleNamespace(frontend=frontend, layout=None, size_hint=None)
        self.symbolic = symbolic
        self.asked: list[bool] = []

    def record(self, _inputs: Any, *, symbolic_sizes: bool) -> Recording:
        self.asked.append(symbolic_sizes)
        if not symbolic_sizes:
            return RECORDED
        if isinstance(self.symbolic, FxmemError):
            raise self.symbolic
        return self.symbolic() if callable(self.symbolic) else self.symbolic


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
