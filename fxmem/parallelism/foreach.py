"""Operators of optimizers on lists of DTensors, run on their local tensors.

``torch.distributed.tensor`` finds the placements of each tensor of such a list anew in every
operator, which takes most of the time of an analysis of a large model. Where the tensors at each
place of the lists are laid out alike, as a parameter, its gradient and its state are, nothing has
to be redistributed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_REDUCTIONS = ("norm", "max", "powsum")


def run_on_locals(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operator on the local tensors of lists of DTensors.

    Returns:
        Its result, on DTensors; NotImplemented where DTensor is to run it.
    """
    name = func.name()
    if not name.startswith("aten::_foreach_") or any(word in name for word in _REDUCTIONS):
        return NotImplemented
    from torch.distributed.tensor import DTensor  # which takes a second to import

    specs = [_find_spec(tensor) for tensor in args[0]]
    if all(spec is None for spec in specs):  # other wrappers, as torchao's weights of float8
        return NotImplemented
    for values in (*args, *kwargs.values()):
        for spec, value in zip(specs, values if isinstance(values, list) else (), strict=False):
            found = _find_spec(value)
            if found is not None and not _is_alike(spec, found):
                return NotImplemented
    local_args = [_take_local(value) for value in args]
    result = func(*local_args, **{name: _take_local(value) for name, value in kwargs.items()})
    if result is None:
        return None
    wrap: Any = DTensor
    return [
        local if spec is None else wrap(local, spec, requires_grad=False)
        for local, spec in zip(result, specs, strict=True)
    ]


def _find_spec(value: Any) -> Any:
    """Finds mesh, placements and global shape of a DTensor; None for anything else."""
    return getattr(value, "_spec", None)


def _is_alike(spec: Any, other: Any) -> bool:
    if spec is None or any(placement.is_partial() for placement in spec.placements):
        return False
    return bool(
        (spec.mesh, spec.placements, spec.shape) == (other.mesh, other.placements, other.shape)
    )


def _take_local(value: Any) -> Any:
    if isinstance(value, list):
        return [_take_local(element) for element in value]
    return value if _find_spec(value) is None else value._local_tensor
