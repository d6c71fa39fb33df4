"""Reports on outputs that are kept, and on operators whose memory is not counted."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from cuda_steps import run_step
from running import Call
from torch import Tensor, nn

from fxmem import analyze
from fxmem.analysis import Analysis
from fxmem.kernels.cuda import CUDA

F = nn.functional


def read_text(analysis: Analysis, top: int = 10) -> str:
    return analysis.to_text(top=top)


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_results_of_the_step_before_are_reported(mode: str) -> None:
    """``for ...: output = model(x); loss = f(output)``: rebound, not deleted."""

    def analyse(hold: bool) -> Analysis:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16384))
        return analyze(model, ("64x8",), device="cuda", mode=mode, hold_outputs=hold)

    held, plain, output_bytes = analyse(True), analyse(False), 64 * 16384 * 4
    note = "Results of the step before take 4.00 MiB until those of this one are there."
    assert note in read_text(held).splitlines()
    report = json.loads(held.to_json())
    assert note in report["notes"]
    named = {s["name"]: s["nbytes"] for s in report["storages"]}
    assert named["output of the step before"] == output_bytes
    assert named.get("loss of the step before") == (512 if mode == "train" else None)
    assert "step before" not in read_text(plain, top=99) + plain.to_json()
    if mode == "infer":
        assert [s.name for s in held.peak.live].count("output of the step before") == 1
        assert held.peak_bytes - plain.peak_bytes == output_bytes


def factorize(x: Tensor) -> Tensor:
    return torch.linalg.cholesky(x @ x.mT + torch.eye(8, device=x.device))


@pytest.mark.parametrize(
    ("model", "sizes", "operators"),
    [
        (torch.fft.rfft, (4, 8), ["_fft_r2c"]),
        (factorize, (8, 8), ["linalg_cholesky_ex"]),
        (torch.linalg.svdvals, (8, 8), ["_linalg_svd"]),
        (nn.BatchNorm2d(4), (2, 4, 6, 6), ["cudnn_batch_norm", "cudnn_batch_norm_backward"]),
        (nn.GRU(8, 4), (5, 2, 8), ["_cudnn_rnn", "_cudnn_rnn_backward"]),
        (lambda x: x.mode(-1).values, (4, 8), ["mode"]),
    ],
    ids=["cuFFT", "cuSOLVER", "singular values", "cuDNN", "cuDNN's networks", "commonest"],
)
def test_what_is_not_modelled_is_listed(
    model: Any, sizes: tuple[int, ...], operators: list[str]
) -> None:
    x = torch.zeros(sizes, requires_grad=True)
    module = model if isinstance(model, nn.Module) else Call(model)
    analysis = analyze(module, (x,), device="cuda", loss=sum_magnitudes)
    text, report = read_text(analysis), json.loads(analysis.to_json())
    for operator in operators:
        name = f"aten.{operator}.default"
        reason = CUDA.unmodelled[getattr(torch.ops.aten, operator).default]
        (note,) = (note for note in report["notes"] if name in note)
        assert note.startswith("Memory inside ") and note.endswith(f" is not counted: {reason}.")
        assert note in " ".join(text.splitlines())
        assert name in {operation["name"] for operation in report["operations"]}


def sum_magnitudes(output: Any) -> Tensor:
    x: Tensor = output[0] if isinstance(output, tuple) else output
    return x.abs().sum()


def test_what_is_modelled_is_not_listed() -> None:
    graph = run_step(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), torch.zeros(4, 8))
    known = {str(operator) for operator in CUDA.unmodelled}
    assert not known & {operation.name for operation in graph.operations}
    analysis = analyze(nn.Linear(8, 8), ("4x8",), device="cuda")
    assert "not counted" not in read_text(analysis) + analysis.to_json()
