"""apex, https://github.com/NVIDIA/apex: layer normalization and Adam in one kernel each.

Source: ``apex/normalization/fused_layer_norm.py``, ``csrc/layer_norm_cuda_kernel.cu`` and
``apex/optimizers/fused_adam.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_PARTS = 16
"""``part_size``: rows of partial sums of the weights' gradients."""


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = x.numel() // weight.numel()
        mean, inverse = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias, _mean, _inverse = ctx.saved_tensors
        gradients = [torch.empty_like(each) for each in (x, weight, bias)]
        shape = (_PARTS, weight.numel())
        sums = [x.new_empty(shape, dtype=torch.float32) for _ in range(2)]
        del sums
        return tuple(gradients)


class FusedLayerNorm(nn.LayerNorm):
    """Keeps the input, and a mean and a deviation for each row."""

    def forward(self, x: Tensor) -> Any:
        return _LayerNorm.apply(x, self.weight, self.bias)


class FusedAdam(torch.optim.Optimizer):
    """Two states in float32 for each parameter; the update takes nothing besides."""

    def __init__(self, params: Any, lr: float = 1e-3, **_options: Any) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    for name in ("exp_avg", "exp_avg_sq"):
                        zeros = torch.zeros_like(parameter, dtype=torch.float32)
                        self.state[parameter][name] = zeros


NORMALIZATION = {"FusedLayerNorm": FusedLayerNorm}
OPTIMIZERS = {"FusedAdam": FusedAdam}
