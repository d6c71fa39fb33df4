"""Pooling on CUDA: operands in the format that the input suggests, or in planes.

Source: ``aten/src/ATen/native/cuda/DilatedMaxPool2d.cu``, ``DilatedMaxPool3d.cu``,
``AveragePool2d.cu``, ``AveragePool3d.cu``, ``AdaptiveAveragePooling.cu``,
``AdaptiveAveragePooling3d.cu``, ``AdaptiveMaxPooling2d.cu``, ``AdaptiveMaxPooling3d.cu`` and
``MaxUnpooling.cu``.
"""

from __future__ import annotations

import torch
from torch._prims_common import suggest_memory_format

from fxmem.kernels.cuda.gpu import CUDA
from fxmem.kernels.registry import OperatorCall
from fxmem.kernels.workspace import RESULT, copy_operands, dense_bytes

# ``max_pool2d_with_indices_out_cuda`` and the like; in backward gradient, input and indices.
CUDA.workspace("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d")(
    copy_operands(0, like=0)
)
CUDA.workspace("max_pool2d_with_indices_backward")(copy_operands(0, 1, -1, like=1))
CUDA.workspace("max_pool3d_with_indices_backward")(copy_operands(0, -1, like=1))
CUDA.workspace("avg_pool2d_backward")(copy_operands(0, 1, like=1))
# ``avg_pool3d_out_cuda``, ``avg_pool3d_backward_out_cuda`` and the like: in planes.
CUDA.workspace(
    "avg_pool3d", "_adaptive_avg_pool3d", "adaptive_max_pool3d",
    "avg_pool3d_backward", "_adaptive_avg_pool3d_backward", "adaptive_max_pool3d_backward",
)(copy_operands(0))  # fmt: skip
# ``adaptive_max_pool2d_out_cuda``: results that are not in planes are made by a copy.
CUDA.workspace("adaptive_max_pool2d")(copy_operands(0, RESULT))
CUDA.workspace("adaptive_max_pool2d_backward")(copy_operands(0, 2, RESULT))
# ``max_unpooling2d_forward_out_cuda``
CUDA.workspace("max_unpool2d", "max_unpool3d")(copy_operands(0, 1))


@CUDA.workspace("_adaptive_avg_pool2d")
def _adaptive_average(call: OperatorCall) -> int:
    """``adaptive_avg_pool2d_out_cuda_template``: channels last are read with their strides."""
    x = call.tensor(0)
    return (
        dense_bytes(x)
        if suggest_memory_format(x) == torch.contiguous_format and x.dim() == 4
        else 0
    )


@CUDA.workspace("_adaptive_avg_pool2d_backward")
def _adaptive_average_backward(call: OperatorCall) -> int:
    """``adaptive_avg_pool2d_backward_out_cuda_template``."""
    grad, x = call.tensor(0), call.tensor(1)
    return dense_bytes(grad) if suggest_memory_format(x) == torch.contiguous_format else 0
