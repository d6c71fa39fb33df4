"""Operators of optimizers on lists of DTensors, run on their local tensors.

``torch.distributed.tensor`` finds the placements of each tensor of such a list anew in every
operator, which takes most of the time of an analysis of a large model. Where the tensors at each
place of the lists are laid out alike, as a parameter, its gradient and its state are, nothing has
to be redistributed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

_REDUCTIONS = ("norm", "max", "powsum")


def run_on_locals(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operator on the local tensors of lists of DTensors.

    Returns:
        Its result, on DTensors; NotImplemented where DTensor is to run it.
    """
    name = func.name()
    if not name.startswith("aten::_foreach_") or any(word in name for word in _REDUCTIONS):
        return NotImplemented
    specs: list[Any] = [getattr(tensor, "_spec", None) for tensor in args[0]]
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list | tuple)]
    for values in lists:
        for spec, value in zip(specs, values, strict=False):
            if isinstance(value, DTensor) and not _is_alike(spec, value._spec):
                return NotImplemented
    local_args = [_take_local(value) for value in args]
    result = func(*local_args, **{name: _take_local(value) for name, value in kwargs.items()})
    if result is None or name.endswith("_"):
        return result if result is None else args[0]
    wrap: Any = DTensor
    return [
        local if spec is None else wrap(local, spec, requires_grad=False)
        for local, spec in zip(result, specs, strict=True)
    ]


def _is_alike(spec: Any, other: Any) -> bool:
    if spec is None or (spec.mesh, spec.placements) != (other.mesh, other.placements):
        return False
    return bool(spec.shape == other.shape) and not any(
        isinstance(placement, Partial) for placement in spec.placements
    )


def _take_local(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_take_local(element) for element in value]
    return value._local_tensor if isinstance(value, DTensor) else value
