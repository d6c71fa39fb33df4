"""Results lie in memory as those of real kernels do, whatever the gradient that comes in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels import describe
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from fxmem.kernels.cpu import CPU

aten = torch.ops.aten

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "reversed": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "expanded": lambda x: x[:1, :1, :1].expand(x.shape),
    "spread": lambda x: torch.stack((x, x), -1)[..., 0],
}
X = torch.rand(2, 6, 4)
STATISTICS = (torch.rand(2, 6, 1), torch.rand(2, 6, 1))
CHANNELS = tuple(torch.rand(6) for _ in range(4))
BATCH_NORM = aten.native_batch_norm.default
BATCH_NORM_BACKWARD = aten.native_batch_norm_backward.default
LAYER_NORM_BACKWARD = aten.native_layer_norm_backward.default
FIRST = [True, False, False]
FLAGS, WEIGHTS = (True, 1e-5, [True, True, False]), (torch.rand(4), torch.rand(4))
CALLS: dict[str, tuple[Any, ...]] = {
    "batch_norm": (BATCH_NORM, *CHANNELS, True, 0.1, 1e-5),
    "batch_norm, frozen": (BATCH_NORM, *CHANNELS, False, 0.1, 1e-5),
    "batch_norm without weight": (BATCH_NORM, None, None, *CHANNELS[:2], True, 0.1, 1e-5),
    "batch_norm of input": (BATCH_NORM_BACKWARD, X, *CHANNELS[:3], *CHANNELS[:2], *FLAGS),
    "elu": (aten.elu_backward.default, 1.0, 1.0, 1.0, False, X),
    "hardsigmoid": (aten.hardsigmoid_backward.default, X),
    "hardswish": (aten.hardswish_backward.default, X),
    "hardtanh": (aten.hardtanh_backward.default, X, -1.0, 1.0),
    "logit": (aten.logit_backward.default, X, 1e-6),
    "softplus": (aten.softplus_backward.default, X, 1.0, 20.0),
    "log_softmax": (aten._log_softmax_backward_data.default, X, 1, torch.float32),
    "softmax": (aten._softmax_backward_data.default, X, 1, torch.float32),
    "layer_norm": (LAYER_NORM_BACKWARD, X, [4], *STATISTICS, *WEIGHTS, [True] * 3),
    "layer_norm_of_input": (LAYER_NORM_BACKWARD, X, [4], *STATISTICS, None, None, FIRST),
    "gelu": (aten.gelu_backward.default, X),
    "silu": (aten.silu_backward.default, X),
    "leaky_relu": (aten.leaky_relu_backward.default, X, 0.1, False),
    "tanh": (aten.tanh_backward.default, X),
    "sigmoid": (aten.sigmoid_backward.default, X),
    "threshold": (aten.threshold_backward.default, X, 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_lie_as_those_of_real_kernels(name: str, layout: str) -> None:
    func, *rest = CALLS[name]
    args = (LAYOUTS[layout](torch.rand(2, 6, 4)), *rest)
    with FakeTensorMode() as mode:
        fakes = tree_map_only(Tensor, mode.from_tensor, args)
        predicted = CPU.kernels.get(func, func)(*fakes)
    assert describe(predicted) == describe(func(*args))
