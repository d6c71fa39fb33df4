"""Elementwise operators on the CPU: casts to the common type, and losses built from others."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxmem.lowering.cpu_reduction import two_pass_bytes
from fxmem.lowering.cpu_registry import Arguments, argument, new_bytes, tensor, workspace
from fxmem.lowering.cpu_tape import Tape, size_bytes

_aten = torch.ops.aten

# ``Reduction::Mean`` (aten/src/ATen/core/Reduction.h).
_MEAN = 1


def _overloads(*names: str) -> tuple[OpOverload, ...]:
    """Overloads of operators of two arguments, of those that exist."""
    kinds = ("Tensor", "Scalar", "Tensor_mode", "Scalar_mode", "default")
    packets = (getattr(_aten, name + suffix, None) for name in names for suffix in ("", "_"))
    return tuple(
        getattr(packet, kind)
        for packet in packets
        if packet is not None
        for kind in kinds
        if kind in packet.overloads()
    )


def _wrapped(number: object) -> torch.dtype:
    """Type of the tensor that stands for a Python number."""
    if isinstance(number, bool):
        return torch.bool
    if isinstance(number, int):
        return torch.int64
    return torch.complex128 if isinstance(number, complex) else torch.float64


def _category(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 0
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


def _common(operands: tuple[object, ...]) -> torch.dtype:
    """c10's type promotion (TypeProperties.cpp, ``result_type``): tensors, 0-dim, numbers."""
    result: torch.dtype | None = None
    tensors = [x for x in operands if isinstance(x, Tensor)]
    groups = (
        [x.dtype for x in tensors if x.dim()],
        [x.dtype for x in tensors if not x.dim()],
        [_default(_wrapped(x)) for x in operands if not isinstance(x, Tensor)],
    )
    for group in groups:
        for index, dtype in enumerate(group):
            within = dtype if not index else torch.promote_types(group[0], dtype)
            if result is None:
                result = within
            elif group is groups[0] or _category(within) > _category(result):
                result = torch.promote_types(result, within)
    assert result is not None
    return result


def _default(dtype: torch.dtype) -> torch.dtype:
    return torch.get_default_dtype() if dtype == torch.float64 else dtype


def _cast_bytes(operands: tuple[object, ...], common: torch.dtype) -> int:
    """Casts of operands of other types, and the tensors that stand for numbers."""
    total = 0
    for operand in operands:
        if isinstance(operand, Tensor):
            if operand.dtype != common:
                total += operand.numel() * common.itemsize
        elif isinstance(operand, (bool, int, float, complex)):
            wrapped = _wrapped(operand)
            total += wrapped.itemsize + (common.itemsize if wrapped != common else 0)
    return total


