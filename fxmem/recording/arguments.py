"""What an operator is called with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fxmem.tracing.fxgraph import iterate_tensors
from fxmem.tracing.sparse_parts import find_parts, is_sparse


def list_tensors(arguments: Iterable[Any], found: list[torch.Tensor] | None = None) -> Any:
    """The tensors in an operator's arguments or results, which nest no deeper than lists.

    >>> len(list_tensors((torch.ones(1), [torch.ones(2), None], 3, {"alpha": 1})))
    2
    """
    found = [] if found is None else found
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            list_tensors(argument, found)
        elif isinstance(argument, dict):
            list_tensors(argument.values(), found)
    return found


def iterate_memory(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value that have a storage: of a sparse one, its indices and values."""
    for tensor in iterate_tensors(value):
        if is_sparse(tensor):
            parts = find_parts(tensor)
            yield parts.indices
            yield parts.values
        else:
            yield tensor
