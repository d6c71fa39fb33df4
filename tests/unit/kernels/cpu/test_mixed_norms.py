"""Layer and group normalisation of bfloat16 with parameters of float32, as under autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fxmem.kernels.cpu import CPU

LAYER, GROUP = torch.ops.aten.native_layer_norm.default, torch.ops.aten.native_group_norm.default
F32, BF16 = torch.float32, torch.bfloat16
PARAMETERS = {"float32": (F32, F32), "bias": (None, F32), "bfloat16": (BF16, BF16), "none": ()}


def describe(results: Any) -> list[Any]:
    return [(t.dtype, tuple(t.shape), t.stride()) for t in results]


@pytest.mark.parametrize("kind", PARAMETERS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("operator", [LAYER, GROUP], ids=["layer", "group"])
def test_results_are_the_real_ones(operator: Any, layout: torch.memory_format, kind: str) -> None:
    x = torch.ones(2, 8, 4, 4, dtype=BF16).contiguous(memory_format=layout)
    size = (4, 4) if operator is LAYER else (8,)
    dtypes = PARAMETERS[kind] or (None, None)
    parameters = [None if d is None else torch.ones(size, dtype=d) for d in dtypes]

    def run(call: Any, x: Tensor, *parameters: Tensor | None) -> Any:
        if operator is LAYER:
            return call(x, size, *parameters, 1e-5)
        return call(x, *parameters, 2, 8, 16, 2, 1e-5)

    real = describe(run(operator, x, *parameters))
    with FakeTensorMode() as mode:
        fakes = [None if p is None else mode.from_tensor(p) for p in (x, *parameters)]
        found = run(CPU.kernels[operator], *fakes)
    assert describe(found) == real
