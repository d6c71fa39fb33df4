"""Mixed dtypes: refused where real tensors are, and only there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxmem
from fxmem.recording.dtypes import check_dtypes

aten = torch.ops.aten
Make = Callable[..., Tensor]


def list_conv(x: Make, w: Make, *, transposed: bool) -> tuple[Any, ...]:
    return (x(1, 2, 5), w(2, 2, 3), None, [1], [0], [1], transposed, [0], 1)


OPERATORS: dict[str, tuple[Any, Callable[[Make, Make], tuple[Any, ...]]]] = {
    "mm": (aten.mm.default, lambda x, w: (x(2, 3), w(3, 4))),
    "addmm": (aten.addmm.default, lambda x, w: (w(4), x(2, 3), w(3, 4))),
    "mv": (aten.mv.default, lambda x, w: (w(2, 3), x(3))),
    "addmv": (aten.addmv.default, lambda x, w: (w(2), w(2, 3), x(3))),
    "convolution": (aten.convolution.default, lambda x, w: list_conv(x, w, transposed=False)),
    "transposed": (aten.convolution.default, lambda x, w: list_conv(x, w, transposed=True)),
    "batch_norm": (
        aten.native_batch_norm.default,
        lambda x, w: (x(2, 3), w(3), w(3), w(3), w(3), True, 0.1, 1e-5),
    ),
    "layer_norm": (aten.native_layer_norm.default, lambda x, w: (x(2, 3), [3], w(3), w(3), 1e-5)),
    "group_norm": (
        aten.native_group_norm.default,
        lambda x, w: (x(2, 4, 3), w(4), w(4), 2, 4, 3, 2, 1e-5),
    ),
    "layer_norm without parameters": (
        aten.native_layer_norm.default,
        lambda x, w: (x(2, 3), [3], None, None, 1e-5),
    ),
}
FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(("first", "second"), [*itertools.product(FLOATING, FLOATING)])
def test_what_real_tensors_do(name: str, first: torch.dtype, second: torch.dtype) -> None:
    operator, make_arguments = OPERATORS[name]
    arguments = make_arguments(
        lambda *shape: torch.ones(shape, dtype=first),
        lambda *shape: torch.ones(shape, dtype=second),
    )
    assert fails(check_dtypes, operator, arguments) == fails(operator, *arguments)


def fails(call: Callable[..., Any], *arguments: Any) -> bool:
    try:
        call(*arguments)
    except RuntimeError:
        return True
    return False


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.linear(x))


def test_a_linear_layer_refuses_integers_and_names_the_line() -> None:
    with pytest.raises(fxmem.TraceError) as caught:
        fxmem.analyze(Net(), ("2x4:int64",), device="cpu")
    line = Net.forward.__code__.co_firstlineno + 1
    assert str(caught.value) == (
        f"the step failed at test_dtypes.py:{line}: RuntimeError: two tensors must have the same "
        "dtype, but got int64 and float32 (check shapes and dtypes of the inputs: 2x4:int64)"
    )


def test_a_model_cast_to_bf16_is_cast_with_its_inputs() -> None:
    assert fxmem.analyze(Net(), ("2x4",), dtype="bf16", device="cpu").peak_bytes > 0
