"""Values compared bit by bit."""

from __future__ import annotations

import dataclasses
import math
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxmem.verifying.comparing import compare_records, compare_values, iterate_leaves
from fxmem.verifying.verification import Difference, Kind

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Output:
    logits: Any
    loss: Any = None


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (torch.ones(2), ["o"]),
        ({"a": [1, (2, 3)]}, ["o['a'][0]", "o['a'][1][0]", "o['a'][1][1]"]),
        (Output(1), ["o.logits", "o.loss"]),
        (Point(1, [2]), ["o.x", "o.y[0]"]),
        (SimpleNamespace(mean=1, parts=[2]), ["o.mean", "o.parts[0]"]),
        ([], []),
    ],
)
def test_parts_of_any_structure_have_names(value: Any, names: list[str]) -> None:
    assert [name for name, _ in iterate_leaves(value, "o")] == names


def test_an_object_that_holds_itself_is_entered_once() -> None:
    value = SimpleNamespace(size=1)
    value.own = value
    assert [*iterate_leaves(value, "o")] == [("o.size", 1)]


SPARSE = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
EQUAL = [
    torch.tensor([math.nan, math.inf, -0.0]),
    torch.tensor([1 + 2j, complex(math.nan, -0.0)]).conj(),
    torch.tensor([True, False]),
    torch.tensor(3),
    torch.zeros(0, 4),
    torch.randn(2, 3).t(),
    torch.randn(2, 3, 4, 4),
    torch.randn(3).to(torch.float8_e4m3fn),
    torch.randn(3).to(torch.bfloat16),
    SPARSE.to_sparse(),
    math.nan,
    "text",
    None,
    object(),
]


@pytest.mark.parametrize("value", EQUAL, ids=[str(at) for at in range(len(EQUAL))])
def test_a_copy_is_equal(value: Any) -> None:
    copy = value.clone() if isinstance(value, torch.Tensor) else value
    assert compare_values(value, copy) is None
    if isinstance(value, torch.Tensor) and value.ndim == 4:  # the layout in memory does not matter
        assert compare_values(value, value.to(memory_format=torch.channels_last)) is None


NAN = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (0.0, -0.0, ((0,), "0", "-0", 1, 0.0)),
        ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.5, 2.0]], ((1, 0), "3", "3.5", 2, 2.0)),
        ([1.0, math.nan], [1.0, 1.0], ((1,), "nan", "1", 1, None)),
        ([1.0], [1.00000012], ((0,), "1", "1.00000012", 1, 2**-23)),
        ([True, False], [True, True], ((1,), "False", "True", 1, 1.0)),
        ([3, 2**40], [3, 2**40 + 1], ((1,), "1099511627776", "1099511627777", 1, 1.0)),
        ([1 + 1j], [1 - 1j], ((0,), "(1+1j)", "(1-1j)", 1, 2.0)),
    ],
)
def test_the_first_element_that_differs(ours: Any, theirs: Any, expected: Any) -> None:
    a, b = torch.tensor(ours).reshape(-1), torch.tensor(theirs).reshape(-1)
    if isinstance(ours, list) and isinstance(ours[0], list):
        a, b = torch.tensor(ours), torch.tensor(theirs)
    found = compare_values(a, b)
    assert found is not None
    names = ("index", "baseline", "planned", "elements", "max_difference")
    assert tuple(found[name] for name in names) == expected


def test_nans_of_other_bits_differ() -> None:
    assert compare_values(NAN[:1], NAN[:1].clone()) is None
    assert compare_values(NAN[:1], NAN[1:]) is not None


@pytest.mark.parametrize(
    ("ours", "theirs", "cause", "words"),
    [
        (torch.zeros(2), torch.zeros(3, 1), "shape", ("2", "3x1")),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "dtype", ("float32", "float64")),
        (torch.zeros(2), None, "type", ("Tensor", "None")),
        (SPARSE, SPARSE.to_sparse(), "layout", ("strided", "sparse_coo")),
        (1, True, "type", ("int", "bool")),
        ("a", "b", "value", ("'a'", "'b'")),
        (0.0, -0.0, "value", ("0.0", "-0.0")),
        (SPARSE.to_sparse(), (2 * SPARSE).to_sparse(), "value", ("2", "4")),
        (SPARSE.to_sparse(), SPARSE.t().to_sparse(), "value", ("0", "1")),
        (SPARSE.to_sparse(), torch.eye(2).to_sparse(), "shape", ("2x1", "2x2")),
    ],
)
def test_what_differs_beside_values(
    ours: Any, theirs: Any, cause: str, words: tuple[str, str]
) -> None:
    found = compare_values(ours, theirs)
    assert found is not None
    assert (found["cause"], found["baseline"], found["planned"]) == (cause, *words)


def test_records_are_compared_in_the_order_of_the_first() -> None:
    ours = {(Kind.OUTPUT, "a"): 1, (Kind.LOSS, "loss"): 2, (Kind.BUFFER, "b"): 3}
    theirs = {(Kind.LOSS, "loss"): 4, (Kind.OUTPUT, "a"): 1, (Kind.INPUT, "c"): 5}
    assert compare_records(2, ours, theirs) == (
        Difference(2, Kind.LOSS, "loss", "value", None, "2", "4"),
        Difference(2, Kind.BUFFER, "b", "missing with the plan"),
        Difference(2, Kind.INPUT, "c", "with the plan only"),
    )
