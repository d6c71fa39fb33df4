"""Attributes of torch are replaced for a while, and all of them come back."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from fxmem.patching import find_path, hold_process, leave_recording, patch
from fxmem.versions.interfaces import find_owner
from fxmem.versions.patches import PATCHES


def test_the_owners_of_all_patches_are_where_the_table_says() -> None:
    paths = [row.owner for row in PATCHES if not row.is_optional]
    assert [find_path(find_owner(path)) for path in paths] == paths


def test_all_come_back_in_reverse_order_after_an_error() -> None:
    before, own = torch.cuda.is_available, vars(torch.UntypedStorage).get("resize_")
    with pytest.raises(ZeroDivisionError), patch({torch.cuda: {"is_available": lambda: 1}}):
        inner = {torch.cuda: {"is_available": lambda: 2}, torch.UntypedStorage: {"resize_": None}}
        with patch(inner):
            assert torch.cuda.is_available() == 2 and torch.UntypedStorage.resize_ is None
            assert 1 / 0
        raise AssertionError
    assert torch.cuda.is_available is before
    assert vars(torch.UntypedStorage).get("resize_") is own  # an inherited one is inherited again


def test_one_that_cannot_be_replaced_leaves_none_replaced() -> None:
    before = torch.compile
    refused = {torch: {"compile": None}, nn.Module: {"forward": None}}
    with pytest.raises(LookupError, match=r"Module\.forward is not listed"), patch(refused):
        raise AssertionError
    assert torch.compile is before


def test_names_of_others_need_no_list() -> None:
    module = ModuleType("others")
    with patch({module: {"new": 1}}):
        assert vars(module)["new"] == 1
    assert "new" not in vars(module)


def test_what_code_sets_itself_is_kept_where_a_recording_is_left() -> None:
    owner: Any = type("Owner", (), {"kept": 1, "doubled": 1})
    with hold_process(), patch({owner: {"kept": 2, "doubled": 2}}), patch({owner: {"doubled": 3}}):
        owner.kept = "own"
        with leave_recording():
            assert (owner.kept, owner.doubled) == (1, 1)
        assert (owner.kept, owner.doubled) == ("own", 3)
    assert (owner.kept, owner.doubled) == (1, 1)
