"""Cells of recurrent networks on CUDA, against ``RNN.cpp`` and ``cuda/RNN.cu``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_steps import made, run_step, saved
from torch import Tensor, nn

from fxmem import analyze
from fxmem.graph import MemoryGraph, Phase, Storage

BATCH, INPUT, HIDDEN = 8, 16, 32
STATE = BATCH * HIDDEN * 4
"""Bytes of a state of floats."""


class Cell(nn.Module):
    def __init__(self, kind: type[nn.RNNCellBase], **settings: Any) -> None:
        super().__init__()
        self.core = kind(INPUT, HIDDEN, **settings)

    def forward(self, x: Tensor) -> Any:
        return self.core(x)


def leaf() -> Tensor:
    return torch.zeros(BATCH, INPUT, requires_grad=True)


def test_an_lstm_cell() -> None:
    graph = run_step(Cell(nn.LSTMCell), leaf())
    # A state of zeros, which is the cell too; both products; state, cell and gates.
    assert made(graph) == [
        ("zeros", STATE),
        ("mm", 4 * STATE),
        ("mm", 4 * STATE),
        ("_thnn_fused_lstm_cell", 2 * STATE + 4 * STATE),
    ]
    fused = dict(made(graph, Phase.BACKWARD))["_thnn_fused_lstm_cell_backward_impl"]
    # Gradients of gates and cell, and their sum for the biases, of both the same.
    assert fused == 4 * STATE + STATE + 4 * HIDDEN * 4


def test_a_gru_cell() -> None:
    graph = run_step(Cell(nn.GRUCell), leaf())
    assert made(graph) == [
        ("zeros", STATE),
        ("mm", 3 * STATE),
        ("mm", 3 * STATE),
        ("_thnn_fused_gru_cell", STATE + 5 * STATE),
    ]
    fused = dict(made(graph, Phase.BACKWARD))["_thnn_fused_gru_cell_backward"]
    # Gradients of the gates of input and state, of the state, and sums for each of the biases.
    assert fused == 2 * 3 * STATE + STATE + 2 * 3 * HIDDEN * 4


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_without_biases_nothing_is_summed(kind: type[nn.RNNCellBase]) -> None:
    backward = made(run_step(Cell(kind, bias=False), leaf()), Phase.BACKWARD)
    (fused,) = (nbytes for name, nbytes in backward if "fused" in name)
    assert fused == (5 if kind is nn.LSTMCell else 7) * STATE


def test_many_rows_are_summed_with_a_buffer() -> None:
    # Where few columns have many rows, several blocks share a column (test_reduction.py).
    graph = run_step(Cell(nn.LSTMCell), torch.zeros(65536, INPUT, requires_grad=True))
    (operation,) = (o for o in graph.operations if "backward_impl" in o.name)
    assert operation.workspace_bytes > 0


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_in_inference_nothing_is_saved(kind: type[nn.RNNCellBase]) -> None:
    graph = run_step(Cell(kind), torch.zeros(BATCH, INPUT), mode="infer")
    assert saved(graph) == []
    assert "fused" in made(graph)[-1][0]


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_autocast_casts_the_cell_s_operands(kind: type[nn.RNNCellBase]) -> None:
    graph = analyze(Cell(kind), (leaf(),), device="cuda", autocast="bf16").graph
    types = {s.dtype for s in graph.storages if s.born >= 0 and "fused" in find_maker(graph, s)}
    assert types == {"bfloat16"}


def find_maker(graph: MemoryGraph, storage: Storage) -> str:
    return graph.operations[storage.born].name


class Direct(nn.Module):
    """Calls a cell's function for tensors of the host."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def forward(self, x: Tensor) -> Tensor:
        gates = 4 if self._name == "lstm_cell" else 3
        given = torch.ones(BATCH, INPUT)
        state = torch.ones(BATCH, HIDDEN)
        weights = torch.ones(gates * HIDDEN, INPUT), torch.ones(gates * HIDDEN, HIDDEN)
        if gates == 4:
            result = torch.lstm_cell(given, [state, state], *weights)[0]
        else:
            result = torch.gru_cell(given, state, *weights)
        return x + result.sum().to(x.device)


@pytest.mark.parametrize("name", ["lstm_cell", "gru_cell"])
def test_the_host_has_cells_of_the_cpu(name: str) -> None:
    operators = {o.name for o in run_step(Direct(name), leaf()).operations}
    assert not any("fused" in operator for operator in operators)
    assert any("sigmoid" in operator for operator in operators)
