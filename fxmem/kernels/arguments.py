"""An operator's arguments and results, as its kernel's estimator reads them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fxmem.kernels.target import Arguments


def tensor(value: object) -> Tensor:
    """The argument as the tensor that the operator's schema says it is."""
    assert isinstance(value, Tensor)
    return value


def new_bytes(outputs: object) -> int:
    """Bytes of the storages of new outputs."""
    if isinstance(outputs, Tensor):
        return outputs.untyped_storage().nbytes()
    if isinstance(outputs, (tuple, list)):
        return sum(new_bytes(output) for output in outputs)
    return 0


def argument(args: Arguments, kwargs: Mapping[str, object], index: int, name: str) -> object:
    """An argument given by position or by name; None if it was left out."""
    return args[index] if index < len(args) else kwargs.get(name)
