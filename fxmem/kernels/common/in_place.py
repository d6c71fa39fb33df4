"""Composite functions that add in place, and do not while Python watches.

Some C++ functions add a bias or a mask to a product that they have just made. They do it in place
unless ``at::isTensorSubclassLike`` answers yes, which it does for every fake tensor and while any
``TorchDispatchMode`` is active (ATen/TensorSubclassLikeUtils.h); the sum then takes new memory.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fxmem.fakes.fake_mode import LeanDispatchMode
from fxmem.kernels.registry import ANY, Function
from fxmem.versions.operators import aten

_add = aten.add.Tensor
_device = torch.ops.prim.device.default
_PRODUCTS = frozenset(
    {
        aten.mm.default,
        aten.mv.default,
        aten.bmm.default,
        aten._unsafe_view.default,
        aten.view.default,
        aten.squeeze.dim,
    }
)
"""Last operators of a matrix product: ``matmul`` folds its operands and unfolds the result."""


class _AddsInPlace(LeanDispatchMode):  # type: ignore[no-untyped-call]
    """Turns the addition to a product that the last operator returned into one in place."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._product: int | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _device:  # autograd asks between any two operators
            return func(*args)
        product, self._product = self._product, None
        if func is _add and not kwargs and _storage(args[0]) == product:
            aten.add_.Tensor(*args)
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            self._product = _storage(result)
        return result


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@ANY.function(torch.nn.functional.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """aten/src/ATen/native/Linear.cpp, ``linear``.

    Dense inputs go to ``addmm``, which takes a dense bias along; others are multiplied, and the
    bias is added to the product.
    """
    is_dense = bias is not None and bias.dim() == 1 and bias.is_contiguous()
    if bias is None or input.dim() == 2 or (is_dense and input.is_contiguous()):
        return torch.nn.functional.linear(input, weight, bias)
    result: Tensor = run_in_place(torch.nn.functional.linear, input, weight, bias)
    return result


def run_in_place(function: Function, *args: Any, **kwargs: Any) -> Any:
    """Calls a function that adds in place."""
    with _AddsInPlace():
        return function(*args, **kwargs)


for _function in (
    # aten/src/ATen/native/transformers/attention.cpp, ``_scaled_dot_product_attention_math``:
    # the mask is added to the scores.
    torch.nn.functional.scaled_dot_product_attention,
    # aten/src/ATen/native/RNN.cpp: ``at::linear`` of all time steps at once.
    torch.gru,
    torch.rnn_tanh,
    torch.rnn_relu,
):
    ANY.function(_function)(functools.partial(run_in_place, _function))
