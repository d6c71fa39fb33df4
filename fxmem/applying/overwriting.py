"""In-place forms of operations, as the code of a planned model calls them.

A plan of inference is applied to calls with the dtypes that it was made for, and its guard sees to
hooks that came later. Where the result would be larger than the value, or with gradients, the plain
form runs.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def overwrite_by_method(name: str, value: Tensor, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a method of a tensor that ends in ``_``, or the one without it.

    >>> x = torch.ones(2, 1)
    >>> with torch.no_grad():
    ...     overwrite_by_method("add_", x, 1.0) is x
    ...     overwrite_by_method("add_", x, torch.ones(3)).shape
    True
    torch.Size([2, 3])
    """
    broadcast: Any = torch.broadcast_shapes
    others = [other.shape for other in (*args, *kwargs.values()) if isinstance(other, Tensor)]
    fits = _may_overwrite() and broadcast(value.shape, *others) == value.shape
    return getattr(value, name if fits else name[:-1])(*args, **kwargs)


def overwrite_by_function(name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Calls a function of ``torch.nn.functional`` with ``inplace=True``, or without."""
    function = getattr(F, name)
    if "train" in kwargs:  # as torch.dropout calls it
        kwargs["training"] = kwargs.pop("train")
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    given["inplace"] = _may_overwrite()
    return function(**given)


def overwrite_by_module(module: nn.Module, value: Tensor) -> Any:
    """Runs an activation or a dropout as if it were made with ``inplace=True``.

    >>> x = torch.tensor([-1.0, 2.0])
    >>> with torch.no_grad():
    ...     overwrite_by_module(nn.ReLU(), x) is x, x
    (True, tensor([0., 2.]))
    """
    kind = type(module)
    if getattr(nn, kind.__name__, None) is not kind or not _may_overwrite():
        return module(value)
    if isinstance(module, nn.Sigmoid | nn.Tanh):
        return value.sigmoid_() if isinstance(module, nn.Sigmoid) else value.tanh_()
    settings = {key: held for key, held in vars(module).items() if not key.startswith("_")}
    changed: Any = SimpleNamespace(**{**settings, "inplace": True})
    return kind.forward(changed, value)


def _may_overwrite() -> bool:
    return not (torch.is_grad_enabled() or torch.compiler.is_compiling())  # which decides itself
