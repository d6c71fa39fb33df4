"""Recurrent networks on CUDA: one cuDNN operator for all layers, directions and time steps.

Source: ``aten/src/ATen/native/RNN.cpp`` (``lstm``, ``ONE_HIDDEN_RNN``) and
``aten/src/ATen/native/cudnn/RNN.cpp``. Reserve and workspace are known to cuDNN alone;
:func:`estimate_reserve_bytes` and :func:`estimate_workspace_bytes` say where they are from.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from fxmem.kernels.autocast.policies import follow_autocast
from fxmem.kernels.common.in_place import run_in_place
from fxmem.kernels.common.recurrent import RecurrentCall, read_call
from fxmem.kernels.cuda.gpu import CUDA, current_gpu, is_on_gpu
from fxmem.kernels.cuda.reduction.reductions import Layout, add, reduce_bytes
from fxmem.kernels.registry import Function, OperatorCall
from fxmem.versions.operators import aten

_forward = aten._cudnn_rnn.default
_backward = aten._cudnn_rnn_backward.default
_flatten = aten._cudnn_rnn_flatten_weight.default

MODES: Mapping[Function, int] = {
    torch.rnn_relu: 0,
    torch.rnn_tanh: 1,
    torch.lstm: 2,
    torch.gru: 3,
}
"""``cudnnRNNMode_t``."""
_LSTM = 2
for _operator in (_forward, _backward):
    CUDA.unmodelled[_operator] = "cuDNN chooses its workspace at run time"
_KEPT_PER_LAYER = (1, 1, 5, 6)
"""States of every time step that cuDNN keeps for each layer and direction, by mode."""
_STATES_PER_LAYER = (2, 2, 8, 5)
"""States of one time step in the workspace, for each layer and direction, by mode."""
_WORKSPACE_BYTES = 16 * 2**20 + 768
"""The part of cuDNN's workspace that does not depend on the call."""
_STATE_BYTES = 24
"""State of the generator that each thread of the GPU has for dropout."""
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_MODE, _HIDDEN_SIZE, _PROJ_SIZE, _NUM_LAYERS, _BATCH_FIRST = 6, 7, 8, 9, 10
_DROPOUT, _TRAIN, _BIDIRECTIONAL, _BATCH_SIZES = 11, 12, 13, 14
"""Where these stand among the arguments of ``_cudnn_rnn``."""


def _run(function: Function, *args: Any, **kwargs: Any) -> Any:
    """Runs cuDNN where ``cudnn_is_acceptable`` (aten/src/ATen/native/Cudnn.cpp), else the loop.

    The batch sizes of a packed sequence lie on the host.
    """
    call, sizes = None if kwargs else read_call(args), ()
    if call is not None and call.batch_sizes is not None:
        known = getattr(call.batch_sizes, "constant", call.batch_sizes)
        call, sizes = (None, ()) if known is None else (call, tuple(known.tolist()))
    if (
        call is None
        or not all(map(is_on_gpu, (call.input, *call.params)))
        or not torch.backends.cudnn.enabled
        or call.input.dtype not in _DTYPES
        or call.input.numel() == 0
    ):
        return run_in_place(function, *args, **kwargs)
    return _call_cudnn(MODES[function], call, sizes)


def _call_cudnn(mode: int, call: RecurrentCall, batch_sizes: tuple[int, ...]) -> Any:
    """``_cudnn_impl``: the weights go as one buffer if they lie in one."""
    hx, cx = call.states if mode == _LSTM else (call.states, None)
    hidden_size = (hx if cx is None else cx).shape[2]
    proj_size = 0 if cx is None or hx.shape[2] == hidden_size else hx.shape[2]
    stride = (4 if call.has_biases else 2) + bool(proj_size)
    buffer = _find_buffer(call.params)
    output, hy, cy, _, _ = torch._cudnn_rnn(
        call.input, list(call.params), stride, buffer, hx, cx,
        mode, hidden_size, proj_size, call.num_layers, call.batch_first, call.dropout,
        call.train, call.bidirectional, batch_sizes, None,
    )  # fmt: skip
    return (output, hy, cy) if mode == _LSTM else (output, hy)


def _find_buffer(params: Sequence[Tensor]) -> Tensor | None:
    """``try_get_weight_buf``: a flat view of the storage that all weights share."""
    storage = params[0].untyped_storage()
    if any(param.untyped_storage()._cdata != storage._cdata for param in params):
        return None
    count = storage.nbytes() // params[0].element_size()
    with torch.no_grad():
        return params[0].detach().new_empty(0).set_(storage, 0, (count,), (1,))


for _function in MODES:
    CUDA.function(_function)(functools.partial(_run, _function))


def count_weights(weights: Sequence[Tensor], stride: int) -> int:
    """``get_num_weights``: both biases have their place, in a network without them too."""
    count = sum(weight.numel() for weight in weights)
    has_biases = stride > 3
    return count if has_biases else count + 2 * weights[0].shape[0] * len(weights) // stride


