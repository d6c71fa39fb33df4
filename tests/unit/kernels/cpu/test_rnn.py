"""A recurrent layer on fakes runs, saves and holds what it does on real CPU tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from measuring.side_by_side import compare
from running import Runs
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from fxmem.versions.release import is_release

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="built without oneDNN"
)

OPTIONS: list[dict[str, object]] = [
    {},
    {"num_layers": 2},
    {"bidirectional": True},
    {"num_layers": 2, "bidirectional": True, "dropout": 0.3},
    {"num_layers": 3, "dropout": 0.5, "batch_first": True},
    {"bias": False, "num_layers": 2, "bidirectional": True},
    {"batch_first": True, "bidirectional": True},
]


@pytest.mark.parametrize("mode", ["train", "eval", "infer"])
@pytest.mark.parametrize("options", OPTIONS)
def test_lstm(options: dict[str, object], mode: str) -> None:
    model = nn.LSTM(8, 16, **options)  # type: ignore[arg-type]
    operators = compare(model, torch.randn(5, 3, 8), mode=mode)
    assert "aten.mkldnn_rnn_layer.default" in operators


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_lstm_of_other_types(dtype: torch.dtype) -> None:
    for mode in ("train", "infer"):
        compare(nn.LSTM(8, 16).to(dtype), torch.randn(5, 3, 8, dtype=dtype), mode=mode)


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.filterwarnings("ignore:LSTM with projections", "ignore:TF32 acceleration")
def test_lstm_that_runs_the_native_loop(mode: str) -> None:
    projecting = nn.LSTM(8, 16, proj_size=4)
    assert "aten.mm.default" in compare(projecting, torch.randn(5, 3, 8), mode=mode)
    with torch.backends.mkldnn.flags(enabled=False):
        compare(nn.LSTM(8, 16), torch.randn(5, 3, 8), mode=mode)


def test_lstm_without_a_batch_and_with_states() -> None:
    states = (torch.randn(1, 16, requires_grad=True), torch.randn(1, 16))
    compare(nn.LSTM(8, 16), torch.randn(5, 8, requires_grad=True), states)
    # Frozen, it makes a workspace that is not saved.
    compare(nn.LSTM(8, 16).requires_grad_(False), torch.randn(5, 3, 8, requires_grad=True))


def test_lstm_under_autocast() -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no such LSTM on this CPU: PyTorch ends in an error")

    def run(model: Any, x: Tensor) -> Any:
        with torch.autocast("cpu"):
            return model.lstm(x)[0]

    compare(Runs(run, lstm=nn.LSTM(8, 16)), torch.randn(5, 3, 8))


@pytest.mark.parametrize("cell", [nn.GRU, nn.RNN])
@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("options", OPTIONS[:4])
def test_other_cells_run_the_native_loop(
    cell: type[nn.RNNBase], options: dict[str, object], mode: str
) -> None:
    compare(cell(8, 16, **options), torch.randn(3, 2, 8), mode=mode)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [[2] * 5, [2, 2, 1, 1, 1]])
def test_packed_sequences_of_one_length_are_a_tensor(sizes: list[int]) -> None:
    batch_sizes = torch.tensor(sizes)

    class Model(nn.LSTM):
        def forward(self, data: Tensor, hidden: Tensor, cell: Tensor) -> Tensor:
            packed = PackedSequence(data, batch_sizes)
            output: Tensor = super().forward(packed, (hidden, cell))[0].data
            return output

    states = torch.randn(1, 2, 16), torch.randn(1, 2, 16)
    operators = compare(Model(8, 16), torch.randn(sum(sizes), 8), *states)
    is_tensor = len(set(sizes)) == 1 and is_release(since=(2, 13))
    assert ("aten.mkldnn_rnn_layer.default" in operators) == is_tensor
