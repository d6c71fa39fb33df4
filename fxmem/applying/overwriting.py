"""What the code of a planned model calls to run in place, wherever that gives the same tensor.

A graph runs for other sizes, dtypes and settings than those that it was traced for. Where the
result would then not fit on the value, or somebody else looks at it, the plain form runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxmem.applying.walk import are_all_watched
from fxmem.tracing.hooks import sees_arguments, sees_result

_KEEP_INTEGERS = frozenset(
    """
    abs_ absolute_ add_ ceil_ clamp_ clamp_max_ clamp_min_ clip_ floor_ masked_fill_ mul_ multiply_
    neg_ negative_ relu_ remainder_ round_ sign_ square_ sub_ subtract_ tril_ triu_ trunc_ fix_
    """.split()
)
"""Methods whose result of integers is of integers."""

_WIDENED = frozenset(
    """
    acos_ asin_ cosh_ exp_ expm1_ log_ log10_ log1p_ log2_ pow_ reciprocal_ rsqrt_ sinh_ square_
    tan_
    """.split()
)
"""What autocast computes in float32, in ``aten/src/ATen/autocast_mode.h``; not in place."""


def overwrite_by_method(
    name: str,
    value: Tensor,
    *args: Any,
    makers: Sequence[nn.Module] = (),
    takers: Sequence[nn.Module] = (),
    **kwargs: Any,
) -> Any:
    """Calls a method that ends in ``_``, or the one without it.

    Args:
        name: Of the method.
        value: What it overwrites.
        args: What it takes besides.
        makers: The module that made the value, where one did: its hooks may keep it.
        takers: Other modules that take it, likewise.
        kwargs: What it takes besides.

    >>> x = torch.ones(2, 1)
    >>> overwrite_by_method("add_", x, 1.0) is x
    True
    >>> overwrite_by_method("add_", x, torch.ones(3)).shape
    torch.Size([2, 3])
    """
    fits = _may_overwrite(value, makers, takers) and _fits(name, value, (*args, *kwargs.values()))
    return getattr(value, name if fits else name[:-1])(*args, **kwargs)


def overwrite_by_function(
    name: str,
    *args: Any,
    makers: Sequence[nn.Module] = (),
    takers: Sequence[nn.Module] = (),
    **kwargs: Any,
) -> Any:
    """Calls one of ``torch.nn.functional`` with ``inplace=True``, or without.

    Args:
        name: Of the function.
        args: What it takes, first what it overwrites.
        makers: The module that made that, where one did: its hooks may keep it.
        takers: Other modules that take it, likewise.
        kwargs: What it takes besides.
    """
    function = getattr(F, name)
    if "train" in kwargs:  # as torch.dropout calls it
        kwargs["training"] = kwargs.pop("train")
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    value = given["input"]
    given["inplace"] = _may_overwrite(value, makers, takers) and _is_floating(value)
    return function(**given)


def overwrite_by_module(
    module: nn.Module,
    value: Tensor,
    *,
    makers: Sequence[nn.Module] = (),
    takers: Sequence[nn.Module] = (),
) -> Any:
    """Runs a module as if it were made with ``inplace=True``, which it stays without.

    Args:
        module: An activation or a dropout of ``torch.nn``; what is set on it counts.
        value: What it overwrites.
        makers: The module that made that, where one did: its hooks may keep it.
        takers: Other modules that take it, likewise.

    >>> x = torch.tensor([-1.0, 2.0])
    >>> overwrite_by_module(nn.ReLU(), x) is x, x
    (True, tensor([0., 2.]))
    """
    kind = type(module)
    if (
        getattr(nn, kind.__name__, None) is not kind
        or not _may_overwrite(value, makers, (module, *takers))
        or not _is_floating(value)
    ):
        return module(value)
    if isinstance(module, nn.Sigmoid | nn.Tanh):
        return value.sigmoid_() if isinstance(module, nn.Sigmoid) else value.tanh_()
    changed: Any = SimpleNamespace(**{**_list_settings(module), "inplace": True})
    return kind.forward(changed, value)


def _list_settings(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def _may_overwrite(value: Tensor, makers: Sequence[nn.Module], takers: Sequence[nn.Module]) -> bool:
    """Whether nobody else looks at a value, and autograd lets it be changed."""
    if torch.compiler.is_compiling():  # which decides that itself
        return False
    if torch.is_grad_enabled() and (value._is_view() or (value.is_leaf and value.requires_grad)):
        return False
    if (makers or takers) and are_all_watched():
        return False
    return not (any(map(sees_result, makers)) or any(map(sees_arguments, takers)))


def _fits(name: str, value: Tensor, others: Iterable[Any]) -> bool:
    """Whether a method's result has the shape and the dtype of the value."""
    is_number = value.dtype.is_floating_point or value.dtype.is_complex
    if not is_number and name not in _KEEP_INTEGERS:
        return False
    if value.dtype.is_complex and name in ("abs_", "absolute_"):
        return False
    if name in _WIDENED and value.dtype not in (torch.float32, torch.float64):
        device = value.device.type
        if device != "cpu" and torch.is_autocast_enabled(device):
            return False
    return all(_fits_beside(value, other) for other in others)


def _fits_beside(value: Tensor, other: Any) -> bool:
    if isinstance(other, Tensor):
        if other.dtype != value.dtype and torch.result_type(value, other) != value.dtype:
            return False
        pairs = zip(reversed(other.shape), reversed(value.shape), strict=False)
        return len(other.shape) <= len(value.shape) and all(a in (1, b) for a, b in pairs)
    if isinstance(other, bool | str) or other is None:
        return True
    if isinstance(other, float):
        return value.dtype.is_floating_point or value.dtype.is_complex
    return not isinstance(other, complex) or value.dtype.is_complex


def _is_floating(value: Tensor) -> bool:
    return value.dtype.is_floating_point
