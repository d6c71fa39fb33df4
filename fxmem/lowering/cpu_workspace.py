"""What CPU kernels allocate inside themselves, from their own source.

A dispatch mode sees an operator's inputs and outputs, and not the buffers that its C++ kernel
takes from the CPU allocator and returns before it ends. Each registered function states one
kernel's buffers from shapes alone, and names the file and function of PyTorch that it follows.
Sizes are those of the allocations that PyTorch's own profiler reports; buffers that other
threads of a parallel loop take for themselves are not among them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch._ops import OpOverload

from fxmem.lowering import (
    cpu_activation,
    cpu_attention,
    cpu_columns,
    cpu_copying,
    cpu_embedding,
    cpu_indexing,
    cpu_linalg,
    cpu_linear,
    cpu_losses,
    cpu_normalization,
    cpu_pointwise,
    cpu_reduction,
    cpu_resampling,
    cpu_sampling,
    cpu_sorting,
    cpu_spectral,
    cpu_transformer,
    cpu_trilinear,
    mkldnn_rnn,
)
from fxmem.lowering.cpu_convolution import (
    convolution_backward_peak_bytes,
    convolution_peak_bytes,
)
from fxmem.lowering.cpu_registry import (
    ESTIMATORS,
    Arguments,
    new_bytes,
    tensor,
    workspace,
)

__all__ = ["estimate_workspace_bytes"]

_aten = torch.ops.aten
# Imported for what they register.
_KERNELS = (
    cpu_activation,
    cpu_attention,
    cpu_columns,
    cpu_copying,
    cpu_embedding,
    cpu_indexing,
    cpu_linalg,
    cpu_linear,
    cpu_losses,
    cpu_normalization,
    cpu_pointwise,
    cpu_reduction,
    cpu_resampling,
    cpu_sampling,
    cpu_sorting,
    cpu_spectral,
    cpu_transformer,
    cpu_trilinear,
    mkldnn_rnn,
)


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
    estimator = ESTIMATORS.get(func)
    return 0 if estimator is None else estimator(args, kwargs, outputs)


@workspace(_aten.convolution.default)
def _convolution(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Convolution.cpp, ``_convolution``."""
    return max(0, convolution_peak_bytes(args, tensor(outputs)) - new_bytes(outputs))


@workspace(_aten.convolution_backward.default)
def _convolution_backward(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """aten/src/ATen/native/Convolution.cpp, ``convolution_backward``."""
    return max(0, convolution_backward_peak_bytes(args) - new_bytes(outputs))
