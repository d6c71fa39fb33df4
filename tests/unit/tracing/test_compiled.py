"""Functions under ``torch.compile``, which a recording runs as they are written."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.patching import patch
from fxmem.tracing.compiled import leave_out_compiler, patch_when_imported

NOTE = "torch.compile was left out: the figures are of eager mode."


def refuse(*_graph: Any) -> Any:
    raise AssertionError("compiled")


COMPILE = functools.partial(torch.compile, backend=refuse, fullgraph=True)


def double(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize(
    "make",
    [
        lambda: functools.partial(COMPILE(double)),
        lambda: lambda x: COMPILE(double)(x),
        lambda: lambda x: torch.compile(backend=refuse)(double)(x),
        lambda: lambda x: torch._dynamo.optimize(refuse)(double)(x),
        lambda: COMPILE(nn.ReLU()),
    ],
)
def test_code_compiled_before_or_within_runs_eagerly(make: Callable[[], Any]) -> None:
    compiled, notes, x = make(), dict[str, None](), torch.ones(2)
    with leave_out_compiler(notes):
        assert compiled(x).sum() > 0
    assert [*notes] == [NOTE]
    with pytest.raises(Exception, match="compiled"):
        compiled(x)


def test_nothing_is_noted_where_nothing_is_compiled() -> None:
    notes: dict[str, None] = {}
    with leave_out_compiler(notes):
        torch.compiler.disable(double)(torch.ones(2))
    assert not notes


def test_a_module_is_patched_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fxmem_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = [*sys.meta_path]
    with patch_when_imported("fxmem_late", lambda module: mock.patch.object(module, "value", 2)):
        assert importlib.util.find_spec("fxmem_late")  # as libraries ask whether others are there
        late: Any = importlib.import_module("fxmem_late")
        assert late.value == 2
    assert late.value == 1 and sys.meta_path == finders
    del sys.modules["fxmem_late"]


def test_a_patch_lasts_longer_than_those_around_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fxmem_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    owner: Any = type("Owner", (), {"value": 1})
    with patch_when_imported("fxmem_late", lambda module: patch({module: {"value": 2}})):
        with patch({owner: {"value": 2}}):
            late: Any = importlib.import_module("fxmem_late")
            with patch({owner: {"value": 3}}):
                assert owner.value == 3
            assert owner.value == 2
        assert (late.value, owner.value) == (2, 1)
    assert late.value == 1
    del sys.modules["fxmem_late"]


class Compiling(torch.optim.SGD):
    """Updates by a function that it compiles in each step, as torchao's AdamW8bit does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            COMPILE(lambda p, g: p.copy_(p - g))(parameter.detach(), parameter.grad)


def test_an_optimizer_that_compiles_is_analysed() -> None:
    analysis = fxmem.analyze(nn.Linear(8, 8), "4x8", optimizer=Compiling, device="cpu")
    assert NOTE in analysis.setup.notes
    assert "aten.sub.Tensor" in {operation.name for operation in analysis.graph.operations}


def test_a_module_that_is_not_installed_is_missing_as_ever() -> None:
    with (
        patch_when_imported("fxmem_missing", lambda _module: contextlib.nullcontext()),
        pytest.raises(ModuleNotFoundError, match="fxmem_missing"),
    ):
        importlib.import_module("fxmem_missing")
