"""Pickles of fake tensors, with shapes in the place of values."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from fxmem.fakes.values import attach_value, find_value

MakeStorage: TypeAlias = Callable[[int, torch.dtype, bool], Tensor]
_HOST = torch.device("cpu")


class _Storage(NamedTuple):
    """What is kept of a storage, which several tensors may share."""

    key: int
    length: int
    dtype: torch.dtype
    is_on_host: bool


def dump_fakes(value: object) -> bytes:
    """Pickles a value; its fake tensors need no more than their shapes.

    Raises:
        Exception: Whatever pickling raises for an object that cannot be pickled.
    """
    file = io.BytesIO()
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        _Pickler(file).dump(value)
    return file.getvalue()


def load_fakes(data: bytes, make_storage: MakeStorage) -> Any:
    """Restores a value with new fake tensors.

    Args:
        data: As :func:`dump_fakes` made it.
        make_storage: Makes a fake tensor of so many floating numbers of a type, on the host or not.
    """
    return _Unpickler(io.BytesIO(data), make_storage).load()


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return tuple(value) if type(value) is _Storage else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            storage = value.untyped_storage()
            dtype = value.dtype if value.is_floating_point() else torch.float8_e4m3fn
            count = storage.nbytes() // dtype.itemsize
            kept = _Storage(storage._cdata, count, dtype, value.fake_device == _HOST)
            layout = (tuple(value.shape), value.stride(), value.storage_offset())
            is_parameter = isinstance(value, nn.Parameter)
            real = find_value(value)
            return _restore, (kept, value.dtype, layout, value.requires_grad, is_parameter, real)
        if type(value) in (Tensor, nn.Parameter):
            file = io.BytesIO()
            torch.serialization.save(value, file)
            return _restore_real, (file.getvalue(),)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, make_storage: MakeStorage) -> None:
        super().__init__(file)
        self._make_storage = make_storage
        self._storages: dict[int, Tensor] = {}

    def persistent_load(self, kept: Any) -> Tensor:
        storage = _Storage(*kept)
        if storage.key not in self._storages:
            self._storages[storage.key] = self._make_storage(*storage[1:])
        return self._storages[storage.key]


def _restore(
    storage: Tensor,
    dtype: torch.dtype,
    layout: Any,
    requires_grad: bool,
    is_parameter: bool,
    real: Tensor | None,
) -> Tensor:
    with torch.no_grad():
        made = storage.view(dtype).as_strided(*layout)
    if real is not None:
        attach_value(made, real)
    return nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)


def _restore_real(data: bytes) -> Tensor:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        loaded: Tensor = torch.serialization.load(io.BytesIO(data), weights_only=True)
        return loaded
