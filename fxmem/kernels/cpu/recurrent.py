"""LSTM on the CPU: one oneDNN operator per layer and direction.

``aten::lstm`` asks ``use_mkldnn`` (aten/src/ATen/native/RNN.cpp), which wants tensors whose
backend is the CPU. A fake tensor's is not, and the loop over the time steps that runs instead
saves and allocates other things. GRU and the plain RNN run that loop on the CPU too.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fxmem.kernels.common.in_place import run_in_place
from fxmem.kernels.registry import CPU

_aten = torch.ops.aten
_mkldnn_rnn_layer = _aten.mkldnn_rnn_layer.default
_mkldnn_rnn_layer_backward = _aten.mkldnn_rnn_layer_backward.default

_LSTM_MODE = 2
"""``rnn_kind::LSTM`` of oneDNN's header library ideep."""

_GATES = 4
_PAGE_BYTES = 4096
_FLOAT_BYTES = 4

States = tuple[Tensor, Tensor, Tensor]


def _uses_mkldnn(input_: Tensor, params: Sequence[Tensor], states: Sequence[Tensor]) -> bool:
    """RNN.cpp, ``use_mkldnn``, and ``has_projections`` of ``lstm``."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not torch._C._get_mkldnn_enabled() or states[0].shape[2] != states[1].shape[2]:
        return False
    if not all(_is_cpu_backend(tensor) for tensor in (input_, *params, *states)):
        return False
    return _is_supported(input_.dtype) and input_.numel() != 0


def _is_cpu_backend(tensor: Tensor) -> bool:
    """``options().backend() == Backend::CPU``, of the tensor that a fake one stands for."""
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized
    return is_dense and tensor.device.type == "cpu"


def _is_supported(dtype: torch.dtype) -> bool:
    if dtype is torch.float16:
        return not torch.is_grad_enabled() and _has_kernels(dtype)
    return dtype is torch.float32 or (dtype is torch.bfloat16 and _has_kernels(dtype))


@functools.cache
def _has_kernels(dtype: torch.dtype) -> bool:
    """``mkldnn_bf16_device_check`` and ``mkldnn_fp16_device_check``, of this machine."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    with torch._C._DisableTorchDispatch():  # a question, and no operator of the step
        return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())


@CPU.function(torch.lstm)
def lstm(*args: Any, **kwargs: Any) -> States:
    """``aten::lstm``, of a tensor or of a packed sequence."""
    is_packed = "data" in kwargs or (len(args) > 1 and isinstance(args[1], Tensor))
    lower: Callable[..., States | None] = _lower_packed if is_packed else _lower
    lowered = lower(*args, **kwargs)
    if lowered is None:
        lowered = run_in_place(torch.lstm, *args, **kwargs)
    return lowered