@CUDA.mover(nn.RNNBase)
def _flatten_module(module: nn.RNNBase) -> None:
    """Lays a module's fake weights into one storage, as ``flatten_parameters`` does on CUDA.

    ``torch/nn/modules/rnn.py`` calls it when the module is moved; builds without cuDNN return.
    """
    weights = [weight for weight in module._flat_weights if weight is not None]
    storages = {weight.untyped_storage()._cdata for weight in weights}
    if len(storages) == len(weights) and all(w.dtype == weights[0].dtype for w in weights):
        _flatten_weights(weights, len(module._all_weights[0]))


def _flatten_weights(weights: Sequence[Tensor], stride: int) -> None:
    """The buffer has room for both biases (``get_num_weights``)."""
    first = weights[0]
    count = count_weights(weights, stride)
    with torch.no_grad(), no_dispatch():
        flat = torch.UntypedStorage(  # type: ignore[no-untyped-call]
            count * first.element_size(), device="meta"
        )
        offset = 0
        for weight in weights:
            resettable: Any = weight
            resettable.set_(flat, offset, weight.shape)
            offset += weight.numel()


# -- fake kernels ------------------------------------------------------------------------------


@CUDA.kernel(_flatten)
def _run_flatten(weights: Sequence[Tensor], stride: int, *_: Any) -> Tensor:
    """``_cudnn_rnn_flatten_weight``, which builds of PyTorch with cuDNN call."""
    _flatten_weights(weights, stride)
    buffer = _find_buffer(weights)
    assert buffer is not None
    return buffer


@CUDA.kernel(_forward)
def _run_forward(*args: Any) -> tuple[Tensor, ...]:
    """``_cudnn_rnn``: with the reserve that PyTorch's fake kernel leaves empty."""
    input_, weights, buffer, batch_first = args[0], args[1], args[3], args[_BATCH_FIRST]
    if buffer is None:  # filled anew in each call
        buffer = weights[0].new_empty(count_weights(weights, args[2]))
        args = (*args[:3], buffer, *args[4:])
    output, hy, cy, reserve, _ = _forward(*args)
    if batch_first and not args[_BATCH_SIZES]:  # made time first, and transposed
        batch, steps, features = output.shape
        output = output.new_empty((steps, batch, features)).transpose(0, 1)
    if args[_TRAIN]:
        nbytes = estimate_reserve_bytes(input_, args)
        reserve = input_.new_empty(nbytes, dtype=torch.uint8)
    return output, hy, cy, reserve, buffer


@CUDA.kernel(_backward)
def _run_backward(*args: Any) -> tuple[Any, ...]:
    """``_cudnn_rnn_backward``: the gradients of the weights are views of one buffer."""
    input_, weights, _, buffer, hx, cx = args[:6]
    mask = args[-1]
    batch_first, batch_sizes = args[14], args[18]
    if batch_first and not batch_sizes:
        batch, steps, features = input_.shape
        dx = input_.new_empty((steps, batch, features)).transpose(0, 1)
    else:
        dx = input_.new_empty(input_.shape)
    dhx = hx.new_empty(hx.shape)
    dcx = cx.new_empty(cx.shape) if cx is not None else None
    grads: list[Tensor] = []
    if mask[3]:
        flat = buffer.new_empty(buffer.shape)
        offset = 0
        for weight in weights:
            grads.append(flat[offset : offset + weight.numel()].view(weight.shape))
            offset += weight.numel()
    return dx, dhx, dcx, grads


def estimate_reserve_bytes(input_: Tensor, args: tuple[Any, ...]) -> int:
    """Estimates what cuDNN keeps between a training forward and its backward.

    From the sizes that cuDNN reported for four layers of 320 units over 25,000 rows
    (https://github.com/pytorch/pytorch/issues/2895: LSTM 736,000,000 B, GRU 864,000,000 B, which
    are 23 and 27 states): five states per layer for LSTM (its gates and the cell), six for GRU,
    and the output of every layer but the last. cuDNN 9.19 takes 256 B more, and a bit for each
    number that dropout may leave out (tests/data/cuda); no other source is public.
    """
    mode, hidden_size, proj_size, layers = _read_sizes(args)
    directions = 2 if args[_BIDIRECTIONAL] else 1
    rows = math.prod(input_.shape[:-1]) * directions
    between = (layers - 1) * (proj_size or hidden_size)
    kept = _KEPT_PER_LAYER[mode] * layers * hidden_size + between
    mask_bytes = rows * between // 8 if args[_DROPOUT] else 0
    return rows * kept * input_.element_size() + mask_bytes + 256


