"""What an argument is to a graph: another where code may do something else with it."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.tracing.conditions import describe_value

X = torch.randn(8, 4)


class Mode(Enum):
    SUM = 1
    MEAN = 2


class Size(IntEnum):
    SMALL = 2


class Net(nn.Module):
    """A layer, and what some function makes of its result and another element of the input."""

    def __init__(self, run: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.layer, self.run = nn.Linear(4, 4), run

    def forward(self, inputs: list[Any]) -> Tensor:
        return self.run(torch.tanh(self.layer(inputs[0])), inputs[1])


OTHERS = {
    "an integer and a float": (lambda y, n: y + isinstance(n, float), 2, 2.0),
    "the sign of a zero": (lambda y, n: y * n, 0.0, -0.0),
    "a truth": (lambda y, n: y + isinstance(n, bool), 1, True),
    "an enumeration": (lambda y, mode: y.sum() if mode is Mode.SUM else y, Mode.SUM, Mode.MEAN),
    "its number": (lambda y, size: y + isinstance(size, Size), 2, Size.SMALL),
    "a dtype": (lambda y, dtype: y.to(dtype), torch.float32, torch.float64),
    "a slice": (lambda y, rows: y[rows], slice(0, 2), slice(0, 3)),
    "a number of NumPy": (lambda y, n: y * float(n), np.float32(1), np.float32(2)),
    "a decimal": (lambda y, n: y * float(n), Decimal(1), Decimal(2)),
    "a function": (lambda y, run: run(y), torch.sin, torch.cos),
    "a key": (lambda y, table: y + isinstance(next(iter(table)), bool), {1: 0}, {True: 0}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_an_input_holds_beside_tensors_counts(name: str) -> None:
    run, one, other = OTHERS[name]
    model = Net(run)
    analysis = fxmem.analyze(model, ([X, one],), device="cpu")
    assert analysis.frontend == "fx"
    planned = fxmem.apply(model, fxmem.pareto(analysis, time_limit_s=0.1)[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(planned([X, one]), model([X, one]))
    with pytest.warns(fxmem.FxmemWarning, match="another structure"):
        assert torch.equal(planned([X, other]), model([X, other]))


@pytest.mark.parametrize("value", [(1, "a"), {"scale": 1.0}, np.float32(1), Mode.SUM, slice(0, 2)])
def test_a_copy_is_the_same(value: Any) -> None:
    described = describe_value([X, value])
    assert describe_value([X.clone(), copy.deepcopy(value)]) == described
    assert pickle.loads(pickle.dumps(described)) == described
