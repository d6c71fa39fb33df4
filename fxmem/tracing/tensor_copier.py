"""One tensor after the other, copied to fake CPU tensors that share storages as they did."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxmem.errors import TraceError
from fxmem.specs import TensorSpec
from fxmem.tracing.devices import lies_on_accelerator, mark_on_accelerator
from fxmem.tracing.known_values import mark_held

_CPU = torch.device("cpu")
_ALIGNMENT = 16  # the largest itemsize: complex128
_CONSTANT_NUMEL = 1  # as FakeTensorMode: larger constants are not computed on
_PLAIN = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)


class TensorCopier:
    """Copies tensors to fakes; those on one storage to fakes on one storage.

    The storages that were seen are told apart by address: the tensors must outlive the copier.
    """

    def __init__(
        self, fake_mode: FakeTensorMode, spans: Mapping[int, tuple[int, int]] | None = None
    ) -> None:
        self.fake_mode = fake_mode
        self._spans = spans or {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def create(self, spec: TensorSpec, dtype: torch.dtype | None) -> Tensor:
        with no_dispatch():
            meta = torch.empty(
                spec.shape,
                dtype=getattr(torch, spec.dtype),
                device="meta",
                memory_format=getattr(torch, spec.memory_format or "contiguous_format"),
            )
        fake = self._wrap(_cast(meta, dtype), None)
        return fake.requires_grad_() if spec.requires_grad else fake

    def copy(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A fake of the tensor: a parameter if it is one, a leaf, without a gradient."""
        if is_traceable_wrapper_subclass(tensor):
            return self.fake_mode.from_tensor(tensor, static_shapes=True)
        if tensor.layout is not torch.strided:
            raise TraceError("sparse tensors are not supported", hint="use a dense one")
        if tensor.is_quantized:
            raise TraceError("a quantized tensor has no fake copy", hint="analyse the float model")
        meta = _cast(self._copy_to_meta(tensor), dtype)
        fake = self._wrap(meta, _find_constant(tensor) if meta.dtype == tensor.dtype else None)
        mark_held(fake)
        if lies_on_accelerator(tensor):
            mark_on_accelerator(fake)
        if type(tensor) not in _PLAIN:
            fake.__class__ = _make_fake_class(type(tensor))
        for flag in ("_is_param", "_is_buffer"):
            base = nn.Parameter if flag == "_is_param" else nn.Buffer
            if isinstance(tensor, base):
                setattr(fake, flag, True)
        return fake.requires_grad_() if tensor.requires_grad else fake

    def _wrap(self, meta: Tensor, constant: Tensor | None) -> Tensor:
        with no_dispatch():
            return FakeTensor(self.fake_mode, meta, _CPU, constant=constant)

    def _copy_to_meta(self, tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        low, high = self._spans.get(key) or (0, max(_find_span(tensor)[1], _count_bytes(tensor)))
        with no_dispatch():
            if key not in self._storages:
                self._storages[key] = torch.UntypedStorage(  # type: ignore[no-untyped-call]
                    high - low, device="meta"
                )
            offset = tensor.storage_offset() - low // tensor.itemsize
            meta = torch.empty(0, dtype=tensor.dtype, device="meta").set_(
                self._storages[key], offset, tensor.size(), tensor.stride()
            )
            meta = meta.conj() if tensor.is_conj() else meta
            return meta._neg_view() if tensor.is_neg() else meta


def _count_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


@functools.lru_cache(maxsize=256)
def _make_fake_class(kind: type[Tensor]) -> type[Tensor]:
    """A class of fake tensors that are instances of a user's subclass, with its methods."""
    if issubclass(kind, FakeTensor):
        return kind
    names: dict[str, Any] = {}
    if issubclass(kind, nn.Parameter):  # whose results are plain tensors, whatever it does
        names["__torch_function__"] = kind.__torch_function__
    return type(kind.__name__, (FakeTensor, kind), names)


def _cast(meta: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The meta tensor that ``.to(dtype)`` gives, for a floating or complex one."""
    if dtype is None or not (meta.is_floating_point() or meta.is_complex()):
        return meta
    with no_dispatch():
        return meta if meta.dtype == dtype else torch.empty_like(meta, dtype=dtype)


def _find_constant(tensor: Tensor) -> Tensor | None:
    """Its value, if it is small enough to matter only to control flow."""
    if tensor.numel() != _CONSTANT_NUMEL or tensor.requires_grad:
        return None
    if isinstance(tensor, FakeTensor):
        tensor = tensor.constant  # type: ignore[assignment]
    if tensor is None or tensor.device != _CPU:
        return None
    with no_dispatch():  # in-place operators write to it
        return tensor.detach().clone()


def _find_span(tensor: Tensor) -> tuple[int, int]:
    """First and last byte, exclusive, of its storage that a strided tensor covers."""
    if tensor.numel() == 0:
        return (0, 0)
    first = tensor.storage_offset()
    sizes_strides = zip(tensor.size(), tensor.stride(), strict=True)
    last = first + sum((size - 1) * stride for size, stride in sizes_strides)
    return int(first * tensor.itemsize), int((last + 1) * tensor.itemsize)


def find_spans(leaves: Iterable[object]) -> dict[int, tuple[int, int]]:
    """For each storage the part that all tensors among the leaves cover together.

    An input is often a slice of a data set, which does not come to the device with it.
    """
    spans: dict[int, tuple[int, int]] = {}
    for leaf in leaves:
        is_plain = isinstance(leaf, Tensor) and not is_traceable_wrapper_subclass(leaf)
        if is_plain and leaf.layout == torch.strided:  # type: ignore[attr-defined]
            low, high = _find_span(leaf)  # type: ignore[arg-type]
            low -= low % _ALIGNMENT
            key = leaf.untyped_storage()._cdata  # type: ignore[attr-defined]
            known = spans.get(key, (low, high))
            spans[key] = (min(low, known[0]), max(high, known[1]))
    return spans
