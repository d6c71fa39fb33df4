"""What CPU kernels allocate inside themselves, from their own source.

A dispatch mode sees an operator's inputs and outputs, and not the buffers that its C++ kernel
takes from the CPU allocator and returns before it ends. Each function here states one kernel's
buffers from shapes alone, and names the file and function of PyTorch that it follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxmem.lowering.cpu_convolution import (
    convolution_backward_peak_bytes,
    convolution_peak_bytes,
)

Arguments = tuple[object, ...]
Estimator = Callable[[Arguments, Mapping[str, object], object], int]

_ESTIMATORS: dict[OpOverload, Estimator] = {}
_aten = torch.ops.aten


def estimate_workspace_bytes(
    func: OpOverload, args: Arguments, kwargs: Mapping[str, object], outputs: object
) -> int:
    """Bytes that a CPU kernel needs at its peak beyond what it returns.

    Args:
        func: The operator that reached the dispatcher.
        args: Its positional arguments; of tensors only the metadata is read.
        kwargs: Its keyword arguments.
        outputs: What it returned.

    Returns:
        Bytes above (live before) + (bytes of new outputs); 0 where the kernel has no buffers.
    """
    estimator = _ESTIMATORS.get(func)
    return 0 if estimator is None else estimator(args, kwargs, outputs)


def workspace(*operators: OpOverload) -> Callable[[Estimator], Estimator]:
    """Register the function that states the buffers of these operators' kernels."""

    def register(estimator: Estimator) -> Estimator:
        for operator in operators:
            _ESTIMATORS[operator] = estimator
        return estimator

    return register


def _new_bytes(outputs: object) -> int:
    """Bytes of the storages of new outputs."""
    if isinstance(outputs, Tensor):
        return outputs.untyped_storage().nbytes()
    if isinstance(outputs, (tuple, list)):
        return sum(_new_bytes(output) for output in outputs)
    return 0


@workspace(_aten.convolution.default)
def _convolution(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Convolution.cpp, ``_convolution``."""
    assert isinstance(outputs, Tensor)
    return max(0, convolution_peak_bytes(args, outputs) - _new_bytes(outputs))


@workspace(_aten.convolution_backward.default)
def _convolution_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Convolution.cpp, ``convolution_backward``."""
    return max(0, convolution_backward_peak_bytes(args) - _new_bytes(outputs))
