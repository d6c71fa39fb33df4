"""Functions whose C++ code looks at values, or writes in place unless Python watches.

Source: ``torch/csrc/autograd/FunctionsManual.cpp``, ``aten/src/ATen/native/Loss.cpp`` and
``Onehot.cpp``. For a fake tensor, which has no values, they take a path that serves any: with
more tensors than on the one that an ordinary tensor takes. Ordinary is, for products, that no
factor is zero.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from fxmem.fakes.values import (
    MAX_ELEMENTS,
    Memory,
    attach_value,
    find_known,
    find_most_elements,
)
from fxmem.kernels.registry import ANY, Function

_REDUCTIONS = ("none", "mean", "sum")
"""``Reduction`` (aten/src/ATen/core/Reduction.h)."""


class _Product(torch.autograd.Function):
    """``prod_backward``: a zero is looked for; zeros are counted where there is a dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
        result = torch.prod(x) if dim is None else torch.prod(x, dim, keepdim)
        ctx.save_for_backward(x, result)
        ctx.dim, ctx.keepdim = dim, keepdim
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, result = ctx.saved_tensors
        if ctx.dim is None and not x.dim():
            return grad.clone(), None, None
        if ctx.dim is not None and not ctx.keepdim:
            grad, result = grad.unsqueeze(ctx.dim), result.unsqueeze(ctx.dim)
        zeros = torch.eq(x, 0)
        if ctx.dim is None:
            del zeros
        else:
            count = zeros.sum(ctx.dim, True)
            count.sum()
        return grad * (result / x), None, None


class _RunningProduct(torch.autograd.Function):
    """``cumprod_backward``: zeros are looked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        result = torch.cumprod(x, dim)
        ctx.save_for_backward(x, result)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, result = ctx.saved_tensors
        weighted = result * grad
        zeros = torch.eq(x, 0)
        zeros.any()
        flipped = weighted.flip(ctx.dim)  # ``reversed_cumsum``: its parts live to its end
        sums = flipped.cumsum(ctx.dim)
        result = sums.flip(ctx.dim)
        del flipped, sums
        return result.div(x), None


class _Extreme(torch.autograd.Function):
    """``evenly_distribute_backward``: among all elements that equal the result."""

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor) -> Any:
        result = function(x)
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, result = ctx.saved_tensors
        torch.isnan(result)
        mask = torch.eq(x, result)
        return None, grad.new_zeros(x.shape).masked_fill_(mask, grad / mask.sum())


class _Logits(torch.autograd.Function):
    """``binary_cross_entropy_with_logits_backward``: in place."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        ctx.reduction = args[4]
        ctx.save_for_backward(*args[:4])
        return torch.binary_cross_entropy_with_logits(*args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, target, weight, positive = ctx.saved_tensors
        if positive is None:
            result = x.sigmoid().sub_(target)
        else:
            factor = positive.mul(target)
            result = factor.add(1).sub_(target).mul_(x.sigmoid()).sub_(factor)
        result.mul_(grad)
        if weight is not None:
            result.mul_(weight)
        if ctx.reduction == _REDUCTIONS.index("mean"):
            result.div_(x.numel())
        return result, None, None, None, None


@ANY.kernel("_efficientzerotensor")
def efficient_zeros(size: list[int], **options: Any) -> Tensor:
    """aten/src/ATen/ZeroTensorFallback.cpp: where zeros are asked for, one is seen everywhere."""
    return torch.zeros((), **options).expand(size)


def _is_differentiated(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()


def _run_product(function: Function, *args: Any, **kwargs: Any) -> Any:
    given = dict(zip(("dim", "keepdim"), args[1:], strict=False)) | kwargs
    is_known = len(args) < 4 and given.keys() <= {"dim", "keepdim"}
    if not is_known or not _is_differentiated(args[0]) or not isinstance(given.get("dim", 0), int):
        return function(*args, **kwargs)
    dim, keepdim = given.get("dim"), given.get("keepdim", False)
    return _Product.apply(args[0], dim, keepdim)  # type: ignore[no-untyped-call]


def _run_running_product(function: Function, *args: Any, **kwargs: Any) -> Any:
    dim = args[1] if len(args) == 2 else kwargs.get("dim")
    is_known = bool(args) and len(args) + len(kwargs) == 2 and isinstance(dim, int)
    if not is_known or not _is_differentiated(args[0]):
        return function(*args, **kwargs)
    return _RunningProduct.apply(args[0], dim)  # type: ignore[no-untyped-call]


def _run_extreme(function: Function, *args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs or not _is_differentiated(args[0]):
        return function(*args, **kwargs)
    return _Extreme.apply(function, *args)  # type: ignore[no-untyped-call]


@ANY.function(torch.nn.functional.binary_cross_entropy_with_logits)
def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Tensor:
    """Differentiated by the logits alone; other calls are left as they are."""
    rest = [value for value in (target, weight, pos_weight) if value is not None]
    if (
        not _is_differentiated(input)
        or any(map(_is_differentiated, rest))
        or size_average is not None
        or reduce is not None
        or input.shape != target.shape
    ):
        return torch.nn.functional.binary_cross_entropy_with_logits(
            input, target, weight, size_average, reduce, reduction, pos_weight
        )
    args = (input, target, weight, pos_weight, _REDUCTIONS.index(reduction))
    result: Tensor = _Logits.apply(*args)  # type: ignore[no-untyped-call]
    return result


@ANY.function(Tensor.__format__)
def format_value(tensor: Tensor, spec: str) -> str:
    """``Tensor.__format__``: the value of a scalar, as a name in a ``ModuleDict``."""
    value = find_known(tensor) if tensor.dim() == 0 else None
    if value is not None:
        return format(value.real.item(), spec)
    text: str = Tensor.__format__(tensor, spec)  # type: ignore[no-untyped-call]
    return text


@ANY.function(Tensor.share_memory_)
def _share_memory(tensor: Tensor) -> Tensor:
    """On a GPU nothing is to be done, and a fake of the host has nothing that could be shared."""
    if not isinstance(tensor, FakeTensor):
        tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor


@ANY.function(torch.nn.functional.one_hot)
def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """``one_hot``: ones are scattered; the number of classes may be a question to the values."""
    if num_classes < 0:
        return torch.nn.functional.one_hot(tensor, num_classes)
    shape = (*tensor.shape, num_classes)
    result = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    result.scatter_(-1, tensor.unsqueeze(-1), 1)
    value = find_known(tensor)
    if value is not None and MAX_ELEMENTS < result.numel() <= find_most_elements(values=[value]):
        with _disable_current_modes():  # in bytes: only ones are counted, and looked for
            real = torch.zeros(shape, dtype=torch.uint8).scatter_(-1, value.real.unsqueeze(-1), 1)
            attach_value(result, real, Memory(held=True), assumed=value.assumed)
    return result


for _name, _run in (
    ("prod", _run_product),
    ("cumprod", _run_running_product),
    *((name, _run_extreme) for name in ("max", "min", "median", "nanmedian")),
):
    for _function in (getattr(torch, _name), getattr(Tensor, _name)):
        ANY.function(_function)(functools.partial(_run, _function))
