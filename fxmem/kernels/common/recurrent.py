"""Calls of torch's recurrent networks (``aten/src/ATen/native/RNN.cpp``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RecurrentCall:
    """Arguments of ``torch.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``, in their order."""

    input: Tensor  # steps, batch and features; or rows of a packed sequence
    batch_sizes: Tensor | None  # the batch of each step of a packed sequence
    states: Any
    params: Sequence[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False


def read_call(args: tuple[Any, ...]) -> RecurrentCall:
    """Reads the arguments of either overload, as ``torch.nn.RNNBase`` passes them."""
    is_packed = isinstance(args[3], (list, tuple))
    return RecurrentCall(*args) if is_packed else RecurrentCall(args[0], None, *args[1:])
