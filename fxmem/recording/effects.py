"""What an operator does besides computing its result: what it writes, and what it draws on."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from fxmem.graph import Effect

_MASKS = (torch.bool, torch.uint8)
_index = torch.ops.aten.index.Tensor
_DATA_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def find_written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments that its schema says it changes.

    >>> x = torch.zeros(1)
    >>> [y is x for y in find_written(torch.ops.aten.add_.Tensor, (x, 1), {})]
    [True]
    """
    written: list[torch.Tensor] = []
    for position, name in _list_written(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        values = value if isinstance(value, (list, tuple)) else (value,)
        written += [tensor for tensor in values if isinstance(tensor, torch.Tensor)]
    return written


def find_effect(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Effect | None:
    """What keeps an operator from being run again as it was.

    Source: the tags in ``aten/src/ATen/native/tags.yaml``; of ``index``, the size depends on data
    where it is given masks only.

    >>> find_effect(torch.ops.aten.bernoulli.default, (), {})
    <Effect.RANDOM: 'random'>
    >>> x, mask = torch.ones(2), torch.tensor([True, False])
    >>> find_effect(torch.ops.aten.index.Tensor, (x, [mask]), {})
    <Effect.DATA: 'data'>
    >>> find_effect(torch.ops.aten.index.Tensor, (x, [torch.tensor([1, 0])]), {}) is None
    True
    """
    if kwargs.get("generator") is not None:
        return Effect.GENERATOR
    if func is _index and not any(index is not None and index.dtype in _MASKS for index in args[1]):
        return None
    return _read_tags(func)


@functools.lru_cache(maxsize=4096)
def _list_written(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.lru_cache(maxsize=4096)
def _read_tags(func: Any) -> Effect | None:
    tags = set(func.tags)
    if torch.Tag.nondeterministic_seeded in tags:
        return Effect.RANDOM
    return Effect.DATA if tags & _DATA_TAGS else None
