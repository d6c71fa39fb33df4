"""Results of operators on fake tensors that were seen before.

A model repeats itself: the second step runs the operators of the first, and each block those of
the one before. What a fake kernel returns depends on the metadata of its arguments alone, and
``FakeTensorMode`` keeps results by it; but its key holds all that any tensor could have, and making
it takes longer than all else. Here only plain operators are kept - strided fakes without a known
value in; new tensors, views, or the first argument out - and the key is what those have: shape,
strides, dtype, device and, for a view, where it begins.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fxmem.versions.operators import aten

Key = tuple[Any, ...]


class _Kind(Enum):
    NEW = "new tensors"
    VIEW = "a view of the first argument, or several"
    SELF = "the first argument, overwritten"


@dataclass(frozen=True, slots=True)
class _Layout:
    """The metadata of a tensor in a result; of a view, how far it begins after its base."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


_Kept = tuple[_Layout | None, ...] | list[_Layout | None] | _Layout

_SECRET_VIEWS = frozenset(
    {
        aten._unsafe_view.default,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
        aten.unsafe_chunk.default,
    }
)
"""Operators whose results share memory with the first argument, and whose schemas do not say so."""
_INDEXING = frozenset({aten.select.int, aten.slice.Tensor, aten.as_strided.default})
"""Views that a loop takes at another place each time: quicker made than found."""
_EMPTY = frozenset({aten.empty.memory_format, aten.empty_strided.default})
_HOST = torch.device("cpu")
_MISSING: Any = object()


class OperatorCache:
    """Runs operators, each combination of plain arguments once."""

    def __init__(self) -> None:
        # None for a result that is not what its operator's kind promises.
        self._results: dict[Key, _Kept | None] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator, or looks its result up."""
        if func in _EMPTY:
            return self._make_empty(func, args, kwargs)
        kind = _find_kind(func)
        if kind is None:
            return func(*args, **kwargs)
        first = args[0][0] if args[0].__class__ is list and args[0] else args[0]
        key = make_key(func, args, kwargs) if isinstance(first, FakeTensor) else None
        if key is None:
            return func(*args, **kwargs)
        if func in _INDEXING:
            guard = torch._C._DisableTorchDispatch()
            try:
                return self._wrap(func(first, *args[1:]), first.fake_mode, first.fake_device)
            finally:
                del guard
        kept = self._results.get(key, _MISSING)
        if kept is _MISSING:
            before = _describe_tensor(first)
            result = func(*args, **kwargs)
            self._results[key] = _describe(kind, result, args, before)
            return result
        if kept is None:
            return func(*args, **kwargs)
        return args[0] if kind is _Kind.SELF else self._rebuild(kept, first, kind)

    def _make_empty(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FakeTensor:
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        guard = torch._C._DisableTorchDispatch()
        try:
            meta = func(*args, **{**kwargs, "device": "meta", "pin_memory": None})
            return self._wrap(meta, mode, kwargs.get("device") or _HOST)
        finally:
            del guard

    def _rebuild(self, kept: _Kept, like: FakeTensor, kind: _Kind) -> Any:
        def make(layout: _Layout) -> FakeTensor:
            if kind is _Kind.VIEW:
                meta = torch.empty(0, dtype=layout.dtype, device="meta")
                offset = like.storage_offset() + layout.offset
                meta.set_(like.untyped_storage(), offset, layout.shape, layout.stride)
            else:
                meta = torch.empty_strided(
                    layout.shape, layout.stride, dtype=layout.dtype, device="meta"
                )
            return self._wrap(meta, like.fake_mode, layout.device)

        guard = torch._C._DisableTorchDispatch()
        try:
            if isinstance(kept, _Layout):
                return make(kept)
            made = (None if layout is None else make(layout) for layout in kept)
            return kept.__class__(made)  # type: ignore[arg-type]
        finally:
            del guard

    def _wrap(
        self, meta: torch.Tensor, fake_mode: FakeTensorMode, device: torch.device
    ) -> FakeTensor:
        """Makes what ``FakeTensor(fake_mode, meta, device)`` makes, in a third of the time."""
        attributes = self._attributes.get(device)
        if attributes is None:
            fake = FakeTensor(fake_mode, meta, device)
            self._attributes[device] = dict(vars(fake))
            return fake
        fake = torch.Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        if fake_mode._allow_unsafe_data_ptr_access:
            torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
        else:
            torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(attributes)
        return fake


@functools.cache
def _find_kind(func: Any) -> _Kind | None:
    """Reads from the schema what an operator returns; None for what is not plain."""
    schema = func._schema
    if func.namespace not in ("aten", "_c10d_functional") or not schema.arguments:
        return None
    if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags):
        return None
    if "as_strided" in schema.name and func not in _INDEXING:  # counts from where memory begins
        return None
    if func in _SECRET_VIEWS:
        return _Kind.VIEW
    aliased = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None]
    returned = [value.alias_info is not None for value in schema.returns]
    if not aliased and not any(returned):
        return _Kind.NEW
    if aliased != [0] or returned != [True]:
        return None
    return _Kind.SELF if schema.arguments[0].alias_info.is_write else _Kind.VIEW


def make_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
    """Makes a key of all that decides an operator's result; None where it is not plain."""
    parts: list[Any] = [func]
    if not _add_parts(parts, args):
        return None
    if kwargs:
        parts.extend(kwargs)
        if not _add_parts(parts, kwargs.values()):
            return None
    return tuple(parts)


