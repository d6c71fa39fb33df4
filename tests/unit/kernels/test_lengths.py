"""Lengths whose values are known: the same step on real tensors and in an analysis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels import measure_peak
from running import Runs
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fxmem


def pack(model: Any, x: Tensor, lengths: Any) -> Any:
    first = model.cell.batch_first
    packed = pack_padded_sequence(model.linear(x), lengths, first, enforce_sorted=False)
    return pad_packed_sequence(model.cell(packed)[0], first)[0]


def make_aligner(lengths: Callable[[], Any], autocast: bool, **options: Any) -> nn.Module:
    def align(model: Any, x: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=autocast):
            scores = model.linear(x).log_softmax(-1)
            return functional.ctc_loss(scores, targets, *lengths(), **options)

    return Runs(align, linear=nn.Linear(8, 5))


def invert(model: Any, x: Tensor) -> Tensor:
    return torch.istft(torch.view_as_complex(model.linear(x)), 100, window=torch.ones(100))


def measure(model: nn.Module, inputs: tuple[Any, ...], mode: str) -> int:
    """Most bytes above what a step begins with, as PyTorch's allocator reports them."""

    def run() -> None:
        with torch.set_grad_enabled(mode == "train"):
            output = model.train(mode == "train")(*inputs)
            if mode == "train":
                (output.sum() if output.ndim else output).backward()

    run()
    model.zero_grad()
    return measure_peak(run)[0]


def predict_peak(model: nn.Module, inputs: tuple[Any, ...], mode: str) -> int:
    analysis = fxmem.analyze(model, inputs, mode=mode, device="cpu")
    resident = sum(s.nbytes for s in analysis.graph.storages if s.born < 0)
    return analysis.peak_bytes - resident


PACKED = [
    (nn.LSTM, {}, [6, 5, 3, 2]),
    (nn.LSTM, {"batch_first": True, "bidirectional": True}, [2, 6, 3, 3]),
    (nn.LSTM, {"num_layers": 2}, [6, 6, 6, 6]),
    (nn.GRU, {"batch_first": True}, [1, 4, 6, 2]),
]


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize(("cell", "options", "lengths"), PACKED)
def test_packed_sequences(
    cell: type[nn.RNNBase], options: dict[str, Any], lengths: list[int], mode: str
) -> None:
    model = Runs(pack, linear=nn.Linear(8, 8), cell=cell(8, 16, **options))
    inputs = torch.rand(4, 6, 8) if "batch_first" in options else torch.rand(6, 4, 8)
    real = (inputs, torch.tensor(lengths))
    assert predict_peak(model, real, mode) == measure(model, real, mode)


NUMBERS = [
    lambda: ((10, 10, 9), (3, 2, 1)),
    lambda: (torch.full((3,), 10), torch.tensor([3, 2, 1])),
]


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"zero_infinity": True}])
@pytest.mark.parametrize("lengths", NUMBERS)
@pytest.mark.parametrize("autocast", [False, True])
def test_ctc_loss(autocast: bool, lengths: Callable[[], Any], options: dict[str, Any]) -> None:
    model = make_aligner(lengths, autocast, **options)
    real = (torch.rand(10, 3, 8), torch.ones(3, 3, dtype=torch.int64))
    assert predict_peak(model, real, "train") == measure(model, real, "train")


def test_joined_targets_have_rows_for_the_longest_on_the_gpu() -> None:
    """As ``nn.CTCLoss`` is documented: lengths on the host, targets in one dimension."""
    model = make_aligner(lambda: (torch.full((3,), 10), torch.tensor([3, 2, 1])), False)
    graph = fxmem.analyze(model, ("10x3x8", torch.ones(6, dtype=torch.int64)), device="cuda").graph
    (alpha,) = [s for s in graph.storages if s.shape == (3, 10, 2 * 3 + 1)]
    assert alpha.saved_by


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_istft(mode: str) -> None:
    model, real = Runs(invert, linear=nn.Linear(2, 2)), (torch.rand(2, 51, 41, 2),)
    # The transform's own scratch is not counted.
    assert predict_peak(model, real, mode) == pytest.approx(measure(model, real, mode), 0.01)
