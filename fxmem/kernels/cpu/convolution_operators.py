"""The convolution operators and their gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fxmem.kernels.arguments import new_bytes, tensor
from fxmem.kernels.cpu.convolution import (
    convolution_backward_peak_bytes,
    convolution_peak_bytes,
    transposed_3d_storage_bytes,
)
from fxmem.kernels.cpu.target import CPU
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten
_TRANSPOSED = 6


@CPU.kernel(_aten.convolution.default)
def _convolve(*args: object) -> Any:
    """A transposed 3d convolution may leave its output on a larger storage."""
    if not args[_TRANSPOSED] or tensor(args[0]).dim() != 5:
        return NotImplemented
    output = _aten.convolution.default(*args)
    nbytes = transposed_3d_storage_bytes(args, output)
    larger = output.new_empty((nbytes // output.element_size(),))
    return larger.as_strided(output.shape, output.stride())


@CPU.workspace(_aten.convolution.default)
def _convolution(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Convolution.cpp, ``_convolution``."""
    return max(0, convolution_peak_bytes(args, tensor(outputs)) - new_bytes(outputs))


@CPU.workspace(_aten.convolution_backward.default)
def _convolution_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Convolution.cpp, ``convolution_backward``."""
    return max(0, convolution_backward_peak_bytes(args) - new_bytes(outputs))