def _add_parts(parts: list[Any], arguments: Any) -> bool:
    """Appends what the arguments contribute to a key; False if they are not plain."""
    for argument in arguments:
        if isinstance(argument, FakeTensor):
            if argument.constant is not None or argument.layout is not torch.strided:
                return False
            if argument.dtype.is_complex:  # conjugate and negative bits
                return False
            parts += (argument.shape, argument.stride(), argument.dtype, argument.fake_device)
        elif isinstance(argument, (list, tuple)):
            parts.append(len(argument))
            if not _add_parts(parts, argument):
                return False
        elif isinstance(argument, torch.Tensor):
            return False
        else:  # the type too: 1, 1.0 and True are equal
            parts += (argument.__class__, argument)
    return True


def _describe(
    kind: _Kind, result: Any, args: tuple[Any, ...], before: _Layout | None
) -> _Kept | None:
    """Describes a result so that it can be made again; None where it cannot be."""
    if kind is _Kind.SELF:  # some change its shape: resize_, transpose_, set_
        return before if result is args[0] and _describe_tensor(args[0]) == before else None
    given = (t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)))
    taken = {_address(tensor) for tensor in given if isinstance(tensor, FakeTensor)}
    if isinstance(result, FakeTensor):
        return _describe_result(kind, result, args[0], taken)
    if type(result) not in (tuple, list):
        return None
    described: list[_Layout | None] = []
    for tensor in result:
        is_fake = isinstance(tensor, FakeTensor)
        layout = _describe_result(kind, tensor, args[0], taken) if is_fake else None
        if tensor is not None and layout is None:
            return None
        described.append(layout)
    return described if type(result) is list else tuple(described)


def _describe_result(
    kind: _Kind, tensor: FakeTensor, first: Any, taken: set[int]
) -> _Layout | None:
    layout = _describe_tensor(tensor)
    if layout is None:
        return None
    if kind is _Kind.VIEW:
        offset = layout.offset - int(first.storage_offset())
        return replace(layout, offset=offset) if _address(tensor) == _address(first) else None
    # A new tensor must have memory of its own, as much as ``empty_strided`` allocates.
    sizes_strides = zip(layout.shape, layout.stride, strict=True)
    last = sum((size - 1) * stride for size, stride in sizes_strides)
    nbytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
    if _address(tensor) in taken or layout.offset or tensor.untyped_storage().nbytes() != nbytes:
        return None
    taken.add(_address(tensor))
    return layout


def _describe_tensor(tensor: torch.Tensor) -> _Layout | None:
    if tensor.layout is not torch.strided or tensor.dtype.is_complex:
        return None
    if isinstance(tensor, FakeTensor) and tensor.constant is not None:
        return None
    offset = int(tensor.storage_offset())
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    return _Layout(tuple(tensor.shape), tensor.stride(), offset, tensor.dtype, device)


def _address(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
