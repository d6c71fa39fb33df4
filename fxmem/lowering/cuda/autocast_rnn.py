"""cuDNN's recurrent networks under CUDA's autocast: float16, in a weight buffer made anew.

Source: ``aten/src/ATen/cudnn/AutocastRNN.cpp`` (``_cudnn_rnn_cast_reflatten``) and
``aten/src/ATen/native/cudnn/RNN.cpp`` (``copy_weights_to_flat_buf_views``). It is float16 whatever
autocast's dtype. Each call copies the weights: nothing is cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxmem.lowering.cuda.autocast_policies import CallArguments, cast_cached, is_eligible

_GATES = (1, 1, 4, 3)
"""``_num_linear_layers`` over two: of ReLU, tanh, LSTM and GRU cells, by cuDNN's ``mode``."""
_MODE, _HIDDEN_SIZE, _PROJ_SIZE, _NUM_LAYERS, _BIDIRECTIONAL = 6, 7, 8, 9, 13
"""Where these stand among the arguments of ``_cudnn_rnn``."""


def cast_rnn(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    """The arguments of ``_cudnn_rnn`` as autocast passes them on."""
    input, weights, stride, buffer, hx, cx, *rest = args
    flat = weights[0] if buffer is None else buffer
    if is_eligible(flat) and flat.dtype != torch.float16:
        buffer, weights = _flatten_weights(weights, count_weights(args))
    cx, hx, input = (cast_cached(torch.float16, value) for value in (cx, hx, input))
    return (input, weights, stride, buffer, hx, cx, *rest), kwargs


def count_weights(args: tuple[Any, ...]) -> int:
    """``get_num_weights``: elements of the flat buffer of a ``_cudnn_rnn`` call.

    Both biases of each layer have their place in it, in a network without biases too: PyTorch
    asks cuDNN for ``CUDNN_RNN_DOUBLE_BIAS``.
    """
    hidden, proj, layers = args[_HIDDEN_SIZE], args[_PROJ_SIZE], args[_NUM_LAYERS]
    directions = 2 if args[_BIDIRECTIONAL] else 1
    rows = _GATES[args[_MODE]] * hidden
    recurrent = proj or hidden
    count = 0
    for layer in range(layers):
        width = args[0].shape[-1] if layer == 0 else recurrent * directions
        count += directions * (rows * (width + recurrent + 2) + proj * hidden)
    return count


def _flatten_weights(weights: Sequence[Tensor], count: int) -> tuple[Tensor, list[Tensor]]:
    """A buffer of float16, and the parts of it that the weights were copied to.

    To autograd the parts are no views, so that each copy leads back to its weight alone.
    """
    buffer = torch.zeros(count, dtype=torch.float16, device=weights[0].device)
    parts, offset = [], 0
    for weight in weights:
        part = buffer.new_empty(0)
        parts.append(part.set_(buffer.untyped_storage(), offset, (weight.numel(), 1), (1, 1)))
        offset += weight.numel()
    for part, weight in zip(parts, weights, strict=True):
        part.copy_(weight.view_as(part))
    return buffer, parts
