"""torch_scatter 2.1.2, https://github.com/rusty1s/pytorch_scatter: ``torch_scatter/scatter.py``.

Sums and means are PyTorch's operators there, too. Maxima are a kernel, which returns the places of
the maxima besides (``csrc/scatter.cpp``), and whose backward scatters to them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def scatter_sum(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
) -> Tensor:
    index = _broadcast(index, src, dim)
    if out is None:
        size = list(src.shape)
        size[dim] = int(index.max()) + 1 if dim_size is None else dim_size
        out = src.new_zeros(size)
    return out.scatter_add_(dim, index, src)


def scatter_mean(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
) -> Tensor:
    total = scatter_sum(src, index, dim, out, dim_size)
    count = scatter_sum(torch.ones_like(index, dtype=src.dtype), index, -1, None, total.shape[dim])
    count = _broadcast(count.clamp_(min=1), total, dim)
    return total.true_divide_(count)


class _ScatterMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, src: Tensor, index: Tensor, dim: int, size: int) -> Any:
        shape = list(src.shape)
        shape[dim] = size
        out, places = src.new_empty(shape), index.new_empty(shape)
        ctx.save_for_backward(index, places)
        ctx.dim, ctx.shape = dim, src.shape
        ctx.mark_non_differentiable(places)
        return out, places

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _places: Tensor) -> Any:
        _index, places = ctx.saved_tensors
        shape = list(ctx.shape)
        shape[ctx.dim] += 1  # for groups without a member
        result = gradient.new_zeros(shape).scatter_(ctx.dim, places, gradient)
        return result.narrow(ctx.dim, 0, shape[ctx.dim] - 1), None, None, None


def scatter_max(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
) -> Any:
    index = _broadcast(index, src, dim)
    size = int(index.max()) + 1 if dim_size is None else dim_size
    return _ScatterMax.apply(src, index, dim % src.dim(), size)


def scatter(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
    reduce: str = "sum",
) -> Any:
    if reduce in ("min", "max"):
        return scatter_max(src, index, dim, out, dim_size)[0]
    function = scatter_mean if reduce == "mean" else scatter_sum
    return function(src, index, dim, out, dim_size)


def _broadcast(index: Tensor, other: Tensor, dim: int) -> Tensor:
    """Expands an index of one dimension along the others; makes no copy."""
    if index.dim() == 1:
        index = index.view([-1 if d == dim % other.dim() else 1 for d in range(other.dim())])
    return index.expand_as(other) if index.dim() == other.dim() else index


# A minimum takes what a maximum does.
NAMES = {
    "scatter": scatter,
    "scatter_add": scatter_sum,
    "scatter_max": scatter_max,
    "scatter_mean": scatter_mean,
    "scatter_min": scatter_max,
    "scatter_sum": scatter_sum,
}
