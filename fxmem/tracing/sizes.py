"""Integers that remember which tensor's shape they came from.

The traced code gets a :class:`SizeInt` wherever it asks a tensor for its size. It is an ``int``
in every respect - branches, ``range``, C++ argument parsers and ``isinstance`` take it - but
its arithmetic is remembered, so that a size in the arguments of a later call becomes nodes of
the graph instead of a constant, and the graph serves any batch size.

torch.fx reaches the same with proxies, which are no ints and no tensors; what asks for either
then fails. See ``docs/decisions``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of the tensor that a traced value stands for."""

    origin: Any  # the tracer's handle of the tensor, which must not live longer than in the code
    dim: int


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """An integer operation, from :mod:`operator`, on sizes and plain integers."""

    function: Callable[..., Any]
    arguments: tuple[int, ...]


class SizeInt(int):
    """An int with the expression that computes it.

    >>> a = SizeInt(6, Dim("x", 0))
    >>> b = 2 * a
    >>> b, b.expression.function.__name__, isinstance(b, int)
    (12, 'mul', True)
    """

    expression: Dim | Arithmetic

    def __new__(cls, value: int, expression: Dim | Arithmetic) -> SizeInt:
        size = super().__new__(cls, value)
        size.expression = expression
        return size

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        # A copy or a pickle outlives the trace that the expression points into.
        return int, (int(self),)

    def __neg__(self) -> SizeInt:
        return SizeInt(-int(self), Arithmetic(operator.neg, (self,)))


def _make_binary(function: Callable[[Any, Any], Any], *, reflected: bool) -> Callable[..., Any]:
    def compute(self: SizeInt, other: Any) -> Any:
        if not isinstance(other, int) or isinstance(other, bool):
            plain = (other, int(self)) if reflected else (int(self), other)
            return function(*plain) if isinstance(other, (float, bool)) else NotImplemented
        arguments = (other, self) if reflected else (self, other)
        value = function(*map(int, arguments))
        return SizeInt(value, Arithmetic(function, arguments))

    return compute


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    _function = getattr(operator, _name)
    setattr(SizeInt, f"__{_name}__", _make_binary(_function, reflected=False))
    setattr(SizeInt, f"__r{_name}__", _make_binary(_function, reflected=True))


def make_shape(shape: Iterable[int], origin: Any) -> torch.Size:
    """Makes a ``torch.Size`` whose elements remember that they are dimensions of ``origin``."""
    return torch.Size([SizeInt(size, Dim(origin, dim)) for dim, size in enumerate(shape)])
