"""Tests that raise or go on, depending on a truth that somebody else knows.

In a file of its own: pytest rewrites the asserts of test files.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

a: Any = None
b: Any = None
c: Any = None

_logger = logging.getLogger(__name__)


def assert_it() -> None:
    assert a


def assert_its_opposite() -> None:
    assert not a, "never"


def assert_several() -> None:
    assert a and b and a < b


def assert_one_of_several() -> None:
    assert a or b


def assert_over_lines() -> None:
    assert (
        a
        < b
    )  # fmt: skip


def raise_if() -> None:
    if a:
        message = "no"
        raise ValueError(message)


def raise_if_any() -> None:
    if a or b or a < b:
        raise ValueError


def raise_if_not() -> None:
    if not a:
        raise ValueError


def raise_if_not_all() -> None:
    if not all(truth is truth and bool(truth) for truth in (a, b)):  # gpytorch's ExactGP
        raise ValueError


def raise_if_any_listed() -> None:
    if any([bool(a), bool(b)]):
        raise ValueError


def raise_else() -> None:
    if a:
        pass
    else:
        raise ValueError


def raise_elif() -> None:
    if a is b:
        pass
    elif a:
        raise ValueError


def branch() -> None:
    if a:
        pass


def branch_both_raise() -> None:
    if a:
        raise ValueError
    raise KeyError


def loop() -> None:
    while a:
        raise ValueError


def convert_within() -> None:
    if [bool(a)]:
        raise ValueError


def mixed() -> None:
    if a and not b:
        raise ValueError


def warn_if() -> None:
    if a:
        text = "it is"
        text += " so"
        if text:
            warnings.warn(text, stacklevel=1)


def log_if() -> None:
    if a:
        _logger.debug("it is %s", "so")
        logging.getLogger(__name__).debug("it is")


def set_if() -> str:
    text = "it is not"
    if a:
        text = "it is"
        print(text)
    return text


def call_if() -> None:
    if a:
        print("it is")
        branch()


def call_print_if() -> None:
    if a:
        c.fingerprint(b)


def call_own_error_if() -> None:
    if a:
        c.error(b)
