"""Bitwise comparison of what steps compute: equal NaNs are equal, 0.0 and -0.0 are not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxmem.fakes.fake_mode import flatten_with_paths
from fxmem.specs import strip_torch
from fxmem.verifying.verification import Difference, Kind

Record = dict[tuple[Kind, str], Any]
"""Values that a step computed and left, by kind and name; tensors are copies."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def iterate_leaves(value: Any, path: str, above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Iterates over the leaves of a pytree, and of objects by their attributes, with their names.

    >>> [*iterate_leaves({"loss": 0.5, "states": [1, 2]}, "output")]
    [("output['loss']", 0.5), ("output['states'][0]", 1), ("output['states'][1]", 2)]
    """
    for own_path, leaf in flatten_with_paths(value):
        name = path + own_path
        if isinstance(leaf, Tensor) or callable(leaf) or not hasattr(leaf, "__dict__"):
            yield name, leaf
        elif id(leaf) not in above:
            for attribute, part in vars(leaf).items():
                yield from iterate_leaves(part, f"{name}.{attribute}", (*above, id(leaf)))


def compare_records(step: int, ours: Record, theirs: Record) -> tuple[Difference, ...]:
    """Compares the records of one step, counted from 1, of two models."""
    found = []
    for key in {**ours, **theirs}:
        fields: dict[str, Any] | None
        if key not in ours or key not in theirs:
            fields = {"cause": "missing with the plan" if key in ours else "with the plan only"}
        else:
            fields = compare_values(ours[key], theirs[key])
        if fields is not None:
            found.append(Difference(step, *key, **fields))
    return tuple(found)


def compare_values(ours: Any, theirs: Any) -> dict[str, Any] | None:
    """Compares two values bit for bit.

    Returns:
        The fields of a :class:`Difference` that describe how they differ; None where they do not.

    >>> compare_values(torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]))["index"]
    (1,)
    >>> compare_values(torch.tensor(math.nan), torch.tensor(math.nan))
    """
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return _compare_tensors(ours, theirs)
    if type(ours) is not type(theirs):
        names = ("None" if v is None else type(v).__name__ for v in (ours, theirs))
        return _describe("type", *names)
    if isinstance(ours, float | complex):
        is_same = repr(ours) == repr(theirs)
    elif callable(ours) or getattr(type(ours), "__eq__", None) is object.__eq__:
        is_same = True  # there is nothing to compare by
    else:
        same: Any = ours == theirs
        is_same = bool(same.all() if hasattr(same, "all") else same)
    return None if is_same else _describe("value", repr(ours), repr(theirs))


def _compare_tensors(ours: Tensor, theirs: Tensor) -> dict[str, Any] | None:
    for name in ("layout", "dtype", "shape", "device"):
        a, b = getattr(ours, name), getattr(theirs, name)
        if a != b:
            return _describe(name, a, b)
    for a, b in zip(list_dense_parts(ours), list_dense_parts(theirs), strict=True):
        if a.shape != b.shape:  # the indices of sparse tensors
            return _describe("shape", a.shape, b.shape)
        bits, other_bits = _view_bits(a), _view_bits(b)
        if not torch.equal(bits, other_bits):
            differs = (bits != other_bits).any(1)
            at = int(differs.nonzero()[0])
            index = tuple(map(int, torch.unravel_index(torch.tensor(at), a.shape)))
            a, b = a.reshape(-1), b.reshape(-1)
            wide = torch.float64 if a.is_floating_point() else torch.int64
            wide = torch.complex128 if a.is_complex() else wide
            distance = float((a.to(wide) - b.to(wide)).abs().max())
            return {
                **_describe("value", a[at], b[at]),
                "index": index,
                "elements": int(differs.sum()),
                "max_difference": distance if math.isfinite(distance) else None,
            }
    return None


def list_dense_parts(tensor: Tensor) -> list[Tensor]:
    """Lists the strided tensors of a tensor: a subclass's inner ones, indices and values.

    >>> len(list_dense_parts(torch.eye(2).to_sparse()))
    2
    """
    tensor = tensor.detach()
    if is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [part for t in inner if isinstance(t, Tensor) for part in list_dense_parts(t)]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor if tensor.layout is torch.strided else tensor.to_dense()]


def _view_bits(tensor: Tensor) -> Tensor:
    """The bits of a dense tensor as integers, a row for each element."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    bits = flat.view(_INTEGERS[min(tensor.itemsize, 8)])
    return bits.reshape(-1, max(tensor.itemsize // 8, 1))


def _describe(cause: str, *values: Any) -> dict[str, Any]:
    texts = []
    for value in values:
        if isinstance(value, torch.Size):
            text = "x".join(map(str, value)) or "scalar"
        elif isinstance(value, Tensor):
            number = value.item()
            is_short = isinstance(number, float) and value.itemsize <= 4
            text = f"{number:.9g}" if is_short else str(number)  # no two floats have one text
        else:
            text = strip_torch(value)
        texts.append(text)
    return {"cause": cause, "baseline": texts[0], "planned": texts[1]}
