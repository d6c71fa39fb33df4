"""Every measurement that others published, held to the error recorded for it.

``python -m benchmarks.published --record`` records the errors: a smaller one is recorded anew, a
larger one has to be explained.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from benchmarks.published.cases import Case, is_equal, load_all
from benchmarks.published.predicting import predict

CASES = load_all()
LIBRARIES = ("torchvision", "timm", "transformers")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_difference_is_recorded_and_has_a_cause(case: Case) -> None:
    assert set(case.error) == set(case.measured), "run python -m benchmarks.published --record"
    if not all(is_equal(case, error) for error in case.error.values()):
        assert case.cause_kind
        assert case.cause


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow if c.slow else ()) for c in CASES], ids=str
)
def test_the_prediction_has_the_recorded_error(case: Case) -> None:
    if any(importlib.util.find_spec(name) is None for name in LIBRARIES):
        pytest.skip("the libraries of models are not installed")
    if case.recorded_with.split("+")[0] != torch.__version__.split("+")[0]:
        pytest.skip(f"recorded with torch {case.recorded_with}")
    predicted = predict(case)
    assert {name: predicted[name] - case.measured[name] for name in case.measured} == case.error
