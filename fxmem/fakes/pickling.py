"""Pickles of fake tensors, with shapes in the place of values."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from fxmem.fakes.values import attach_value, find_value

MakeStorage: TypeAlias = Callable[[int, torch.dtype, bool], Tensor]
"""Makes a fake tensor of so many floating numbers of a type, on the host or on the GPU."""
_HOST = torch.device("cpu")
_makers: list[MakeStorage] = []
_OF_FAKES = {"fake_device", "fake_mode", "constant", "pytype", "dispatch_keys", "real_tensor"}
"""Attributes of fake tensors that are their own, beside those with an underscore."""


@contextlib.contextmanager
def restore_by(make_storage: MakeStorage) -> Iterator[None]:
    """Has pickles restore the storages of fake tensors so, within."""
    _makers.append(make_storage)
    try:
        yield
    finally:
        _makers.pop()


def dump_fakes(value: object) -> bytes:
    """Pickles a value, whose fake tensors share storages as they do; ``pickle`` restores it.

    Raises:
        Exception: Whatever pickling raises for an object that cannot be pickled.
    """
    file = io.BytesIO()
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        _Pickler(file).dump(value)
    return file.getvalue()


def reduce_fake(fake: Tensor, storages: dict[int, Any] | None = None) -> Any:
    """Reduces a fake tensor to its shape, and to its value where that is known."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        storage, real = fake.untyped_storage(), find_value(fake)
        dtype = fake.dtype if fake.is_floating_point() else torch.float8_e4m3fn
        made = _Storage(storage.nbytes() // dtype.itemsize, dtype, fake.device == _HOST)
        kept = made if storages is None else storages.setdefault(storage._cdata, made)
        layout = (fake.dtype, tuple(fake.shape), fake.stride(), fake.storage_offset())
        flags = (fake.requires_grad, isinstance(fake, nn.Parameter))
        value = None if real is None else _Real(real)
        return _restore, (kept, layout, flags, value, _list_attributes(fake))


class _Storage:
    """What is kept of a storage; of two tensors that share one, a pickle has it once."""

    def __init__(self, length: int, dtype: torch.dtype, is_on_host: bool) -> None:
        self._parts = length, dtype, is_on_host

    def __reduce__(self) -> Any:
        return _restore_storage, self._parts


class _Real:
    """A real tensor, of which a pickle has the values, and attributes of others than fxmem."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> Any:
        return _reduce_real(self._tensor)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._storages: dict[int, Any] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            return reduce_fake(value, self._storages)
        return _reduce_real(value) if type(value) in (Tensor, nn.Parameter) else NotImplemented


def _restore_storage(length: int, dtype: torch.dtype, is_on_host: bool) -> Tensor:
    return _makers[-1](length, dtype, is_on_host)


def _list_attributes(tensor: Tensor) -> dict[str, Any]:
    """Lists the attributes that the code gave to a tensor."""
    names = (name for name in vars(tensor) if not name.startswith("_"))
    return {name: vars(tensor)[name] for name in names if name not in _OF_FAKES}


def _restore(
    storage: Tensor,
    layout: Any,
    flags: tuple[bool, bool],
    real: Tensor | None,
    attributes: dict[str, Any],
) -> Tensor:
    (dtype, *where), (requires_grad, is_parameter) = layout, flags
    with torch.no_grad():
        made = storage.view(dtype).as_strided(*where)
    if real is not None:
        attach_value(made, real)
    made = nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)
    vars(made).update(attributes)
    return made


def _reduce_real(tensor: Tensor) -> Any:
    file = io.BytesIO()
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        torch.serialization.save(tensor.detach(), file)
    flags = tensor.requires_grad and tensor.is_leaf, isinstance(tensor, nn.Parameter)
    return _restore_real, (file.getvalue(), *flags, _list_attributes(tensor))


def _restore_real(
    data: bytes, requires_grad: bool, is_parameter: bool, attributes: dict[str, Any]
) -> Tensor:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        made: Tensor = torch.serialization.load(io.BytesIO(data), weights_only=True)
        made = nn.Parameter(made, requires_grad) if is_parameter else made
        vars(made).update(attributes)
        return made.requires_grad_(requires_grad)
