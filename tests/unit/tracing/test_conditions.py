"""Signatures of arguments: another one where code may do something else with an argument."""

from __future__ import annotations

import copy
import pickle
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from fxmem.tracing.conditions import describe_value, read_settings

X = torch.randn(8, 4)


class Mode(Enum):
    SUM = 1
    MEAN = 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (2, 2.0),
        (0.0, -0.0),
        (1, True),
        (Mode.SUM, Mode.MEAN),
        (torch.float32, torch.float64),
        (slice(0, 2), slice(0, 3)),
        (np.float32(1), np.float32(2)),
        (torch.sin, torch.cos),
        ({1: 0}, {True: 0}),
        (X, X.double()),
        (X, X[0]),
        ([X], (X,)),
    ],
)
def test_a_signature_tells_arguments_apart(one: Any, other: Any) -> None:
    assert describe_value([X, one]).structure != describe_value([X, other]).structure


@pytest.mark.parametrize("value", [(1, "a"), {"scale": 1.0}, np.float32(1), Mode.SUM, slice(0, 2)])
def test_a_copy_is_the_same(value: Any) -> None:
    described = describe_value([X, value])
    assert describe_value([X.clone(), copy.deepcopy(value)]) == described
    assert pickle.loads(pickle.dumps(described)) == described


def test_a_precision_of_products_that_has_two_names() -> None:
    matmul: Any = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("torch has one name")
    before, precision = read_settings(), matmul.fp32_precision
    matmul.fp32_precision = "tf32"  # transformers: TrainingArguments(tf32=True)
    try:
        assert read_settings() != before
    finally:
        matmul.fp32_precision = precision
    assert read_settings() == before
