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

from fxmem.kernels.cuda.autocast_policies import CallArguments, cast_cached, is_eligible
from fxmem.kernels.cuda.rnn import count_weights


def cast_rnn(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
    """The arguments of ``_cudnn_rnn`` as autocast passes them on."""
    input, weights, stride, buffer, hx, cx, *rest = args
    flat = weights[0] if buffer is None else buffer
    if is_eligible(flat) and flat.dtype != torch.float16:
        buffer, weights = _flatten_weights(weights, stride)
    cx, hx, input = (cast_cached(torch.float16, value) for value in (cx, hx, input))
    return (input, weights, stride, buffer, hx, cx, *rest), kwargs


def _flatten_weights(weights: Sequence[Tensor], stride: int) -> tuple[Tensor, list[Tensor]]:
    """A buffer of float16, and the parts of it that the weights were copied to.

    To autograd the parts are no views, so that each copy leads back to its weight alone.
    """
    options: dict[str, Any] = {"dtype": torch.float16, "device": weights[0].device}
    buffer = torch.zeros(count_weights(weights, stride), **options)
    parts, offset = [], 0
    for weight in weights:
        part = torch.empty(0, **options)
        parts.append(part.set_(buffer.untyped_storage(), offset, (weight.numel(), 1), (1, 1)))
        offset += weight.numel()
    for part, weight in zip(parts, weights, strict=True):
        part.copy_(weight.view_as(part))
    return buffer, parts
