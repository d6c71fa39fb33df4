"""Activations whose CPU kernels lay results out otherwise than PyTorch's fake ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fxmem.kernels.arguments import tensor
from fxmem.kernels.cpu.target import CPU
from fxmem.kernels.tape import size_bytes
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten


@CPU.kernel(_aten.log_sigmoid_forward.default)
def log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    """aten/src/ATen/native/Activation.cpp, ``log_sigmoid_forward_out_cpu``: contiguous results."""
    return x.new_empty(x.shape), x.new_empty(x.shape)


@CPU.kernel(_aten.log_sigmoid_backward.default)
def log_sigmoid_backward(grad: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    """Activation.cpp, ``log_sigmoid_backward_cpu``: laid out as the incoming gradient."""
    return torch.empty_like(grad)


@CPU.workspace(_aten.log_sigmoid_forward.default)
def _log_sigmoid(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """Activation.cpp, ``log_sigmoid_forward_out_cpu``: a contiguous input."""
    x = tensor(args[0])
    return 0 if x.is_contiguous() else size_bytes(x)
