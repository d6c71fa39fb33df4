"""ATen's operators by name, with stand-ins for operators that the installed release lacks."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

MISSING: set[str] = set()
"""Names of operators that were looked for, and that the installed release lacks."""


class MissingOperator:
    """An operator that the installed release lacks: never called there, never equal to one.

    Args:
        name: As ``torch.ops`` spells it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, overload: str) -> MissingOperator:
        if overload.startswith("__"):
            raise AttributeError(overload)
        return MissingOperator(f"{self._name}.{overload}")

    def overloads(self) -> list[str]:
        """As of an operator that is there."""
        return []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"torch {torch.__version__} has no operator {self._name}")

    def __repr__(self) -> str:
        return self._name


class _Namespace:
    """``torch.ops.aten``, with :class:`MissingOperator` in the place of what is not there."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch.ops.aten, name, None)
        if found is None:
            return MissingOperator(f"aten.{name}")
        setattr(self, name, found)
        return found


aten = _Namespace()
"""ATen's operators, as ``torch.ops.aten`` has them."""


def find_operators(*names: str | OpOverload | MissingOperator) -> list[OpOverload]:
    """Returns ATen's operators by name, without operators that the installed release lacks.

    >>> [str(operator) for operator in find_operators("add.Tensor", "relu", "no_such_operator")]
    ['aten.add.Tensor', 'aten.relu.default']
    """
    found = []
    for operator in names:
        if isinstance(operator, str):
            packet, _, overload = operator.partition(".")
            value = getattr(getattr(aten, packet), overload or "default", None)
        else:
            value = operator
        if isinstance(value, OpOverload):
            found.append(value)
        else:
            MISSING.add(str(operator).removeprefix("aten.").removesuffix(".default"))
    return found
