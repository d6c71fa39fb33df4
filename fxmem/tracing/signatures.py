"""Input signatures that a traced graph is specialised on: structure, dtypes and sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from fxmem.errors import UsageError
from fxmem.specs import TensorSpec, strip_torch
from fxmem.tracing.changes import freeze_plain
from fxmem.tracing.contexts import Autocast

SIGNATURE = "fxmem_signature"
"""Key of a placeholder's ``meta``: the :class:`Signature` of the argument."""
CONTEXT = "fxmem_context"
"""Key of the output's ``meta``: the :class:`TraceContext`."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)

Tie = tuple[int, int]
"""The position of a tensor among others, and that of the same one before it."""


class Signature(NamedTuple):
    """What a graph depends on of an argument, tensors' values aside.

    Attributes:
        structure: Types, plain values, and of each tensor its rank, dtype and ``requires_grad``.
        sizes: The size of each tensor.
    """

    structure: Hashable
    sizes: tuple[tuple[int, ...], ...]


class TraceContext(NamedTuple):
    """What a graph was traced in and with.

    Attributes:
        autocast: By device, the dtype of autocast.
        ties: Tensors among the arguments that were given twice: the graph may take either.
        training: Names of the modules that were in train mode.
        frozen: Names of the parameters that wanted no gradient.
        inputs: The call's ``(args, kwargs)`` with a :class:`TensorSpec` for each tensor; None where
            objects that only copying reproduces are among them.
    """

    autocast: Autocast
    ties: tuple[Tie, ...]
    training: frozenset[str]
    frozen: frozenset[str]
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None


def describe_value(value: Any) -> Signature:
    """Describes an argument; equal for those that differ in tensors' values only.

    >>> describe_value([torch.zeros(2, 3), 2])
    Signature(structure=(<class 'list'>, (2, torch.float32, False), (<class 'int'>, 2)), sizes=((2, 3),))
    """  # noqa: E501
    tensors: list[Tensor] = []
    structure = describe_structure(value, tensors)
    return Signature(structure, tuple(tuple(map(int, tensor.shape)) for tensor in tensors))


def describe_structure(value: Any, tensors: list[Tensor]) -> Hashable:
    """Describes an argument without the sizes of its tensors, and gathers those.

    Args:
        value: The argument; tensors are found in lists, tuples, mappings and dataclasses.
        tensors: Gets them, in order.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.dim(), value.dtype, value.requires_grad
    if isinstance(value, _PLAIN):
        return freeze_plain(value)
    if isinstance(value, (list, tuple)):
        return (type(value), *[describe_structure(element, tensors) for element in value])
    if isinstance(value, Mapping):
        keys = [describe_structure(key, tensors) for key in value]
        held = [describe_structure(element, tensors) for element in value.values()]
        return (type(value), *keys, *held)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        held = [describe_structure(getattr(value, name, None), tensors) for name in names]
        return (type(value), *held)
    if isinstance(value, slice):
        return (slice, *map(freeze_plain, (value.start, value.stop, value.step)))
    return type(value), value if isinstance(value, Hashable) else id(value)


def list_ties(tensors: Sequence[Tensor]) -> tuple[Tie, ...]:
    """Lists which of some tensors are the same object as one before.

    >>> one, other = torch.ones(1), torch.ones(1)
    >>> list_ties([one, other, one])
    ((2, 0),)
    """
    known: dict[int, int] = {}
    firsts = [known.setdefault(id(tensor), at) for at, tensor in enumerate(tensors)]
    return tuple((at, first) for at, first in enumerate(firsts) if at != first)


def make_specs(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Puts a :class:`TensorSpec` in the place of each tensor, one for all places of a tensor.

    Returns:
        ``(args, kwargs)``; None where an object that is no plain value is among them, or a tensor
            of a dtype that has no spec.
    """
    leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
    try:
        given: Any = tree_unflatten([*_iterate_specs(leaves)], structure)
    except UsageError:
        return None
    return given  # type: ignore[no-any-return]


def _iterate_specs(leaves: Sequence[Any]) -> Iterator[Any]:
    made: dict[int, TensorSpec] = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            shape = tuple(map(int, leaf.shape))
            spec = TensorSpec(shape, strip_torch(leaf.dtype), leaf.requires_grad)
            yield made.setdefault(id(leaf), spec)
        elif isinstance(leaf, _PLAIN):
            yield leaf
        else:
            raise UsageError(f"a {type(leaf).__name__} has no spec")
