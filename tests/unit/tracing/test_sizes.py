"""Integers that remember how they were computed."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxmem.tracing.sizes import Dim, SizeInt, make_shape

OPERATIONS = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod)


def evaluate(size: Any, dims: tuple[int, ...]) -> int:
    """Evaluates an expression for other dimensions, as the graph's nodes would."""
    if not isinstance(size, SizeInt):
        return int(size)
    expression = size.expression
    if isinstance(expression, Dim):
        return dims[expression.dim]
    values = [evaluate(argument, dims) for argument in expression.arguments]
    return int(expression.function(*values))


@given(
    st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(1, 9), st.booleans()), max_size=6),
    st.integers(1, 100),
    st.integers(1, 100),
)
def test_arithmetic_is_that_of_ints_and_follows_other_sizes(
    steps: list[tuple[Any, int, bool]], here: int, there: int
) -> None:
    size, plain, other = make_shape((here,), "x")[0], here, there
    for function, number, is_reflected in steps:
        if is_reflected and function in (operator.floordiv, operator.mod) and not (plain and other):
            continue  # no division by zero
        arguments = (number, size) if is_reflected else (size, number)
        size = function(*arguments)
        plain = function(*((number, plain) if is_reflected else (plain, number)))
        other = function(*((number, other) if is_reflected else (other, number)))
    assert isinstance(size, SizeInt)
    assert size == plain
    assert evaluate(size, (there,)) == other


def test_floats_and_bools_make_plain_numbers() -> None:
    size = make_shape((6,), "x")[0]
    assert (size * 0.5, 0.5 * size, size - 0.5, 7.5 - size) == (3.0, 3.0, 5.5, 1.5)
    assert type(size * True) is int
    assert (type(size / 2), type(size**2)) == (float, int)
    with pytest.raises(TypeError):
        size + None  # type: ignore[operator]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_is_a_plain_int(duplicate: Any) -> None:
    size = make_shape((3,), object())[0]
    assert duplicate(size) == 3 and type(duplicate(size)) is int