def estimate_workspace_bytes(
    input_: Tensor, args: tuple[Any, ...], weights: Sequence[Tensor]
) -> int:
    """Estimates cuDNN's workspace, which forward and both halves of backward take alike.

    From six calls on an H200 (cuDNN 9.19, tests/data/cuda): two layers of LSTM with dropout and
    one of GRU in both directions, in float32 and bfloat16, training and inference. They are exact,
    and 512 B off at twice the batch; more layers and other widths were not measured.
    """
    mode, hidden_size, _, layers = _read_sizes(args)
    directions = 2 if args[_BIDIRECTIONAL] else 1
    sizes = args[_BATCH_SIZES]
    batch = sizes[0] if sizes else input_.shape[0 if args[_BATCH_FIRST] else 1]
    rows = math.prod(input_.shape[:-1])
    widths = [input_.shape[-1], *(directions * hidden_size for _ in range(layers - 1))]
    states = 2 * _KEPT_PER_LAYER[mode] * rows + _STATES_PER_LAYER[mode] * batch
    count = directions * layers * hidden_size * states + rows * sum(widths)
    count += sum(weight.numel() for weight in weights if weight.dim() == 2)
    if args[_TRAIN] and args[_DROPOUT]:
        count += rows * sum(widths[1:])
    if args[_TRAIN] and directions == 2:  # gradients of both, before they are added
        count += rows * sum(widths) + 2 * directions * layers * batch * hidden_size
    return _WORKSPACE_BYTES + count * input_.element_size()


def _read_sizes(args: tuple[Any, ...]) -> tuple[int, int, int, int]:
    mode, hidden_size, proj_size, layers = (
        int(args[i]) for i in (_MODE, _HIDDEN_SIZE, _PROJ_SIZE, _NUM_LAYERS)
    )
    return mode, hidden_size, proj_size, layers


@CUDA.keeper(_forward)
def _keep_dropout(call: OperatorCall) -> tuple[tuple[str, int], ...]:
    """``get_dropout_state``: a generator for each thread, kept for the process."""
    if not (call.args[_TRAIN] and call.args[_DROPOUT]):
        return ()
    gpu = current_gpu()
    threads = gpu.multiprocessors * gpu.threads_per_multiprocessor
    return (("state of cuDNN's dropout", threads * _STATE_BYTES),)


@CUDA.workspace(_forward)
def _forward_workspace(call: OperatorCall) -> int:
    """The input, if it is not dense with time first, and cuDNN's own."""
    input_ = call.tensor(0)
    own_bytes = estimate_workspace_bytes(input_, call.args, call.args[1])
    return _copy_bytes(input_, bool(call.args[_BATCH_FIRST])) + own_bytes


@CUDA.workspace(_backward)
def _backward_workspace(call: OperatorCall) -> int:
    """The input and the gradient of the output, if not dense with time first, and cuDNN's own."""
    batch_first = bool(call.args[14])
    dense = (call.tensor(i) for i in (0, 7) if call.args[i] is not None)
    copied_bytes = sum(_copy_bytes(given, batch_first) for given in dense)
    forward_args = (*call.args[:6], *call.args[10:19])  # from the mode on, as forward has them
    return copied_bytes + estimate_workspace_bytes(call.tensor(0), forward_args, call.args[1])


def _copy_bytes(given: Tensor, batch_first: bool) -> int:
    """``.contiguous()``, after ``transpose(0, 1)`` where the batch comes first."""
    if batch_first and given.dim() == 3:
        given = given.transpose(0, 1)
    return 0 if given.is_contiguous() else given.numel() * given.element_size()


# -- Cells --

_GRU_GATES = 3
_GRU_KEPT = 5
"""``GRU_WORKSPACE_MULTIPLIER``."""


@CUDA.function(torch.lstm_cell)
@follow_autocast(aten.lstm_cell.default)
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
    fused = aten._thnn_fused_lstm_cell.default
    hy, cy, _ = fused(input_gates, hidden_gates, hx[1], b_ih, b_hh)
    return hy, cy


@CUDA.function(torch.gru_cell)
@follow_autocast(aten.gru_cell.default)
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
    fused = aten._thnn_fused_gru_cell.default
    result: Tensor = fused(input_gates, hidden_gates, hx, b_ih, b_hh)[0]
    return result


@CUDA.kernel("_thnn_fused_lstm_cell")
def _lstm_outputs(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, *_biases: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """cuda/RNN.cu, ``_thnn_fused_lstm_cell_cuda``; PyTorch's fake kernel wants biases."""
    return cx.new_empty(cx.shape), cx.new_empty(cx.shape), input_gates.new_empty(input_gates.shape)


@CUDA.kernel("_thnn_fused_gru_cell")
def _gru_outputs(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, *_biases: Tensor | None
) -> tuple[Tensor, Tensor]:
    """cuda/RNN.cu, ``_thnn_fused_gru_cell_cuda``."""
    batch, width = hx.shape
    return hx.new_empty(batch, width), hx.new_empty(batch, _GRU_KEPT * width)


@CUDA.kernel("_thnn_fused_gru_cell_backward")
def _gru_gradients(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """cuda/RNN.cu, ``_thnn_fused_gru_cell_backward_cuda``: gates, state and biases."""
    batch, width = grad_hy.shape
    gates = [workspace.new_empty(batch, _GRU_GATES * width) for _ in range(2)]
    biases = [x.new_empty(x.shape[1]) if has_bias else None for x in gates]
    return (*gates, grad_hy.new_empty(batch, width), *biases)


@CUDA.workspace("_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell_backward")
def _bias_bytes(call: OperatorCall) -> int:
    """The sums of the gates' gradients, which are the last to be made."""
    if not call.args[-1]:
        return 0
    gates = call.get_result(0)
    return reduce_bytes(Layout.of(gates), [0], False, gates.dtype, add)