def _lower(
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> States | None:
    """Overload ``lstm.input``; None where the native loop runs."""
    if not _uses_mkldnn(input, params, hx):
        return None
    return _run_layers(
        input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
    )


def _lower_packed(
    data: Tensor,
    batch_sizes: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> States | None:
    """Overload ``lstm.data``: sequences of one length are a tensor."""
    batch = _find_uniform(batch_sizes)
    if not batch or not _uses_mkldnn(data, params, hx):
        return None
    steps = len(batch_sizes)
    input_ = data.reshape(steps, batch, data.shape[-1])
    output, hidden, cell = _run_layers(
        input_, hx, params, has_biases, num_layers, dropout, train, bidirectional, False
    )
    return output.reshape(steps * batch, output.shape[-1]), hidden, cell


def _find_uniform(batch_sizes: Tensor) -> int:
    """The batch of every time step; 0 where they differ or are not known."""
    if isinstance(batch_sizes, FakeTensor):
        return 0
    sizes = set(batch_sizes.tolist())
    return int(sizes.pop()) if len(sizes) == 1 else 0


def _run_layers(
    input_: Tensor,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> States:
    """aten/src/ATen/native/mkldnn/RNN.cpp, ``mkldnn_rnn``; values live as long as there."""
    if batch_first:
        input_ = input_.transpose(0, 1)
    input_ = input_.contiguous()
    hidden, cell = states[0].contiguous(), states[1].contiguous()
    directions = 2 if bidirectional else 1
    stride = 4 if has_biases else 2
    current = input_
    outputs: list[Any] = [None] * directions
    last_hidden: list[Tensor] = []
    last_cell: list[Tensor] = []
    for layer, direction in itertools.product(range(num_layers), range(directions)):
        index = layer * directions + direction
        outputs[direction], *last = _run_layer(
            current,
            params[index * stride : (index + 1) * stride],
            (hidden.select(0, index), cell.select(0, index)),
            (direction > 0, [], _LSTM_MODE, hidden.shape[2], num_layers, has_biases),
            (bidirectional, batch_first, train),
        )
        last_hidden.append(last[0])
        last_cell.append(last[1])
        if direction == directions - 1:
            current = torch.cat(outputs, -1) if bidirectional else outputs[0]
            if dropout and train and layer < num_layers - 1:
                current = torch.dropout(current, dropout, True)
    result_hidden, result_cell = torch.stack(last_hidden), torch.stack(last_cell)
    return current.transpose(0, 1) if batch_first else current, result_hidden, result_cell


def _run_layer(
    input_: Tensor,
    params: Sequence[Tensor],
    states: tuple[Tensor, Tensor],
    *flags: tuple[Any, ...],
) -> States:
    """One layer in one direction; its workspace, and biases of zeros, go when it returns."""
    biases = params[2:]
    if not biases:  # made for the call, in the order in which GCC evaluates arguments
        second, first = (torch.zeros(like.shape, dtype=like.dtype) for like in reversed(params))
        biases = (first, second)
    flat = itertools.chain.from_iterable(flags)
    output, hidden, cell, _ = _mkldnn_rnn_layer(input_, *params[:2], *biases, *states, *flat)
    return output, hidden, cell


# -- fake kernels ------------------------------------------------------------------------------


@CPU.kernel(_mkldnn_rnn_layer)
def _layer(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """RNN.cpp, ``mkldnn_rnn_layer``: the workspace that PyTorch's fake kernel leaves empty.

    Made where gradients are enabled, whether or not anything needs one.
    """
    output, hidden, cell, workspace = _mkldnn_rnn_layer(*args)
    if torch.is_grad_enabled():
        workspace = workspace.new_empty(workspace_bytes(args[0].shape, args[10], args[0].dtype))
    return output, hidden, cell, workspace


@CPU.kernel(_mkldnn_rnn_layer_backward)
def _layer_backward(*args: Any) -> tuple[Tensor | None, ...]:
    """RNN.cpp, ``mkldnn_rnn_layer_backward``: each bias has a gradient of its own."""
    source, first, second, bias, _, hidden, cell = _mkldnn_rnn_layer_backward(*args)
    return source, first, second, bias, torch.empty_like(bias), hidden, cell


def workspace_bytes(input_sizes: Sequence[int], hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes that oneDNN's LSTM hands from a training forward to its backward.

    oneDNN 3.x, src/cpu/rnn/rnn_utils.hpp, ``set_workspace_sizes``, and rnn_utils.cpp,
    ``set_offsets``: gates, a projection's states, states of the layer and the cell and their
    gradients, each starting on a page. The layout is that of every instruction set.

    Args:
        input_sizes: Time steps, batch, features.
        hidden_size: Features of the state.
        dtype: Element type of the input; gradients are float.

    >>> workspace_bytes((5, 3, 8), 16, torch.float32)
    28672
    """
    steps, batch, features = input_sizes
    itemsize = dtype.itemsize
    widest = max(features, hidden_size)
    rows, state_rows = steps * batch, 2 * (steps + 1) * batch
    parts = (
        rows * _leading_bytes(_GATES * hidden_size, itemsize),
        rows * _leading_bytes(hidden_size, itemsize),
        state_rows * _leading_bytes(widest, itemsize),
        state_rows * hidden_size * itemsize,
        state_rows * _leading_bytes(widest, _FLOAT_BYTES),
        state_rows * _leading_bytes(widest, _FLOAT_BYTES),
        state_rows * hidden_size * _FLOAT_BYTES,
    )
    return sum(-(-part // _PAGE_BYTES) * _PAGE_BYTES for part in parts)


def _leading_bytes(count: int, itemsize: int) -> int:
    """rnn_utils.cpp, ``get_good_ld``: whole cache lines, and no multiple of 256 elements."""
    line = 64 // itemsize
    rounded = -(-count // line) * line
    return (rounded + line if rounded % 256 == 0 else rounded) * itemsize
