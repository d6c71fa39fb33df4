"""Which modules hold the tensors that a segment changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from fxmem.errors import UsageError


def find_holders(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The modules that hold some tensors, each under every name it goes by.

    Args:
        model: The model.
        names: Of the tensors, as attributes of the model.

    Yields:
        The name of a module, empty for the model itself, and that of a tensor of it.

    Raises:
        UsageError: A name is no tensor's.

    >>> norm = nn.BatchNorm1d(2)
    >>> [*find_holders(nn.Sequential(norm, norm), ["0.running_mean"])]
    [('0', 'running_mean')]
    """
    held = [*names]
    if not held:
        return
    modules = dict(model.named_modules())
    for path in held:
        owner, _, name = path.rpartition(".")
        tensor = getattr(modules.get(owner), name, None)
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(
                f"the plan's tensor {path!r} is not in the model",
                hint="make the plan for this model",
            )
        yield owner, name
        for other, module in modules.items():
            for alias, buffer in module._buffers.items():
                if buffer is tensor and (other, alias) != (owner, name):
                    yield other, alias
