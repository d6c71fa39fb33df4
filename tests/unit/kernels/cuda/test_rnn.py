"""Recurrent networks on CUDA: one buffer of weights, one reserve, one buffer of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxmem import analyze
from fxmem.analysis import Analysis
from fxmem.graph import Category
from fxmem.kernels.cuda.recurrent import estimate_reserve_bytes

STEPS, BATCH, INPUT, HIDDEN = 10, 8, 16, 32


class Recurrent(nn.Module):
    """A network that gives its outputs, and not its states."""

    def __init__(self, kind: type[nn.RNNBase], **settings: Any) -> None:
        super().__init__()
        self.core = kind(INPUT, HIDDEN, 2, **settings)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.core(x)[0]
        return output


def analyse(kind: type[nn.RNNBase] = nn.LSTM, **settings: Any) -> Analysis:
    return analyze(Recurrent(kind, **settings), (f"{STEPS}x{BATCH}x{INPUT}",), device="cuda")


def sizes(analysis: Analysis, category: Category) -> list[int]:
    return [s.nbytes for s in analysis.graph.storages if s.category is category]


# Rows of gates, times input + hidden + two biases; the second layer takes the first one's output.
PARAMETERS = {
    nn.LSTM: 4 * (4 * HIDDEN) * ((INPUT + HIDDEN + 2) + (HIDDEN + HIDDEN + 2)),
    nn.GRU: 4 * (3 * HIDDEN) * ((INPUT + HIDDEN + 2) + (HIDDEN + HIDDEN + 2)),
    nn.RNN: 4 * HIDDEN * ((INPUT + HIDDEN + 2) + (HIDDEN + HIDDEN + 2)),
}


@pytest.mark.parametrize("kind", PARAMETERS)
def test_weights_and_their_gradients_are_one_buffer_each(kind: type[nn.RNNBase]) -> None:
    analysis = analyse(kind)
    assert sizes(analysis, Category.PARAMETER) == [PARAMETERS[kind]]
    assert sizes(analysis, Category.GRADIENT) == [PARAMETERS[kind]]


def test_the_buffer_has_room_for_biases_that_there_are_none_of() -> None:
    assert sizes(analyse(bias=False), Category.PARAMETER) == [PARAMETERS[nn.LSTM]]


def test_what_is_saved() -> None:
    """derivatives.yaml, ``_cudnn_rnn``: input, weights, states, output, reserve, buffer."""
    saved = {(s.shape, s.dtype, s.category) for s in analyse().saved}
    state = (2, BATCH, HIDDEN)
    rows = STEPS * BATCH * HIDDEN
    # five states of each layer, and the first layer's output
    reserve = 4 * rows * (5 * 2 + 1)
    assert ((reserve,), "uint8", Category.ACTIVATION) in saved
    assert ((STEPS, BATCH, INPUT), "float32", Category.INPUT) in saved
    assert ((STEPS, BATCH, HIDDEN), "float32", Category.ACTIVATION) in saved
    assert (state, "float32", Category.ACTIVATION) in saved
    assert not any(shape == (STEPS, BATCH, 4 * HIDDEN) for shape, _, _ in saved)


@pytest.mark.parametrize(("mode", "reported_bytes"), [(2, 736_000_000), (3, 864_000_000)])
def test_the_reserve_is_what_cudnn_reported(mode: int, reported_bytes: int) -> None:
    x = torch.empty(1000, 25, 123, device="meta")
    call = (None,) * 6 + (mode, 320, 0, 4, False, 0.0, True, False)
    assert estimate_reserve_bytes(x, call) == reported_bytes


def test_inference_reserves_nothing() -> None:
    analysis = analyze(
        Recurrent(nn.LSTM), (f"{STEPS}x{BATCH}x{INPUT}",), device="cuda", mode="infer"
    )
    assert not [s for s in analysis.graph.storages if s.dtype == "uint8"]


def test_batch_first_copies_the_input_inside() -> None:
    def find(analysis: Analysis) -> int:
        (forward,) = (o for o in analysis.graph.operations if o.name == "aten._cudnn_rnn.default")
        return forward.workspace_bytes

    assert find(analyse()) == 0
    assert find(analyse(batch_first=True)) == 4 * STEPS * BATCH * INPUT
