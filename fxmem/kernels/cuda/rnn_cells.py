"""Cells of recurrent networks on CUDA: two products, and one kernel for the rest.

Source: ``aten/src/ATen/native/RNN.cpp`` (``LSTMCell``, ``GRUCell``) and
``aten/src/ATen/native/cuda/RNN.cu``. Autograd keeps the operands of the kernel besides what it
returns for backward: it may be asked for gradients of gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fxmem.kernels.arguments import tensor
from fxmem.kernels.cuda.autocast import follow_autocast
from fxmem.kernels.cuda.reduction import Layout, add, reduce_bytes
from fxmem.kernels.cuda.target import CUDA, is_on_gpu
from fxmem.kernels.target import Arguments

_aten = torch.ops.aten
_GRU_GATES = 3
_GRU_KEPT = 5
"""``GRU_WORKSPACE_MULTIPLIER``."""


@CUDA.function(torch.lstm_cell)
@follow_autocast(_aten.lstm_cell.default)
def lstm_cell(
    input: Tensor,
    hx: tuple[Tensor, ...] | list[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """RNN.cpp, ``LSTMCell``."""
    if not is_on_gpu(input):
        return torch.lstm_cell(input, hx, w_ih, w_hh, b_ih, b_hh)
    input_gates, hidden_gates = torch.matmul(input, w_ih.t()), torch.matmul(hx[0], w_hh.t())
    fused = _aten._thnn_fused_lstm_cell.default
    hy, cy, _ = fused(input_gates, hidden_gates, hx[1], b_ih, b_hh)
    return hy, cy


@CUDA.function(torch.gru_cell)
@follow_autocast(_aten.gru_cell.default)
def gru_cell(
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    """RNN.cpp, ``GRUCell``."""
    if not is_on_gpu(input):
        return torch.gru_cell(input, hx, w_ih, w_hh, b_ih, b_hh)
    input_gates, hidden_gates = torch.matmul(input, w_ih.t()), torch.matmul(hx, w_hh.t())
    fused = _aten._thnn_fused_gru_cell.default
    result: Tensor = fused(input_gates, hidden_gates, hx, b_ih, b_hh)[0]
    return result


@CUDA.kernel(_aten._thnn_fused_lstm_cell.default)
def _lstm_outputs(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, *_biases: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """cuda/RNN.cu, ``_thnn_fused_lstm_cell_cuda``; PyTorch's fake kernel wants biases."""
    return cx.new_empty(cx.shape), cx.new_empty(cx.shape), input_gates.new_empty(input_gates.shape)


@CUDA.kernel(_aten._thnn_fused_gru_cell.default)
def _gru_outputs(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, *_biases: Tensor | None
) -> tuple[Tensor, Tensor]:
    """cuda/RNN.cu, ``_thnn_fused_gru_cell_cuda``."""
    batch, width = hx.shape
    return hx.new_empty(batch, width), hx.new_empty(batch, _GRU_KEPT * width)


@CUDA.kernel(_aten._thnn_fused_gru_cell_backward.default)
def _gru_gradients(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """cuda/RNN.cu, ``_thnn_fused_gru_cell_backward_cuda``: gates, state and biases."""
    batch, width = grad_hy.shape
    gates = [workspace.new_empty(batch, _GRU_GATES * width) for _ in range(2)]
    biases = [x.new_empty(x.shape[1]) if has_bias else None for x in gates]
    return (*gates, grad_hy.new_empty(batch, width), *biases)


@CUDA.workspace(
    _aten._thnn_fused_lstm_cell_backward_impl.default, _aten._thnn_fused_gru_cell_backward.default
)
def _bias_bytes(args: Arguments, kwargs: Mapping[str, object], outputs: object) -> int:
    """The sums of the gates' gradients, which are the last to be made."""
    assert isinstance(outputs, (list, tuple))
    if not args[-1]:
        return 0
    gates = tensor(outputs[0])
    return reduce_bytes(Layout.of(gates), [0], False, gates.dtype, add)
