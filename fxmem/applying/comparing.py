"""Values of two runs compared bit by bit: equal NaNs are equal, 0.0 and -0.0 are not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxmem.applying.verification import Difference, Kind
from fxmem.specs import strip_torch

Record = dict[tuple[Kind, str], Any]
"""What a step left, by kind and name; tensors are copies."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DIGITS = 9
"""Digits that tell any two numbers of 32 bits apart."""


def iterate_leaves(value: Any, path: str, above: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """What a value is made of, with the way to each part.

    Lists, tuples, mappings, dataclasses and other objects with attributes are entered.

    Args:
        value: For instance a model's output.
        path: What to call it.
        above: The ids of what it lies in, which is not entered again.

    >>> [*iterate_leaves({"loss": 0.5, "states": [1, 2]}, "output")]
    [("output['loss']", 0.5), ("output['states'][0]", 1), ("output['states'][1]", 2)]
    """
    parts: Iterator[tuple[str, Any]]
    if isinstance(value, (Tensor, *_PLAIN)) or callable(value):
        yield path, value
        return
    if id(value) in above:
        return
    if isinstance(value, Mapping):
        parts = ((f"{path}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = ((f"{path}.{n}", p) for n, p in zip(value._fields, value, strict=True))
    elif isinstance(value, list | tuple):
        parts = ((f"{path}[{index}]", part) for index, part in enumerate(value))
    elif dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        parts = ((f"{path}.{name}", getattr(value, name, None)) for name in names)
    elif hasattr(value, "__dict__"):
        parts = ((f"{path}.{name}", part) for name, part in vars(value).items())
    else:
        yield path, value
        return
    for name, part in parts:
        yield from iterate_leaves(part, name, (*above, id(value)))


def compare_records(step: int, ours: Record, theirs: Record) -> tuple[Difference, ...]:
    """What differs between the records of the same step of two models, in their order.

    Args:
        step: Its number, from 1.
        ours: Of the first model.
        theirs: Of the second.
    """
    found = []
    for key in {**ours, **theirs}:
        kind, name = key
        if key not in ours or key not in theirs:
            cause = "missing with the plan" if key in ours else "with the plan only"
            found.append(Difference(step, kind, name, cause))
            continue
        fields = compare_values(ours[key], theirs[key])
        if fields is not None:
            found.append(Difference(step, kind, name, **fields))
    return tuple(found)


def compare_values(ours: Any, theirs: Any) -> dict[str, Any] | None:
    """The fields of a :class:`Difference` that say how two values differ; None where equal.

    >>> compare_values(torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]))["index"]
    (1,)
    >>> compare_values(torch.tensor(math.nan), torch.tensor(math.nan))
    """
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return _compare_tensors(ours, theirs)
    if type(ours) is not type(theirs):
        return {"cause": "type", "baseline": _name_type(ours), "planned": _name_type(theirs)}
    if _are_same(ours, theirs):
        return None
    return {"cause": "value", "baseline": repr(ours), "planned": repr(theirs)}


def are_equal(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two tensors are of one kind and have the same bits.

    >>> are_equal(torch.tensor([math.nan]), torch.tensor([math.nan]))
    True
    """
    return _find_unlike(ours, theirs) is None and _find_part(ours, theirs) is None


def _name_type(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _are_same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float | complex):
        return repr(ours) == repr(theirs)
    plain: Any = object.__eq__
    if type(ours).__eq__ is plain or callable(ours):
        return True  # two objects that say nothing of themselves but their type
    same = ours == theirs
    return bool(same.all() if hasattr(same, "all") else same)


def _compare_tensors(ours: Tensor, theirs: Tensor) -> dict[str, Any] | None:
    name = _find_unlike(ours, theirs)
    if name is not None:
        words = (_write(getattr(tensor, name)) for tensor in (ours, theirs))
        return {"cause": name, **dict(zip(("baseline", "planned"), words, strict=True))}
    found = _find_part(ours, theirs)
    if found is None:
        return None
    part, a, b = found
    if a.dtype != b.dtype or a.shape != b.shape:
        return {"cause": f"shape{part}", "baseline": _write(a.shape), "planned": _write(b.shape)}
    return _describe_elements(part, a, b)


def _find_unlike(ours: Tensor, theirs: Tensor) -> str | None:
    """In what two tensors differ before any of their values is looked at."""
    names = ("layout", "dtype", "shape", "device")
    return next((name for name in names if getattr(ours, name) != getattr(theirs, name)), None)


def _find_part(ours: Tensor, theirs: Tensor) -> tuple[str, Tensor, Tensor] | None:
    """The first of the dense tensors that two are made of where they differ."""
    for (part, a), (_, b) in zip(_take_apart(ours), _take_apart(theirs), strict=False):
        same = a.dtype == b.dtype and a.shape == b.shape
        if not same or not torch.equal(_view_bits(a), _view_bits(b)):
            return part, a, b
    return None


def _write(value: Any) -> str:
    if isinstance(value, torch.Size):
        return "x".join(map(str, value)) or "scalar"
    return strip_torch(value)


def _take_apart(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The dense tensors that a tensor is made of, and what each is called."""
    tensor = tensor.detach()
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):
                yield from ((f" of {name}{rest}", part) for rest, part in _take_apart(inner))
    elif tensor.layout is torch.sparse_coo:
        yield " of indices", tensor._indices()
        yield " of values", tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield " of crow_indices", tensor.crow_indices()
        yield " of col_indices", tensor.col_indices()
        yield " of values", tensor.values()
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield " of ccol_indices", tensor.ccol_indices()
        yield " of row_indices", tensor.row_indices()
        yield " of values", tensor.values()
    elif tensor.layout is not torch.strided:
        yield "", tensor.to_dense()
    elif tensor.is_quantized:
        yield "", tensor.int_repr()
    else:
        yield "", tensor


def _view_bits(tensor: Tensor) -> Tensor:
    """The bits of a dense tensor as integers, a row for each element."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    kind = _INTEGERS[min(tensor.itemsize, 8)]
    return flat.view(kind).reshape(-1, max(tensor.itemsize // 8, 1))


def _describe_elements(part: str, ours: Tensor, theirs: Tensor) -> dict[str, Any]:
    differs = (_view_bits(ours) != _view_bits(theirs)).any(1)
    flat = int(differs.nonzero()[0])
    a, b = (t.detach().contiguous().reshape(-1) for t in (ours, theirs))
    return {
        "cause": f"value{part}",
        "index": _unravel(flat, ours.shape),
        "baseline": _write_element(a[flat]),
        "planned": _write_element(b[flat]),
        "elements": int(differs.sum()),
        "max_difference": _find_distance(a, b),
    }


def _unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return tuple(reversed(index))


def _write_element(element: Tensor) -> str:
    value = element.item()
    if isinstance(value, float) and element.itemsize <= 4:
        return f"{value:.{_DIGITS}g}"
    return str(value)


def _find_distance(ours: Tensor, theirs: Tensor) -> float | None:
    wide = torch.complex128 if ours.is_complex() else torch.float64
    wide = wide if ours.is_floating_point() or ours.is_complex() else torch.int64
    distance = float((ours.to(wide) - theirs.to(wide)).abs().max())
    return distance if math.isfinite(distance) else None
