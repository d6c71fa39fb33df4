"""Answers that let the code go on."""

from __future__ import annotations

import contextlib
import sys

import pytest
import sample_nets.raising as raising

from fxmem.fakes.branches import find_passing_answer


class Unknown:
    """Its truth is what lets the code that asks for it go on; asked for elsewhere, an error."""

    def __bool__(self) -> bool:
        answer = find_passing_answer(sys._getframe(1))
        if answer is None:
            raise LookupError("both answers let the code go on")
        return answer

    def __lt__(self, other: object) -> Unknown:
        return self


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raising, "a", Unknown())
    monkeypatch.setattr(raising, "b", Unknown())


GO_ON = """
    assert_it assert_its_opposite assert_several assert_one_of_several assert_over_lines raise_if
    raise_if_any raise_if_not raise_if_not_all raise_if_any_listed raise_else raise_elif warn_if
    log_if
"""
STOP = """
    branch branch_both_raise loop convert_within set_if call_if call_print_if call_own_error_if
"""


@pytest.mark.parametrize("name", GO_ON.split())
def test_a_test_that_only_raises_or_warns_passes(name: str) -> None:
    getattr(raising, name)()


@pytest.mark.parametrize("name", STOP.split())
def test_any_other_truth_is_not_known(name: str) -> None:
    with pytest.raises(LookupError):
        getattr(raising, name)()


def test_operands_that_need_different_answers_are_told_apart_since_python_3_12() -> None:
    """Before, Python says of a jump where the whole statement is written."""
    is_told = sys.version_info >= (3, 12)
    with contextlib.nullcontext() if is_told else pytest.raises(LookupError):
        raising.mixed()
