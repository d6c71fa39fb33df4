"""What an operator is called with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fxmem.errors import TraceError


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


def refuse_sparse(made: Iterable[torch.Tensor]) -> None:
    """Raises TraceError if an operator has made a sparse tensor, as sparse gradients are."""
    if any(tensor.layout is not torch.strided for tensor in made):
        raise TraceError(
            "sparse gradients and tensors are not supported",
            hint="use sparse=False, or dense tensors",
        )
