"""Elementwise operators on the CPU: casts to the common type."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from fxmem.kernels.cpu.linear import has_instructions
from fxmem.kernels.registry import CPU, OperatorCall
from fxmem.kernels.workspace import copy_operands, size_bytes
from fxmem.versions.operators import aten

_WRAPPED = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
"""Types of the tensors that Python numbers become; a bool is an int, too."""


def _overloads(*names: str) -> tuple[OpOverload, ...]:
    kinds = ("Tensor", "Scalar", "Tensor_mode", "Scalar_mode", "default")
    packets = (getattr(aten, name + suffix) for name in names for suffix in ("", "_"))
    return tuple(
        getattr(packet, kind) for packet in packets for kind in kinds if kind in packet.overloads()
    )


def _promote(*operands: object) -> torch.dtype:
    """TypeProperties.cpp, ``result_type``: of tensors, tensors without dimensions, and numbers."""
    kind = ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH
    return elementwise_dtypes(*operands, type_promotion_kind=kind)[0]


def cast_bytes(operands: tuple[object, ...], common: torch.dtype) -> int:
    """Casts of operands of other types, and the tensors that stand for numbers."""
    total = 0
    for operand in operands:
        if isinstance(operand, Tensor):
            if operand.dtype != common:
                total += operand.numel() * common.itemsize
        elif isinstance(operand, (bool, int, float, complex)):
            wrapped = next(dtype for kind, dtype in _WRAPPED.items() if isinstance(operand, kind))
            total += wrapped.itemsize + (common.itemsize if wrapped != common else 0)
    return total


@CPU.workspace(
    *_overloads(
        "add", "sub", "mul", "rsub", "remainder", "floor_divide", "fmod", "maximum", "minimum",
        "eq", "ne", "lt", "le", "gt", "ge", "bitwise_and", "bitwise_or", "bitwise_xor",
    ),
    "pow.Scalar",
)  # fmt: skip
def _binary(call: OperatorCall) -> int:
    """aten/src/ATen/TensorIterator.cpp, ``TensorIteratorBase::build``.

    CPU kernels take operands of one type: others are cast as a whole, and so is what is written in
    place.
    """
    left, right = call.args[0], call.args[1]
    if isinstance(left, Tensor) and isinstance(right, Tensor) and left.dtype == right.dtype:
        return 0
    common = _promote(left, right)
    return cast_bytes((left, right), common) + _uncast_bytes(call, common)


def _uncast_bytes(call: OperatorCall, common: torch.dtype) -> int:
    """The result of an operator in place, before it is cast to the type that is there."""
    left, result = call.args[0], call.result
    is_in_place = isinstance(left, Tensor) and left.untyped_storage() is result.untyped_storage()
    return result.numel() * common.itemsize if is_in_place and result.dtype != common else 0


@CPU.workspace(*_overloads("div", "true_divide"))
def _divide(call: OperatorCall) -> int:
    """As ``_binary``; integers divide as floats unless they are rounded."""
    operands = (call.args[0], call.args[1])
    common = _promote(*operands)
    rounded = call.kwargs.get("rounding_mode") is not None
    if not rounded and not (common.is_floating_point or common.is_complex):
        common = torch.get_default_dtype()
    return cast_bytes(operands, common) + _uncast_bytes(call, common)


@CPU.workspace("gelu_backward")
def _gelu_backward(call: OperatorCall) -> int:
    """aten/src/ATen/native/Activation.cpp, ``gelu_backward_out_cpu``.

    The exact form goes to oneDNN for a contiguous input (``use_mkldnn``): with a contiguous
    gradient, and a result of its own where the output, laid out as the gradient, is not contiguous.
    """
    grad, x, out = call.tensor(0), call.tensor(1), call.result
    exact = call.kwargs.get("approximate", "none") == "none"
    reduced = x.dtype in (torch.bfloat16, torch.float16)
    known = x.dtype == torch.float32 or (reduced and has_instructions(x.dtype))
    if not (exact and known and x.is_contiguous() and torch.backends.mkldnn.enabled):
        return 0
    return sum(size_bytes(operand) for operand in (grad, out) if not operand.is_contiguous())


@CPU.workspace("abs", "angle")
def _real_of_complex(call: OperatorCall) -> int:
    """aten/src/ATen/native/UnaryOps.cpp, ``unary_op_impl_with_complex_to_float_out``.

    Complex numbers go through a complex result, whose real part is copied.
    """
    x = call.tensor(0)
    return size_bytes(x) if x.is_complex() else 0


# -- Activations whose CPU kernels lay results out otherwise than PyTorch's fake ones --


@CPU.kernel("log_sigmoid_forward")
def log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    """aten/src/ATen/native/Activation.cpp, ``log_sigmoid_forward_out_cpu``: contiguous results."""
    return x.new_empty(x.shape), x.new_empty(x.shape)


@CPU.kernel("log_sigmoid_backward")
def log_sigmoid_backward(grad: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    """Activation.cpp, ``log_sigmoid_backward_cpu``: laid out as the incoming gradient."""
    return torch.empty_like(grad)


CPU.workspace("log_sigmoid_forward")(copy_operands(0))
