"""Memory of compiled code as it was published.

Attention without heads and its compiled form, in float32 and batches of 8, on an A100 with 80 GB:
github.com/damek/cs336-assignment2-systems, cs336_systems/outputs/attention_benchmark.md, written by
cs336_systems/benchmarking_scripts/attention_benchmarking_script.py. The columns, in MiB: after the
inputs were made, before backward, the difference, and the peaks of forwards and of whole steps.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fxmem
from benchmarks.compiled import compare, run_apart
from benchmarks.step import MODES

ROWS = {
    (16, 1024): ("18.2505", "82.3755", "64.125", "82.877", "211.501"),
    (64, 256): ("18.2505", "22.2817", "4.03125", "22.7832", "31.314"),
    (128, 16384): ("272.25", "16658.3", "16386", "16722.3", "49556.3"),
}


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bqd,bkd->bqk", q, k) / math.sqrt(k.shape[-1])
    weights = torch.exp(scores - torch.max(scores, dim=-1, keepdim=True)[0])
    return torch.einsum("bqk,bkd->bqd", weights / torch.sum(weights, dim=-1, keepdim=True), v)


def measure(width: int, length: int, attend: Callable[..., Tensor]) -> list[int]:
    q, k, v = (torch.randn(8, length, width, device="cuda", requires_grad=True) for _ in range(3))

    def step() -> tuple[Tensor, Tensor]:
        out = attend(q, k, v)
        loss = out.sum()
        loss.backward()
        q.grad = k.grad = v.grad = None
        return out, loss

    for _ in range(2):
        held = step()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        attend(q, k, v).sum()
    forward_peak, before = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    out = attend(q, k, v)  # held, with its graph, while the steps below run
    held = out, out.sum()
    after = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step()
    del held
    return [before, after, after - before, forward_peak, torch.cuda.max_memory_allocated()]


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore:Skipping serialization")
@pytest.mark.parametrize(("width", "length"), ROWS)
def test_compiled_attention_takes_what_was_published(width: int, length: int) -> None:
    with fxmem.record(gpu="a100-80gb", steps=100, compile=True) as recording:
        found = measure(width, length, torch.compile(attend))
    assert [f"{nbytes / 2**20:.6g}" for nbytes in found] == [*ROWS[width, length]]
    assert recording.notes


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler of C++")
@pytest.mark.parametrize("name", ["tied_weights", "reused_module", "checkpoint_non_reentrant"])
def test_a_step_that_inductor_compiles_for_the_cpu_takes_what_is_measured(name: str) -> None:
    real, ours = (run_apart(what, name, anew=True) for what in ("measure", "predict"))
    rows = [compare(name, mode, real[mode], ours[mode]) for mode in MODES]
    assert [(row[5], row[7]) for row in rows] == [("0", "yes"), ("0", "yes"), ("0", "")]
