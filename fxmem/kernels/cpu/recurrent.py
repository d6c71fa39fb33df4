"""LSTM on the CPU: one oneDNN operator per layer and direction.

``aten::lstm`` asks ``use_mkldnn`` (aten/src/ATen/native/RNN.cpp), which wants tensors whose
backend is the CPU. A fake tensor's is not, and the loop over the time steps that runs instead
saves and allocates other things. GRU and the plain RNN run that loop on the CPU too.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fxmem.kernels.common.in_place import run_in_place
from fxmem.kernels.common.recurrent import RecurrentCall, read_call
from fxmem.kernels.cpu.linear import has_instructions
from fxmem.kernels.cpu.onednn.recurrent import find_reserve_bytes
from fxmem.kernels.registry import CPU
from fxmem.versions.operators import aten
from fxmem.versions.release import is_release

_mkldnn_rnn_layer = aten.mkldnn_rnn_layer.default
_mkldnn_rnn_layer_backward = aten.mkldnn_rnn_layer_backward.default

_LSTM_MODE = 2
"""``rnn_kind::LSTM`` of oneDNN's header library ideep."""

States = tuple[Tensor, Tensor, Tensor]


def _uses_mkldnn(call: RecurrentCall) -> bool:
    """RNN.cpp, ``use_mkldnn``, and ``has_projections`` of ``lstm``; mkldnn/Utils.h."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    hidden, cell = call.states
    if not torch._C._get_mkldnn_enabled() or hidden.shape[2] != cell.shape[2]:
        return False
    dtype = call.input.dtype
    if dtype is torch.float16:
        is_supported = not torch.is_grad_enabled() and has_instructions(dtype)
    else:
        is_supported = dtype is torch.float32 or (
            dtype is torch.bfloat16 and has_instructions(dtype)
        )
    # ``options().backend() == Backend::CPU``, of the tensors that fake ones stand for.
    return (
        is_supported
        and call.input.numel() != 0
        and all(
            x.layout is torch.strided and not x.is_quantized and x.device.type == "cpu"
            for x in (call.input, *call.params, hidden, cell)
        )
    )


@CPU.function(torch.lstm)
def lstm(*args: Any, **kwargs: Any) -> States:
    """``aten::lstm``; a packed sequence goes to oneDNN where all its sequences have one length.

    That came with 2.13, pull request 185531.
    """
    call = None if kwargs else read_call(args)
    if call is None or not _uses_mkldnn(call):
        return run_in_place(torch.lstm, *args, **kwargs)  # type: ignore[no-any-return]
    if call.batch_sizes is None:
        return _run_layers(call, call.input.transpose(0, 1) if call.batch_first else call.input)
    batches = set() if isinstance(call.batch_sizes, FakeTensor) else set(call.batch_sizes.tolist())
    if len(batches) != 1 or is_release(before=(2, 13)):
        return run_in_place(torch.lstm, *args)  # type: ignore[no-any-return]
    steps = len(call.batch_sizes)
    input_ = call.input.reshape(steps, int(batches.pop()), call.input.shape[-1])
    output, hidden, cell = _run_layers(call, input_)
    return output.flatten(0, 1), hidden, cell


def _run_layers(call: RecurrentCall, input_: Tensor) -> States:
    """aten/src/ATen/native/mkldnn/RNN.cpp, ``mkldnn_rnn``; values live as long as there."""
    current = input_ = input_.contiguous()
    hidden, cell = (state.contiguous() for state in call.states)
    directions = 2 if call.bidirectional else 1
    stride = 4 if call.has_biases else 2
    outputs: list[Any] = [None] * directions
    last_hidden: list[Tensor] = []
    last_cell: list[Tensor] = []
    for layer, direction in itertools.product(range(call.num_layers), range(directions)):
        index = layer * directions + direction
        outputs[direction], *last = _run_layer(
            current,
            call.params[index * stride : (index + 1) * stride],
            (hidden.select(0, index), cell.select(0, index)),
            (direction > 0, [], _LSTM_MODE, hidden.shape[2], call.num_layers, call.has_biases),
            (call.bidirectional, call.batch_first, call.train),
        )
        last_hidden.append(last[0])
        last_cell.append(last[1])
        if direction == directions - 1:
            current = torch.cat(outputs, -1) if call.bidirectional else outputs[0]
            if call.dropout and call.train and layer < call.num_layers - 1:
                current = torch.dropout(current, call.dropout, True)
    result_hidden, result_cell = torch.stack(last_hidden), torch.stack(last_cell)
    return current.transpose(0, 1) if call.batch_first else current, result_hidden, result_cell


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
        workspace = workspace.new_empty(find_reserve_bytes(args[0], args[5], args[7]))
    return output, hidden, cell, workspace


@CPU.kernel(_mkldnn_rnn_layer_backward)
def _layer_backward(*args: Any) -> tuple[Tensor, ...]:
    """RNN.cpp, ``mkldnn_rnn_layer_backward``: in float32, and each bias has one of its own.

    PyTorch's fake kernel has the dtype, and the shape where there are no biases, of late only (pull
    request 179367).
    """
    input_, first, second, _, _, hidden, cell = (tensor.shape for tensor in args[:7])
    shapes = (input_, first, second, first[:1], first[:1], hidden, cell)
    return tuple(args[0].new_empty(shape, dtype=torch.float32) for shape in shapes)