@workspace(
    *_overloads(
        "add", "sub", "mul", "rsub", "remainder", "floor_divide", "fmod", "maximum", "minimum",
        "eq", "ne", "lt", "le", "gt", "ge", "bitwise_and", "bitwise_or", "bitwise_xor",
    ),
    _aten.pow.Scalar,
)  # fmt: skip
def _binary(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/TensorIterator.cpp, ``TensorIteratorBase::build``.

    CPU kernels take operands of one type: others are cast as a whole.
    """
    left, right = args[0], args[1]
    if isinstance(left, Tensor) and isinstance(right, Tensor) and left.dtype == right.dtype:
        return 0
    return _cast_bytes((left, right), _common((left, right)))


@workspace(*_overloads("div", "true_divide"))
def _divide(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """As ``_binary``; integers divide as floats unless they are rounded."""
    operands = (args[0], args[1])
    common = _common(operands)
    rounded = kwargs.get("rounding_mode") is not None
    if not rounded and not (common.is_floating_point or common.is_complex):
        common = torch.get_default_dtype()
    return _cast_bytes(operands, common)


@workspace(
    _aten._foreach_add_.Scalar, _aten._foreach_sub_.Scalar, _aten._foreach_mul_.Scalar,
    _aten._foreach_div_.Scalar, _aten._foreach_add_.ScalarList, _aten._foreach_sub_.ScalarList,
    _aten._foreach_mul_.ScalarList, _aten._foreach_div_.ScalarList,
)  # fmt: skip
def _foreach(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/ForeachOpsKernels.cpp: one tensor after the other on the CPU."""
    tensors, numbers = args[0], args[1]
    assert isinstance(tensors, (list, tuple))
    scalars = numbers if isinstance(numbers, (list, tuple)) else [numbers] * len(tensors)
    pairs = [(tensor(x), number) for x, number in zip(tensors, scalars, strict=True)]
    return max((_cast_bytes((x, number), x.dtype) for x, number in pairs), default=0)


@workspace(_aten.where.ScalarSelf, _aten.where.ScalarOther, _aten.where.Scalar)
def _where(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/TensorCompare.cpp, ``where``: scalars as tensors of the result."""
    numbers = sum(not isinstance(value, Tensor) for value in args[1:3])
    return numbers * tensor(outputs).element_size()


@workspace(_aten.gelu_backward.default)
def _gelu_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Activation.cpp, ``gelu_backward_out_cpu``.

    The exact form goes to oneDNN for a contiguous input: with a contiguous gradient, and a
    result of its own where the output, laid out as the gradient, is not contiguous.
    """
    grad, x, out = tensor(args[0]), tensor(args[1]), tensor(outputs)
    exact = kwargs.get("approximate", "none") == "none"
    if not (exact and x.is_contiguous() and torch.backends.mkldnn.enabled):
        return 0
    return sum(size_bytes(operand) for operand in (grad, out) if not operand.is_contiguous())


@workspace(_aten.native_dropout.default)
def _dropout(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Dropout.cpp, ``native_dropout_cpu``: the mask in the input's type."""
    x = tensor(args[0])
    return max(size_bytes(x), _cast_bytes((1.0,), x.dtype)) if args[2] is True else 0


@workspace(_aten.native_dropout_backward.default)
def _dropout_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Dropout.cpp, ``native_dropout_backward``: grad * mask, then times the scale."""
    grad = tensor(args[0])
    return size_bytes(grad) + _cast_bytes((1.0,), grad.dtype)


def _pointwise_loss_bytes(args: Arguments, kwargs: Mapping[str, object], count: int) -> int:
    """Peak of an elementwise loss that is then reduced, beyond its scalar."""
    x, target = tensor(args[0]), tensor(args[1])
    elements_bytes = _elements_bytes(x, target)
    scalar = _cast_bytes((1,), x.dtype) if _reduction(args, kwargs) == _MEAN else 0
    partial = two_pass_bytes(elements_bytes // x.element_size(), 1, x.element_size())
    return count * elements_bytes + max(scalar, partial)


def _elements_bytes(x: Tensor, target: Tensor) -> int:
    """Bytes of the losses of all elements, shapes broadcast."""
    total, shapes = x.element_size(), (tuple(x.shape), tuple(target.shape))
    for sizes in zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1):
        total *= max(sizes) if 0 not in sizes else 0
    return total


def _reduction(args: Arguments, kwargs: Mapping[str, object]) -> int:
    found = argument(args, kwargs, 2, "reduction")
    return found if isinstance(found, int) else _MEAN


@workspace(_aten.mse_loss.default, _aten.smooth_l1_loss.default)
def _structured_loss(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Loss.cpp, ``mse_loss_out``: two tensors of the elements' losses.

    The iterator allocates its output at full size; the scalar is then written into it.
    """
    if _reduction(args, kwargs) == 0:
        return 0
    return _pointwise_loss_bytes(args, kwargs, 2) - new_bytes(outputs)


@workspace(_aten.huber_loss.default)
def _huber(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Loss.cpp, ``huber_loss``: the elements' losses, then ``apply_loss_reduction``."""
    if _reduction(args, kwargs) == 0:
        return 0
    return _pointwise_loss_bytes(args, kwargs, 1)


@workspace(_aten.binary_cross_entropy_with_logits.default)
def _bce_with_logits(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Loss.cpp, ``binary_cross_entropy_with_logits``: the loss beside one of its terms."""
    found = argument(args, kwargs, 4, "reduction")
    if found == 0:
        return _elements_bytes(tensor(args[0]), tensor(args[1]))
    return _pointwise_loss_bytes((*args[:2], found), kwargs, 2)


@workspace(_aten.binary_cross_entropy.default)
def _bce(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Loss.cpp, ``binary_cross_entropy_out_cpu``: the mean is made beside and copied in."""
    x = tensor(args[0])
    found = argument(args, kwargs, 3, "reduction")
    if found == 0:
        return 0
    mean = found is None or found == _MEAN
    tape = Tape()
    tape.allocate(_elements_bytes(x, tensor(args[1])))
    tape.allocate(
        _cast_bytes((1,), x.dtype) if mean else two_pass_bytes(x.numel(), 1, x.element_size())
    )
    return tape.peak_bytes + x.element_size() - new_bytes(outputs)
