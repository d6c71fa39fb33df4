"""Workspaces that users state; docs/adding-an-operator.md has one that counts."""

from __future__ import annotations

import pytest

import fxmem
from fxmem import UsageError


@pytest.mark.parametrize("name", ["mylib::missing", "mylib", "", "aten::add.Missing"])
def test_an_operator_that_is_not_there_is_an_error(name: str) -> None:
    with pytest.raises(UsageError, match="there is no operator"):
        fxmem.register_workspace(name, lambda *_: 0)
