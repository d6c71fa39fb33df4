"""Tensors in lists, tuples, dicts and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fxmem.fakes.sparse import read_parts

PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a value, through lists, tuples, dicts and dataclasses."""
    found: list[torch.Tensor] = []
    _collect_tensors(value, found)
    return iter(found)


def iterate_stored(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in a value that have a storage: of sparse ones, indices and values."""
    for tensor in iterate_tensors(value):
        if tensor.is_sparse:
            yield from read_parts(tensor)
        else:
            yield tensor


def _collect_tensors(value: Any, found: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif type(value) in PLAIN:
        return
    elif isinstance(value, (tuple, list)):
        for element in value:
            _collect_tensors(element, found)
    else:
        for _, element in _list_elements(value):
            _collect_tensors(element, found)


def _list_elements(value: Any) -> Iterator[tuple[Any, Any]]:
    """Lists the elements of a container, each with its key, index or field."""
    if isinstance(value, (tuple, list)):
        yield from enumerate(value)
    elif isinstance(value, Mapping):
        yield from value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            # A declared field need not be set (init=False without a default).
            yield (getattr, field.name), getattr(value, field.name, None)


def iterate_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yields the tensors in a value, each with the keys and indices that lead to it."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif type(value) not in PLAIN:
        for key, element in _list_elements(value):
            yield from iterate_paths(element, (*path, key))
