"""In-place forms of operations, as the code of a planned model calls them.

A plan is applied to calls with the dtypes that it was made for. Hooks may come at any time, and
sizes decide which values are views: where the value is not free to be overwritten, or the result
would be larger than it, the plain form runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxmem.applying.guard import are_all_watched
from fxmem.tracing.modules import sees_arguments, sees_result


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
    broadcast: Any = torch.broadcast_shapes
    others = [other.shape for other in (*args, *kwargs.values()) if isinstance(other, Tensor)]
    fits = _may_overwrite(value, makers, takers) and broadcast(value.shape, *others) == value.shape
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
    given["inplace"] = _may_overwrite(value, makers, takers)
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
    if getattr(nn, kind.__name__, None) is not kind or not _may_overwrite(
        value, makers, (module, *takers)
    ):
        return module(value)
    if isinstance(module, nn.Sigmoid | nn.Tanh):
        return value.sigmoid_() if isinstance(module, nn.Sigmoid) else value.tanh_()
    settings = {key: held for key, held in vars(module).items() if not key.startswith("_")}
    changed: Any = SimpleNamespace(**{**settings, "inplace": True})
    return kind.forward(changed, value)


def _may_overwrite(value: Tensor, makers: Sequence[nn.Module], takers: Sequence[nn.Module]) -> bool:
    """Tells whether nobody else looks at a value, and autograd lets it be changed."""
    if torch.compiler.is_compiling():  # which decides that itself
        return False
    if torch.is_grad_enabled() and (value._is_view() or (value.is_leaf and value.requires_grad)):
        return False
    if (makers or takers) and are_all_watched():
        return False
    return not (any(map(sees_result, makers)) or any(map(sees_arguments, takers)))
