"""Results of operators on fake tensors that were seen before.

A model repeats itself: the second step runs the operators of the first, and each block those of
the one before. What a fake kernel returns depends on the metadata of its arguments alone, and
``FakeTensorMode`` keeps results by it; but its key holds all that any tensor could have, and making
it takes longer than all else. Here only plain operators are kept - strided fakes without a known
value in; new tensors, one view, or the first argument out - and the key is what those have: shape,
strides, dtype, device and, for a view, where it begins.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

_Key = tuple[Any, ...]


class _Kind(Enum):
    """What an operator returns."""

    NEW = "new tensors"
    VIEW = "a view of its first argument"
    SELF = "its first argument, overwritten"


@dataclass(frozen=True, slots=True)
class _Layout:
    """The metadata of a tensor in a result."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


_Kept = tuple[_Layout | None, ...] | _Layout


class OperatorCache:
    """Runs operators, each combination of plain arguments once."""

    def __init__(self) -> None:
        # None for a result that is not what its operator's kind promises.
        self._results: dict[_Key, _Kept | None] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operator's result."""
        kind = _find_kind(func)
        if kind is None or not isinstance(args[0], FakeTensor):
            return func(*args, **kwargs)
        key = _make_key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        if key not in self._results:
            before = _describe_tensor(args[0])
            result = func(*args, **kwargs)
            self._results[key] = _describe(kind, result, args, before)
            return result
        kept = self._results[key]
        if kept is None:
            return func(*args, **kwargs)
        return args[0] if kind is _Kind.SELF else _rebuild(kept, args[0], kind)


@functools.cache
def _find_kind(func: Any) -> _Kind | None:
    """What the schema says that an operator returns; None for what is not plain."""
    schema = func._schema
    if func.namespace != "aten" or not schema.arguments:
        return None
    if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags):
        return None
    aliased = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None]
    returned = [value.alias_info is not None for value in schema.returns]
    if func is torch.ops.aten._unsafe_view.default:  # shares memory, and does not say so
        return _Kind.VIEW
    if not aliased and not any(returned):
        return _Kind.NEW
    if aliased != [0] or returned != [True]:
        return None
    return _Kind.SELF if schema.arguments[0].alias_info.is_write else _Kind.VIEW


def _make_key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Key | None:
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
            parts += (
                argument.shape,
                argument.stride(),
                argument.storage_offset(),
                argument.dtype,
                argument.fake_device,
            )
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
    first = args[0]
    if kind is _Kind.SELF:  # some change its shape: resize_, transpose_, set_
        return before if result is first and _describe_tensor(first) == before else None
    if kind is _Kind.VIEW:
        same = isinstance(result, FakeTensor) and _address(result) == _address(first)
        return _describe_tensor(result) if same else None
    taken = {_address(tensor) for tensor in args if isinstance(tensor, FakeTensor)}
    if isinstance(result, FakeTensor):
        return _describe_new(result, taken)
    if type(result) is not tuple:
        return None
    described: list[_Layout | None] = []
    for tensor in result:
        layout = _describe_new(tensor, taken) if isinstance(tensor, FakeTensor) else None
        if tensor is not None and layout is None:
            return None
        described.append(layout)
    return tuple(described)


def _describe_new(tensor: FakeTensor, taken: set[int]) -> _Layout | None:
    """The layout of a tensor with memory of its own; None if it shares or allocates otherwise."""
    if _address(tensor) in taken or not _allocates_as_told(tensor):
        return None
    taken.add(_address(tensor))
    return _describe_tensor(tensor)


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


def _allocates_as_told(tensor: torch.Tensor) -> bool:
    """Whether ``empty_strided`` with its shape and stride allocates what it has."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    nbytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == nbytes


def _rebuild(kept: _Kept, like: FakeTensor, kind: _Kind) -> Any:
    with in_kernel_invocation_manager(like.fake_mode):
        if kind is _Kind.VIEW:
            assert isinstance(kept, _Layout)
            view = torch.empty(0, dtype=kept.dtype, device="meta")
            view.set_(like.untyped_storage(), kept.offset, kept.shape, kept.stride)
            return FakeTensor(like.fake_mode, view, kept.device)
        if isinstance(kept, _Layout):
            return _make_new(kept, like)
        return tuple(None if layout is None else _make_new(layout, like) for layout in kept)


def _make_new(layout: _Layout, like: FakeTensor) -> FakeTensor:
    empty = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
    return FakeTensor(like.fake_mode, empty, layout.device)
