"""Modules, which bring parameters of their own; and all cases by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.cases import Case, Spec, ids
from benchmarks.catalogue import batches, elementwise, images, indices, layout, pairs, reductions
from benchmarks.catalogue.core import FUNCTIONS, IMAGE, make_case

# Imported for what they add.
_TABLES = (elementwise, reductions, layout, pairs, indices, batches, images)


def _modules() -> dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]]:
    """Modules, which bring parameters of their own."""
    sequence, image = Spec((40, 4, 128)), Spec(IMAGE)
    recurrent = {"input_size": 128, "hidden_size": 160}
    layer = {"d_model": 128, "nhead": 4, "dim_feedforward": 512}
    square = nn.utils.parametrizations
    return {
        "lstm": (lambda: nn.LSTM(**recurrent), (sequence,)),
        "gru": (lambda: nn.GRU(**recurrent), (sequence,)),
        "rnn": (lambda: nn.RNN(**recurrent), (sequence,)),
        "lstm_cell": (lambda: nn.LSTMCell(**recurrent), (Spec((64, 128)),)),
        "gru_cell": (lambda: nn.GRUCell(**recurrent), (Spec((64, 128)),)),
        "rnn_cell": (lambda: nn.RNNCell(**recurrent), (Spec((64, 128)),)),
        "multihead": (lambda: Self(nn.MultiheadAttention(128, 4)), (sequence,)),
        "multihead_weights": (lambda: Self(nn.MultiheadAttention(128, 4), True), (sequence,)),
        "encoder": (lambda: nn.TransformerEncoderLayer(**layer), (sequence,)),
        "encoder_first": (
            lambda: nn.TransformerEncoderLayer(**layer, norm_first=True, batch_first=True),
            (sequence,),
        ),
        "encoder_gelu": (
            lambda: nn.TransformerEncoderLayer(**layer, activation="gelu", batch_first=True),
            (sequence,),
        ),
        "decoder": (lambda: nn.TransformerDecoderLayer(**layer), (sequence, sequence)),
        "weight_norm_new": (lambda: square.weight_norm(nn.Linear(128, 512)), (sequence,)),
        "spectral_norm": (lambda: square.spectral_norm(nn.Linear(128, 512)), (sequence,)),
        "spectral_norm_old": (lambda: nn.utils.spectral_norm(nn.Linear(128, 512)), (sequence,)),
        "orthogonal": (lambda: square.orthogonal(nn.Linear(128, 512)), (sequence,)),
        "bilinear_module": (lambda: nn.Bilinear(128, 128, 16), (sequence, sequence)),
        "batch_norm_module": (lambda: nn.BatchNorm2d(16), (image,)),
        "embedding_bag_module": (lambda: nn.EmbeddingBag(512, 128), (ids(64, 4),)),
        "adaptive_softmax": (
            lambda: nn.AdaptiveLogSoftmaxWithLoss(128, 512, [100, 200]),
            (Spec((64, 128)), ids(64)),
        ),
    }


class Self(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, attention: nn.MultiheadAttention, need_weights: bool = False) -> None:
        super().__init__()
        self.attention = attention
        self.need_weights = need_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The context alone."""
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


def all_cases() -> dict[str, Case]:
    """Every function and module, by name."""
    cases = {name: make_case(name) for name in FUNCTIONS}
    for name, (build, inputs) in _modules().items():
        cases[f"nn_{name}"] = Case(f"nn_{name}", build, inputs)
    return cases
