"""The convolution operators and their gradient."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxmem.lowering.arguments import new_bytes, tensor
from fxmem.lowering.cpu.convolution import (
    convolution_backward_peak_bytes,
    convolution_peak_bytes,
)
from fxmem.lowering.cpu.target import CPU
from fxmem.lowering.target import Arguments

_aten = torch.ops.aten


@CPU.workspace(_aten.convolution.default)
def _convolution(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Convolution.cpp, ``_convolution``."""
    return max(0, convolution_peak_bytes(args, tensor(outputs)) - new_bytes(outputs))


@CPU.workspace(_aten.convolution_backward.default)
def _convolution_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Convolution.cpp, ``convolution_backward``."""
    return max(0, convolution_backward_peak_bytes(args) - new_bytes(outputs))
